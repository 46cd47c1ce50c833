//! The command line of `bench moe`.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use crossweft_collective::{DataType, Devices};
use crossweft_moe::{Layout, ScaleType};

use super::super::options::check_plot;
use super::batch::Recorded;
use crate::Format;
use crate::job::JobOptions;
use crate::values::{Device, dtype};

/// The most tokens of a rank: more would be a slip of the finger.
const MOST_TOKENS: u32 = 1 << 16;

/// Options of `bench moe`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Moe {
    /// The device to run on; `auto` takes GPUs if there is one for every rank.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,
    /// Number of ranks to start; under a launcher (torchrun, mpirun, srun) it gives the number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) ranks: Option<u32>,
    /// Start the ranks as threads of this process instead of processes.
    #[arg(long)]
    pub(crate) threads: bool,
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',',
          default_values_t = [Phase::Dispatch, Phase::Combine, Phase::Both])]
    pub(crate) phase: Vec<Phase>,
    /// How received tokens are laid out, one or several.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Name::LlExpertMajor])]
    pub(crate) layout: Vec<Name>,
    /// Tokens of each rank: a list (1,8,100), or a range that is gone through by doubling (1-8192).
    #[arg(long, value_name = "LIST", default_value = "1-128")]
    pub(crate) tokens: Tokens,
    /// Elements of a token.
    #[arg(long, value_name = "N", default_value_t = 7168, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub(crate) hidden: u32,
    /// Experts of all ranks together.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) experts: u32,
    /// Experts of each token; 8 unless given or recorded, or fewer if there are not so many experts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32))]
    pub(crate) top_k: Option<u32>,
    /// Type of tokens before a dispatch and after a combine: bf16, f16 or f32.
    #[arg(long, default_value = "bf16", value_parser = dtype)]
    pub(crate) dtype: DataType,
    /// How tokens travel in a dispatch: as they are, or quantised on the way to f8e4m3 with a scale for each 128 elements.
    #[arg(long, value_enum, default_value_t = Travel::Plain)]
    pub(crate) travel: Travel,
    /// Where tokens go: `uniform`; `zipf:EXPONENT`, in which expert e is chosen as often as 1/(e+1)^EXPONENT says, so
    /// that a larger exponent is a larger skew and expert 0, on rank 0, has most; or `file:PATH`, recorded: a token a
    /// line, its experts separated by spaces or commas, -1 for none.
    #[arg(long, value_name = "HOW", default_value = "uniform")]
    pub(crate) routing: Routing,
    /// Thread blocks of each rank: 1 on the CPU and 16 on a GPU unless given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) blocks: Option<u32>,
    /// Timed calls of each size; by default fewer for larger sizes.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iters: Option<u32>,
    /// Draw times and bandwidth by number of tokens, beside a copy of the same bytes: an SVG file.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Leave it to the system which cores the ranks run on, instead of binding each to one.
    #[arg(long)]
    pub(crate) no_bind: bool,
    /// Seed of tokens, weights and routing.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Seconds that any call may take before it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
    /// For people, or for programs.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Phase {
    /// Tokens to their experts.
    Dispatch,
    /// What the experts made of them, back.
    Combine,
    /// One right after the other, with nothing in between.
    Both,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Both => "both",
        }
    }
}

/// Layouts, as other libraries call them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// A row for each expert that a token is for, each expert with room for every token of all ranks.
    LlExpertMajor,
    /// A row for each token, each rank with room for all of its tokens.
    LlRankMajor,
    /// A row for each token, without gaps.
    HtFlat,
    /// A row for each expert that a token is for, without gaps.
    HtExpertMajor,
}

impl Name {
    pub(crate) fn layout(self) -> Layout {
        match self {
            Self::LlExpertMajor => Layout::ExpertMajor,
            Self::LlRankMajor => Layout::RankMajor,
            Self::HtFlat => Layout::Flat,
            Self::HtExpertMajor => Layout::ExpertPacked { alignment: 1 },
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::LlExpertMajor => "ll-expert-major",
            Self::LlRankMajor => "ll-rank-major",
            Self::HtFlat => "ht-flat",
            Self::HtExpertMajor => "ht-expert-major",
        }
    }
}

/// How tokens travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Travel {
    /// In their own type.
    Plain,
    /// In f8e4m3, with scales in f32.
    Fp8,
    /// In f8e4m3, with scales that are powers of two, a byte each.
    Fp8Ue8m0,
}

impl Travel {
    /// The scales, if there are any.
    pub(crate) fn scale_type(self) -> Option<ScaleType> {
        match self {
            Self::Plain => None,
            Self::Fp8 => Some(ScaleType::F32),
            Self::Fp8Ue8m0 => Some(ScaleType::Ue8m0),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fp8 => "fp8",
            Self::Fp8Ue8m0 => "fp8-ue8m0",
        }
    }
}

/// Numbers of tokens, in the order in which they are measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tokens(pub(crate) Vec<u32>);

impl FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let number = text.trim().parse().ok();
            number.filter(|n| *n <= MOST_TOKENS).ok_or_else(|| {
                format!(
                    "give numbers up to {MOST_TOKENS}: a list such as 1,8,100, or a range such as 1-8192"
                )
            })
        };
        let Some((first, last)) = text.split_once('-') else {
            return Ok(Self(text.split(',').map(number).collect::<Result<_, _>>()?));
        };
        let (first, last) = (number(first)?, number(last)?);
        if first == 0 || first > last {
            return Err("a range begins with 1 or more, and ends with no less".to_owned());
        }
        let doubled = std::iter::successors(Some(first), |n| Some(2 * n));
        Ok(Self(doubled.take_while(|n| *n <= last).collect()))
    }
}

/// Where tokens go.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Routing {
    /// Anywhere, as `zipf:0`.
    Zipf(f64),
    /// As a file says.
    File(PathBuf),
}

impl FromStr for Routing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "uniform" => Ok(Self::Zipf(0.0)),
            Some(("zipf", exponent)) => match exponent.parse() {
                Ok(exponent) if (0.0..=100.0).contains(&exponent) => Ok(Self::Zipf(exponent)),
                _ => Err("the exponent is a number from 0 to 100, as in zipf:1.2".to_owned()),
            },
            Some(("file", path)) => Ok(Self::File(path.into())),
            _ => Err("it is uniform, zipf:EXPONENT or file:PATH".to_owned()),
        }
    }
}

impl Routing {
    /// In words.
    pub(crate) fn words(&self) -> String {
        match self {
            Self::Zipf(0.0) => "uniform".to_owned(),
            Self::Zipf(exponent) => format!("zipf:{exponent}"),
            Self::File(path) => format!("file:{}", path.display()),
        }
    }
}

/// Bytes of a file of recorded routing, at most: what 16 ranks with the most tokens, of 32 experts each, may write.
const MOST_RECORDED: u64 = 1 << 27;

/// A file of text, however much a device in its place would have to say.
fn read(path: &Path) -> io::Result<String> {
    let mut text = Vec::new();
    let file = fs::File::open(path)?;
    if file.take(MOST_RECORDED + 1).read_to_end(&mut text)? as u64 > MOST_RECORDED {
        let much = format!("it has more than {} MiB", MOST_RECORDED >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, much));
    }
    String::from_utf8(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl Moe {
    /// What cannot be told from one option alone; and what was recorded, if anything was.
    pub(crate) fn check(&self) -> Result<Option<Recorded>, String> {
        let dtype = self.dtype;
        if !matches!(dtype, DataType::Bf16 | DataType::F16 | DataType::F32) {
            return Err(format!("--dtype {dtype}: tokens are bf16, f16 or f32"));
        }
        let hidden = self.hidden;
        let bytes = u64::from(hidden) * dtype.size() as u64;
        if !bytes.is_multiple_of(16) {
            return Err(format!(
                "--hidden {hidden}: a token of {bytes} bytes; it must be a multiple of 16"
            ));
        }
        if self.travel != Travel::Plain && !hidden.is_multiple_of(16) {
            return Err(format!(
                "--hidden {hidden}: quantised, it must be a multiple of 16"
            ));
        }
        let experts = self.experts;
        if let Some(top_k) = self.top_k.filter(|k| *k > experts) {
            return Err(format!("--top-k {top_k}, but there are {experts} experts"));
        }
        if let Some(plot) = &self.plot {
            check_plot(plot)?;
        }
        let Routing::File(path) = &self.routing else {
            return Ok(None);
        };
        let failed =
            |error: &dyn std::fmt::Display| format!("--routing file:{}: {error}", path.display());
        let text = read(path).map_err(|e| failed(&e))?;
        let recorded = Recorded::parse(&text, experts).map_err(|e| failed(&e))?;
        let found = recorded.top_k();
        match self.top_k {
            Some(top_k) if top_k != found => Err(failed(&format!(
                "tokens have {found} experts, but --top-k is {top_k}"
            ))),
            _ => Ok(Some(recorded)),
        }
    }

    /// The job that is to be run.
    pub(crate) fn job(&self, devices: Devices) -> JobOptions {
        let timeout = Duration::from_secs(self.timeout);
        let mut job = JobOptions::new(self.ranks, self.threads, devices, timeout, !self.no_bind);
        let most = self.tokens.0.iter().copied().max().unwrap_or(0);
        let row = u64::from(self.hidden) * self.dtype.size() as u64;
        // What a rank sends, what comes of it, and as much on the way.
        job.memory = 3 * u64::from(most) * row;
        job
    }

    /// Thread blocks of each rank on a device.
    pub(crate) fn blocks(&self, device: &crossweft_hal::Device) -> u32 {
        let usual = match device {
            crossweft_hal::Device::Cpu => 1,
            _ => 16,
        };
        self.blocks.unwrap_or(usual)
    }

    /// Experts of each token.
    pub(crate) fn top_k(&self, recorded: Option<&Recorded>) -> u32 {
        let recorded = recorded.map(Recorded::top_k);
        let given = self.top_k.or(recorded);
        given.unwrap_or_else(|| self.experts.min(8))
    }

    /// Timed calls that move so many bytes on a rank.
    pub(crate) fn iterations(&self, bytes: u64) -> usize {
        let usual = match bytes {
            0..=262_144 => 100,
            262_145..=4_194_304 => 30,
            4_194_305..=67_108_864 => 10,
            _ => 5,
        };
        self.iters.map_or(usual, |iters| iters as usize)
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    #[test]
    fn recorded_tokens_keep_their_number_of_experts() {
        let top_k = |arguments: &str, recorded: Option<&str>| {
            let command = Moe::augment_args(clap::Command::new("moe").no_binary_name(true));
            let matches = command.try_get_matches_from(arguments.split_whitespace());
            let options = Moe::from_arg_matches(&matches.unwrap()).unwrap();
            let recorded = recorded.map(|text| Recorded::parse(text, options.experts).unwrap());
            options.top_k(recorded.as_ref())
        };
        assert_eq!(top_k("", None), 8);
        assert_eq!(top_k("--experts 5", None), 5);
        assert_eq!(top_k("--experts 5 --top-k 3", None), 3);
        assert_eq!(top_k("--experts 5", Some("4 0 -1")), 3);
        assert_eq!(top_k("--experts 1", Some("0 -1")), 2);
    }

    #[test]
    fn tokens_are_a_list_or_a_range() {
        let tokens = |text: &str| text.parse::<Tokens>().map(|tokens| tokens.0);
        assert_eq!(tokens("0,7, 100"), Ok(vec![0, 7, 100]));
        assert_eq!(tokens("1-8"), Ok(vec![1, 2, 4, 8]));
        assert_eq!(tokens("3-20"), Ok(vec![3, 6, 12]));
        for text in ["", "x", "8-1", "0-4", "1-", "1,-2", "65537", "1-2-3"] {
            assert!(tokens(text).is_err(), "{text}");
        }
    }

    #[test]
    fn routings_are_named() {
        let routing = |text: &str| text.parse::<Routing>();
        assert_eq!(routing("uniform"), Ok(Routing::Zipf(0.0)));
        assert_eq!(routing("zipf:1.5"), Ok(Routing::Zipf(1.5)));
        assert_eq!(routing("file:a:b"), Ok(Routing::File("a:b".into())));
        for text in [
            "zipf",
            "zipf:",
            "zipf:-1",
            "zipf:nan",
            "uniform:1",
            "skewed",
        ] {
            assert!(routing(text).is_err(), "{text}");
        }
    }
}

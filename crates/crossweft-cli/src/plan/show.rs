//! `plan show`.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::Args;
use crossweft_plan::check;
use crossweft_plan::cost::{Topology, TopologyError};
use crossweft_plan::show::{self, Page, ShowError};

use super::source::{STANDARD, Source, SourceError};
use crate::exit::Exit;
use crate::values::Size;
use crate::{print, print_line};

/// Options of `plan show`.
#[derive(Debug, Args)]
pub(crate) struct Show {
    /// The plan file, of crossweft or of MSCCL++; `-` is standard input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The page to write; `-` is standard output.
    #[arg(short, long, value_name = "PAGE")]
    output: PathBuf,
    /// The machine to predict times for: h200, cpu, or a topology file.
    #[arg(long, default_value = "h200", value_name = "FILE|NAME")]
    topology: PathBuf,
    /// Bytes of messages that get a timeline (one block of input or output); K, M and G are powers of
    /// 1024. By default some that the plan is meant for.
    #[arg(long, value_name = "BYTES", num_args = 1..)]
    bytes: Vec<Size>,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
enum PageError {
    #[error("{0}")]
    Source(#[from] SourceError),
    #[error("{file}: {source}")]
    File { file: String, source: io::Error },
    #[error("{file}: {source}")]
    Topology { file: String, source: TopologyError },
    #[error("{file}: {source}")]
    Show { file: String, source: ShowError },
    #[error("{0}")]
    Print(String),
}

pub(super) fn run(options: &Show) -> Exit {
    match write(options) {
        Ok(()) => Exit::Ok,
        Err(error) => {
            // A plan's name may be anything.
            crate::complain(&format!("error: {error}").replace(['\n', '\r'], " "));
            Exit::Usage
        }
    }
}

fn write(options: &Show) -> Result<(), PageError> {
    let topology = topology(&options.topology)?;
    let source = Source::read_layout(&options.file)?;
    source.warn(&options.file);
    let plan = &source.plan;
    let found = check::check(plan, &check::Options::default());
    let mut wanted = show::Options::default();
    wanted.bytes = options.bytes.iter().map(|size| size.0).collect();
    let page = show::page(plan, &found, &topology, &wanted).map_err(|source| PageError::Show {
        file: options.file.display().to_string(),
        source,
    })?;
    let verdict = match found.len() {
        0 => "accepted".to_owned(),
        1 => "refused with 1 fault".to_owned(),
        faults => format!("refused with {faults} faults"),
    };
    let (collective, ranks) = (plan.collective.name(), plan.world_size());
    let what = format!("{collective} of {ranks} ranks, {verdict}");
    let times = predicted(&page);
    let kib = page.html.len().div_ceil(1024);
    let line = format!("{what}; on {}: {times}; {kib} KiB", topology.name);
    let failed = |source| PageError::File {
        file: options.output.display().to_string(),
        source,
    };
    if options.output.as_os_str() == STANDARD {
        print(&page.html).map_err(PageError::Print)?;
        crate::complain(&line);
        return Ok(());
    }
    fs::write(&options.output, &page.html).map_err(failed)?;
    print_line(&format!("{}: {line}", options.output.display())).map_err(PageError::Print)
}

/// One of the built-in topologies, or a file.
fn topology(name: &Path) -> Result<Topology, PageError> {
    /// Far more than any topology has.
    const LARGEST: u64 = 1 << 20;
    if let Some(topology) = name.to_str().and_then(Topology::built_in) {
        return Ok(topology);
    }
    let file = || name.display().to_string();
    let mut text = Vec::new();
    let read = fs::File::open(name).and_then(|file| file.take(LARGEST).read_to_end(&mut text));
    read.map_err(|source| PageError::File {
        file: file(),
        source,
    })?;
    Topology::from_json(&text).map_err(|source| PageError::Topology {
        file: file(),
        source,
    })
}

fn predicted(page: &Page) -> String {
    let one = |(bytes, us): &(u64, Option<f64>)| match us {
        Some(us) => format!("{} takes {us:.2} us", size(*bytes)),
        None => format!("{} never ends", size(*bytes)),
    };
    let all: Vec<String> = page.predicted.iter().map(one).collect();
    all.join(", ")
}

/// Bytes as people write them, where that is exact.
fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = |(shift, _): &(u32, &str)| bytes.trailing_zeros() >= *shift;
    match units.into_iter().find(fits) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} B"),
    }
}

//! Tables, JSON and the picture.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::super::plot::{Line, draw_lines};
use super::options::{Name, Phase};

/// One number of tokens in one layout, in one phase.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// What was timed.
    pub(crate) phase: &'static str,
    /// How received tokens were laid out.
    pub(crate) layout: &'static str,
    /// Tokens of each rank.
    pub(crate) tokens: u32,
    /// Bytes of the rows that the busiest rank received: one row for each token that is for any of its experts, its own
    /// included.
    pub(crate) bytes: u64,
    /// Timed calls.
    pub(crate) iterations: usize,
    /// Median time of a call in microseconds, of the slowest rank each time.
    pub(crate) time_us_p50: f64,
    /// The same, least.
    pub(crate) time_us_min: f64,
    /// Bytes by median time.
    pub(crate) gbs: f64,
    /// Median time in which every rank copies so many bytes into shared memory, of the slowest rank each time.
    pub(crate) copy_us_p50: f64,
    /// Bytes by that time.
    pub(crate) copy_gbs: f64,
    /// Bytes of memory that the group and the handle have on this rank.
    pub(crate) allocated: u64,
    /// Wrong elements, rows, counts and weights of all ranks.
    pub(crate) wrong: u64,
}

/// Median and least.
pub(crate) fn summary(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let p50 = times.get(times.len() / 2).copied();
    (
        p50.unwrap_or(0.0),
        times.first().copied().unwrap_or_default(),
    )
}

/// GB/s.
pub(crate) fn rate(bytes: u64, us: f64) -> f64 {
    match us > 0.0 {
        // Bytes per microsecond are MB/s.
        true => bytes as f64 / us / 1000.0,
        false => 0.0,
    }
}

impl Row {
    /// Of so many bytes: times of the slowest rank of each call, and of copies; bytes allocated, and what was wrong.
    pub(crate) fn new(
        (phase, name, tokens): (Phase, Name, u32),
        bytes: u64,
        (times, copies): (Vec<f64>, Vec<f64>),
        (allocated, wrong): (u64, u64),
    ) -> Self {
        let iterations = times.len();
        let (time_us_p50, time_us_min) = summary(times);
        let (copy_us_p50, _) = summary(copies);
        Self {
            phase: phase.name(),
            layout: name.name(),
            tokens,
            bytes,
            iterations,
            time_us_p50,
            time_us_min,
            gbs: rate(bytes, time_us_p50),
            copy_us_p50,
            copy_gbs: rate(bytes, copy_us_p50),
            allocated,
            wrong,
        }
    }

    /// The row of the table.
    pub(crate) fn line(&self) -> String {
        let Self {
            phase,
            layout,
            tokens,
            bytes,
            allocated,
            wrong,
            ..
        } = self;
        format!(
            "{phase:<10} {layout:<16} {tokens:>7} {bytes:>12} {:>10.2} {:>10.2} {:>7.2} {:>10.2} {:>7.2} {allocated:>12} {wrong:>7}",
            self.time_us_p50, self.time_us_min, self.gbs, self.copy_us_p50, self.copy_gbs
        )
    }
}

/// The facts that hold for all rows.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Header {
    /// Version of this program.
    pub(crate) version: &'static str,
    /// The device.
    pub(crate) device: &'static str,
    /// Number of ranks.
    pub(crate) ranks: u32,
    /// What they are.
    pub(crate) started_as: String,
    /// The processor, and how many of its cores are usable.
    pub(crate) machine: String,
    /// Elements of a token.
    pub(crate) hidden: u32,
    /// Experts of all ranks.
    pub(crate) experts: u32,
    /// Experts of a token.
    pub(crate) top_k: u32,
    /// Type of tokens before a dispatch and after a combine.
    pub(crate) dtype: &'static str,
    /// How they travel in a dispatch.
    pub(crate) travel: &'static str,
    /// Where tokens go.
    pub(crate) routing: String,
    /// Seed of tokens, weights and routing.
    pub(crate) seed: u64,
    /// Thread blocks of each rank.
    pub(crate) blocks: u32,
    /// How calls are timed.
    pub(crate) clock: &'static str,
}

impl Header {
    /// The lines above the table.
    pub(crate) fn lines(&self) -> String {
        let Self {
            version,
            device,
            ranks,
            started_as,
            machine,
            hidden,
            experts,
            top_k,
            dtype,
            travel,
            routing,
            seed,
            blocks,
            clock,
        } = self;
        let mut text = String::new();
        let _ = writeln!(
            text,
            "# crossweft {version} moe: {ranks} ranks ({started_as}) on {device}, {blocks} thread blocks each"
        );
        let _ = writeln!(text, "# machine: {machine}");
        let _ = writeln!(
            text,
            "# {experts} experts, top-{top_k}, tokens of {hidden} {dtype}, travelling {travel}, routing {routing}, seed {seed}"
        );
        let _ = writeln!(text, "# clock: {clock}");
        let _ = writeln!(
            text,
            "# bytes: what the busiest rank receives, a row for each token that is for it; copy: every rank copies as many into shared memory"
        );
        let _ = writeln!(
            text,
            "#{:<9} {:<16} {:>7} {:>12} {:>10} {:>10} {:>7} {:>10} {:>7} {:>12} {:>7}",
            "phase",
            "layout",
            "tokens",
            "size",
            "p50",
            "min",
            "",
            "copy p50",
            "copy",
            "allocated",
            "#wrong"
        );
        let _ = write!(
            text,
            "#{:<9} {:<16} {:>7} {:>12} {:>10} {:>10} {:>7} {:>10} {:>7} {:>12} {:>7}",
            "", "", "", "(B)", "(us)", "(us)", "(GB/s)", "(us)", "(GB/s)", "(B)", ""
        );
        text
    }
}

/// The JSON object.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// What holds for all rows.
    #[serde(flatten)]
    pub(crate) header: Header,
    /// One for each number of tokens, layout and phase.
    pub(crate) rows: Vec<Row>,
}

impl Report {
    /// Draws it: a line for each phase and layout, and one for copies.
    pub(crate) fn draw(&self, path: &Path) -> Result<(), String> {
        let mut lines: Vec<Line> = Vec::new();
        let mut copies: Vec<(f64, f64, f64)> = Vec::new();
        // A logarithmic axis has no 0.
        for row in self.rows.iter().filter(|row| row.tokens > 0) {
            let name = format!("{}, {}", row.phase, row.layout);
            let tokens = f64::from(row.tokens);
            let point = (tokens, row.time_us_p50, row.gbs);
            match lines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, points)) => points.push(point),
                None => lines.push((name, vec![point])),
            }
            // Those of the first line: other phases may move other bytes.
            if lines.len() == 1 {
                copies.push((tokens, row.copy_us_p50, row.copy_gbs));
            }
        }
        if let Some((first, _)) = lines.first() {
            lines.push((format!("a copy of the bytes of {first}"), copies));
        }
        let Header {
            ranks,
            hidden,
            dtype,
            experts,
            top_k,
            ..
        } = &self.header;
        let title =
            format!("{experts} experts on {ranks} ranks, top-{top_k}, tokens of {hidden} {dtype}");
        draw_lines(path, &title, ("tokens of each rank", "GB/s"), &lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_summed_up() {
        assert_eq!(summary(vec![3.0, 1.0, 2.0]), (2.0, 1.0));
        assert_eq!(summary(Vec::new()), (0.0, 0.0));
        assert!((rate(3000, 1.5) - 2.0).abs() < 1e-12);
        assert!(rate(1, 0.0) < 1e-12);
    }
}

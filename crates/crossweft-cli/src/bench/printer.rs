//! Prints on rank 0: rows as they come, progress on a terminal.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::options::Bench as Options;
use super::plot;
use super::report::{Header, Report, Row};
use crate::{Format, complain, print_line};

/// A bar of so many steps, if this is the rank to draw it and there is a terminal.
pub(super) fn progress(active: bool, steps: usize) -> ProgressBar {
    if !active || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Prints on rank 0: rows as they come, progress on a terminal.
pub(super) struct Printer {
    active: bool,
    /// Whether rows are for programs, and come when all are there.
    is_json: bool,
    report: Report,
    plot: Option<PathBuf>,
    progress: ProgressBar,
}

impl Printer {
    /// Prints what holds for all rows.
    pub(super) fn new(
        options: &Options,
        rank: u32,
        header: Header,
        sizes: usize,
    ) -> Result<Self, String> {
        let active = rank == 0;
        let progress = progress(active, sizes);
        let is_json = matches!(options.common.format, Format::Json);
        if active && !is_json {
            print_line(&header.lines())?;
        }
        let rows = Vec::new();
        Ok(Self {
            active,
            is_json,
            report: Report { header, rows },
            plot: options.common.plot.clone(),
            progress,
        })
    }

    pub(super) fn begin(&self, bytes: u64) {
        self.progress
            .set_message(format!("measuring {bytes} bytes"));
    }

    pub(super) fn row(&mut self, row: Row) -> Result<(), String> {
        self.progress.inc(1);
        if !self.active {
            return Ok(());
        }
        if !self.is_json {
            self.progress.suspend(|| print_line(&row.line()))?;
        }
        self.report.rows.push(row);
        Ok(())
    }

    pub(super) fn end(self) -> Result<(), String> {
        self.progress.finish_and_clear();
        if !self.active {
            return Ok(());
        }
        let Report { header, rows } = &self.report;
        if self.is_json {
            print_line(&serde_json::to_string_pretty(&self.report).unwrap_or_default())?;
        }
        match &self.plot {
            None => Ok(()),
            Some(path) => {
                plot::draw(path, header, rows)?;
                complain(&format!("drawn: {}", path.display()));
                Ok(())
            }
        }
    }
}

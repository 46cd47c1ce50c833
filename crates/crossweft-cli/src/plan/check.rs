//! `plan check`.

use std::path::{Path, PathBuf};

use clap::Args;
use crossweft_plan::PlanError;
use crossweft_plan::check::{self, Diagnostic};
use serde::Serialize;

use super::source::{Source, SourceError};
use crate::exit::Exit;
use crate::{Format, ended, print_line};

/// Options of `plan check`.
#[derive(Debug, Args)]
pub(crate) struct Check {
    /// Plan files, of crossweft or of MSCCL++; `-` is standard input.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// For people, or for programs: one JSON object a line for each file.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

pub(super) fn run(options: &Check) -> Exit {
    let mut worst = Exit::Ok;
    for file in &options.files {
        let (exit, report) = one(file);
        let printed = print_line(&match options.format {
            Format::Table => report.table(),
            Format::Json => serde_json::to_string(&report).unwrap_or_default(),
        });
        if printed.is_err() {
            return ended(printed);
        }
        worst = worst.worse_input(exit);
    }
    worst
}

/// What is said of a plan.
#[derive(Debug, Serialize)]
struct Report {
    file: String,
    ok: bool,
    /// Why it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Summary>,
    diagnostics: Vec<Fault>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// What it is for.
#[derive(Debug, Serialize)]
struct Summary {
    name: String,
    collective: crossweft_plan::Collective,
    ranks: u32,
}

#[derive(Debug, Serialize)]
struct Fault {
    rank: Option<u32>,
    thread_block: Option<u32>,
    op: Option<u32>,
    code: &'static str,
    message: String,
}

impl From<Diagnostic> for Fault {
    fn from(diagnostic: Diagnostic) -> Self {
        Self {
            rank: diagnostic.rank,
            thread_block: diagnostic.thread_block,
            op: diagnostic.op,
            code: diagnostic.code.name(),
            message: diagnostic.message,
        }
    }
}

impl Fault {
    /// A file that can be read, but whose plan has no sound structure.
    fn of_structure(error: &PlanError) -> Self {
        let (rank, thread_block, op) = match *error {
            PlanError::Op {
                rank, block, op, ..
            } => (Some(rank), Some(block), Some(op)),
            _ => (None, None, None),
        };
        Self {
            rank,
            thread_block,
            op,
            code: check::Code::Structure.name(),
            message: error.to_string(),
        }
    }
}

fn one(file: &Path) -> (Exit, Report) {
    let mut report = Report {
        file: file.display().to_string(),
        ok: false,
        error: None,
        summary: None,
        diagnostics: Vec::new(),
        warnings: Vec::new(),
    };
    match Source::read(file) {
        Ok(source) => {
            let found = check::check(&source.plan, &check::Options::default());
            report.ok = found.is_empty();
            report.diagnostics = found.into_iter().map(Fault::from).collect();
            report.summary = Some(Summary {
                name: source.plan.name.clone(),
                collective: source.plan.collective,
                ranks: source.plan.world_size(),
            });
            report.warnings = source.warnings;
        }
        Err(SourceError::Plan { source, .. }) if !matches!(source, PlanError::Format { .. }) => {
            report.diagnostics = vec![Fault::of_structure(&source)];
        }
        Err(error) => {
            crate::complain(&format!("error: {error}"));
            report.error = Some(error.to_string());
            return (Exit::Usage, report);
        }
    }
    let exit = if report.ok { Exit::Ok } else { Exit::Wrong };
    (exit, report)
}

impl Report {
    fn table(&self) -> String {
        let file = &self.file;
        let what = self.summary.as_ref().map_or_else(String::new, |summary| {
            let (collective, ranks) = (summary.collective.name(), summary.ranks);
            format!(" (`{}`: {collective} of {ranks} ranks)", summary.name)
        });
        let verdict = match (&self.error, self.ok) {
            (Some(_), _) => "unreadable",
            (None, true) => "ok",
            (None, false) => "refused",
        };
        let mut text = format!("{file}: {verdict}{what}");
        for warning in &self.warnings {
            text += &format!("\n  warning: {warning}");
        }
        for fault in &self.diagnostics {
            text += &format!("\n  {}: ", fault.code);
            let place = [
                ("rank", fault.rank),
                ("thread block", fault.thread_block),
                ("op", fault.op),
            ];
            // Faults of structure name their place themselves.
            if fault.code != check::Code::Structure.name() {
                for (what, number) in place {
                    if let Some(number) = number {
                        text += &format!("{what} {number}, ");
                    }
                }
            }
            text += &fault.message;
        }
        text
    }
}

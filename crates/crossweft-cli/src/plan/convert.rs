//! `plan convert`.

use std::fs;
use std::io;
use std::path::PathBuf;

use clap::Args;
use crossweft_plan::{PlanError, mscclpp};

use super::source::{Format, STANDARD, Source, SourceError};
use crate::exit::Exit;
use crate::{ended, print_line};

/// Options of `plan convert`.
#[derive(Debug, Args)]
pub(crate) struct Convert {
    /// The plan file to read; `-` is standard input.
    #[arg(value_name = "IN")]
    from: PathBuf,
    /// The plan file to write; `-` is standard output.
    #[arg(value_name = "OUT")]
    to: PathBuf,
    /// The format to write; by default the other one.
    #[arg(long = "to", value_enum, value_name = "FORMAT")]
    format: Option<Format>,
}

/// Why a plan was not converted.
#[derive(Debug, thiserror::Error)]
enum ConvertError {
    #[error("{0}")]
    Source(#[from] SourceError),
    #[error("{file} cannot be written as a plan of MSCCL++: {source}")]
    Export { file: String, source: PlanError },
    #[error("{file}: {source}")]
    Write { file: String, source: io::Error },
    #[error("{0}")]
    Print(String),
}

pub(super) fn run(options: &Convert) -> Exit {
    ended(convert(options))
}

fn convert(options: &Convert) -> Result<(), ConvertError> {
    let source = Source::read(&options.from)?;
    source.warn(&options.from);
    let format = options.format.unwrap_or(match source.format {
        Format::Crossweft => Format::Mscclpp,
        Format::Mscclpp => Format::Crossweft,
    });
    let text = match format {
        Format::Crossweft => source.plan.to_json(),
        Format::Mscclpp => {
            mscclpp::export(&source.plan).map_err(|source| ConvertError::Export {
                file: options.from.display().to_string(),
                source,
            })?
        }
    };
    if options.to.as_os_str() == STANDARD {
        return print_line(&text).map_err(ConvertError::Print);
    }
    fs::write(&options.to, text + "\n").map_err(|source| ConvertError::Write {
        file: options.to.display().to_string(),
        source,
    })
}

//! Reading plan files.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crossweft_plan::{Plan, PlanError, json, mscclpp};

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub(super) enum SourceError {
    #[error("{file}: {source}")]
    Read { file: String, source: io::Error },
    /// Not a plan, or an unsound one.
    #[error("{file}: {source}")]
    Plan { file: String, source: PlanError },
}

/// A plan from a file.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) plan: Plan,
    pub(super) format: Format,
    pub(super) warnings: Vec<String>,
}

/// File formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// Our own.
    Crossweft,
    /// Execution plans of MSCCL++.
    Mscclpp,
}

/// What stands for standard input, or output.
pub(super) const STANDARD: &str = "-";

impl Source {
    /// Reads a plan of either format.
    pub(super) fn read(path: &Path) -> Result<Self, SourceError> {
        let source = Self::read_layout(path)?;
        source.plan.validate().map_err(|error| SourceError::Plan {
            file: path.display().to_string(),
            source: error,
        })?;
        Ok(source)
    }

    /// Reads a plan of either format that is to be looked at, not run.
    pub(super) fn read_layout(path: &Path) -> Result<Self, SourceError> {
        let file = || path.display().to_string();
        let text = read(path).map_err(|source| SourceError::Read {
            file: file(),
            source,
        })?;
        let plan = |source| SourceError::Plan {
            file: file(),
            source,
        };
        if mscclpp::is_mscclpp(&text) {
            let mscclpp::Imported { plan, warnings } =
                mscclpp::import_layout(&text).map_err(plan)?;
            let format = Format::Mscclpp;
            return Ok(Self {
                plan,
                format,
                warnings,
            });
        }
        Ok(Self {
            plan: Plan::layout_from_json(&text).map_err(plan)?,
            format: Format::Crossweft,
            warnings: Vec::new(),
        })
    }

    /// Says what is odd about the file.
    pub(super) fn warn(&self, path: &Path) {
        for warning in &self.warnings {
            crate::complain(&format!("warning: {}: {warning}", path.display()));
        }
    }
}

/// At most one byte more than a plan may have, however much there is: a pipe may never end.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let limit = json::MAX_BYTES as u64 + 1;
    let mut text = Vec::new();
    if path.as_os_str() == STANDARD {
        io::stdin().lock().take(limit).read_to_end(&mut text)?;
    } else {
        File::open(path)?.take(limit).read_to_end(&mut text)?;
    }
    Ok(text)
}

//! From a program to a checked plan.

use crossweft_device::ReduceOp;

use super::cells::Cells;
use super::error::{Error, Fault, Source};
use super::fuse::fuse;
use super::instances::replicate;
use super::last::mark;
use super::minimise::minimise;
use super::options::MINIMISED_RANKS;
use super::order::{Missing, missing, sequence};
use super::pairing::unpaired;
use super::program::Program;
use super::resources::{Assigned, assign};
use super::sync::insert;
use super::within;
use crate::check::{self, Diagnostic, check};
use crate::place::{Origin, place_all};
use crate::plan::{Plan, RankProgram};

/// A plan that the checker has accepted, and where it comes from.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Compiled {
    /// The plan.
    pub plan: Plan,
    /// The line of each operation.
    pub sources: Sources,
}

/// The line of the user's program that each operation of a plan comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    lines: Vec<Source>,
    /// By rank, thread block and operation.
    of: Vec<Vec<Vec<Lines>>>,
}

/// The line of an operation, and of those inside it, if it is a loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lines {
    pub(super) own: u32,
    pub(super) inner: Vec<u32>,
}

impl Sources {
    /// The line of operation `op` of thread block `block` of `rank`, if there is such an operation; of its
    /// operation `inner`, if it is a loop.
    #[must_use]
    pub fn get(&self, rank: u32, block: u32, op: u32, inner: Option<u32>) -> Option<&Source> {
        let block = self.of.get(rank as usize)?.get(block as usize)?;
        let lines = block.get(op as usize)?;
        let line = match inner {
            Some(inner) => lines.inner.get(inner as usize)?,
            None => &lines.own,
        };
        self.lines.get(*line as usize)
    }

    fn fault(&self, diagnostic: Diagnostic) -> Fault {
        let at = match (diagnostic.rank, diagnostic.thread_block, diagnostic.op) {
            (Some(rank), Some(block), Some(op)) => {
                self.get(rank, block, op, diagnostic.inner).cloned()
            }
            _ => None,
        };
        let other = diagnostic.other.and_then(|place| {
            self.get(place.rank, place.thread_block, place.op, place.inner)
                .cloned()
        });
        Fault {
            at,
            other,
            diagnostic,
        }
    }
}

impl Program {
    /// Compiles the program and checks the plan.
    ///
    /// # Errors
    /// [`Error::Faults`] with what the checker finds, each with its line; [`Error::Plan`] if it passes a limit of
    /// plans.
    pub fn compile(&self) -> Result<Compiled, Error> {
        if let Some((index, diagnostic)) = unpaired(self) {
            let line = self.trace.instrs[index].source as usize;
            return Err(self.refuse(vec![Fault {
                at: self.sources.get(line).cloned(),
                other: None,
                diagnostic,
            }]));
        }
        let mut program = replicate(self);
        if self.options.auto_sync {
            let missing = program.lacking();
            insert(&mut program, &missing);
        }
        program.mark_last();
        if self.options.fuse {
            fuse(&mut program);
        }
        if self.options.auto_sync
            && let Some(cells) = Cells::new(&program)
        {
            within::insert(&mut program, &cells);
        }
        let compiled = program.lower();
        let faults = check(&compiled.plan, &check::Options::default());
        if faults.is_empty() {
            return Ok(compiled);
        }
        let faults = faults.into_iter();
        let faults = faults.map(|fault| compiled.sources.fault(fault));
        Err(self.refuse(faults.collect()))
    }

    fn refuse(&self, faults: Vec<Fault>) -> Error {
        Error::Faults {
            program: self.options.name.clone(),
            faults,
        }
    }

    /// Marks the last reductions, where the plan may be for averages.
    fn mark_last(&mut self) {
        let may_divide = matches!(self.options.reduce_op, None | Some(ReduceOp::Avg));
        if !may_divide || !self.options.collective.reduces() {
            return;
        }
        if let Some(cells) = Cells::new(self)
            && let Some(sequence) = sequence(self, &cells)
        {
            mark(self, &cells, &sequence);
        }
    }

    /// The synchronisation across thread blocks and ranks that is missing.
    pub(super) fn lacking(&self) -> Missing {
        // What has more cells is too large for the checker, which says so.
        let Some(cells) = Cells::new(self) else {
            return Missing::default();
        };
        let missing = missing(self, &cells);
        if !self.options.minimise || self.options.ranks > MINIMISED_RANKS {
            return missing;
        }
        // One fault is enough.
        let options = check::Options {
            max_diagnostics: 1,
            ..check::Options::default()
        };
        minimise(missing, |missing| {
            let mut program = self.clone();
            insert(&mut program, missing);
            check(&program.lower().plan, &options).is_empty()
        })
    }

    /// The plan that the program is, as it is.
    pub(super) fn lower(&self) -> Compiled {
        let options = &self.options;
        let Assigned {
            programs,
            raw,
            sources,
        } = assign(&self.trace, options.ranks);
        let placed = place_all(raw, &self.spare, self.shape.chunks);
        let ranks = programs.into_iter().zip(placed.blocks);
        let ranks = ranks.map(|(program, blocks)| RankProgram { blocks, ..program });
        let of = sources.iter().zip(placed.origins).map(|(blocks, origins)| {
            let blocks = blocks.iter().zip(origins);
            let lines = |(lines, origins): (&Vec<Lines>, Vec<Origin>)| {
                let line = |origin: &Origin| {
                    let Lines { own, inner } = &lines[origin.index as usize];
                    let inner = origin.inner.iter().map(|index| inner[*index as usize]);
                    Lines {
                        own: *own,
                        inner: inner.collect(),
                    }
                };
                origins.iter().map(line).collect()
            };
            blocks.map(lines).collect()
        });
        let sources = Sources {
            lines: self.sources.clone(),
            of: of.collect(),
        };
        let plan = Plan {
            name: options.name.clone(),
            collective: options.collective,
            reduce_op: options.reduce_op,
            packet: options.packet,
            in_place: options.in_place,
            chunks: self.shape.chunks,
            equal_chunks: placed.equal_chunks,
            input_blocks: self.shape.blocks.0,
            output_blocks: self.shape.blocks.1,
            outputs: self.outputs.clone(),
            message_bytes: options.message_bytes,
            scratch_slots: placed.scratch_slots,
            double_scratch: options.double_scratch && placed.scratch_slots > 0,
            packet_slots: placed.packet_slots,
            ranks: ranks.collect(),
        };
        Compiled { plan, sources }
    }
}

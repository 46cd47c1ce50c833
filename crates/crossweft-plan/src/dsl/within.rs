//! Synchronisation inside thread blocks: the threads of a block run side by side, so that they have to meet before
//! one instruction reads what another has written, or writes what it has read or written.

use std::collections::HashMap;

use super::cells::Cells;
use super::fuse::{syncs_before, syncs_behind};
use super::program::Program;
use super::trace::Instr;
use crate::place::{Data, Kind, Raw};
use crate::plan::Op;

/// Inserts a [`Op::Sync`] before every instruction that touches what another of its block has touched since the
/// threads last met, one of the two writing.
pub(super) fn insert(program: &mut Program, cells: &Cells) {
    let mut blocks: HashMap<(u32, u32), Touched> = HashMap::new();
    let mut all = Vec::with_capacity(program.trace.instrs.len());
    for instr in std::mem::take(&mut program.trace.instrs) {
        let touched = blocks.entry((instr.rank, instr.block)).or_default();
        match &instr.raw {
            Raw::Data(data) => {
                let is_put = matches!(data.kind, Kind::Put { .. });
                if is_put {
                    touched.clear();
                } else if touched.conflicts(cells, data) {
                    touched.clear();
                    all.push(Instr {
                        raw: Raw::Other(Op::Sync),
                        ..instr.clone()
                    });
                }
                // A put ends with the threads meeting, too.
                if !is_put {
                    touched.add(cells, data);
                }
            }
            Raw::Other(op) if syncs_before(op) || syncs_behind(op) => touched.clear(),
            _ => {}
        }
        all.push(instr);
    }
    program.trace.instrs = all;
}

/// What a block has touched since its threads last met: cells, and whether they were written.
#[derive(Default)]
struct Touched(HashMap<usize, bool>);

impl Touched {
    fn clear(&mut self) {
        self.0.clear();
    }

    fn conflicts(&self, cells: &Cells, data: &Data) -> bool {
        let mut read = data.from.iter().flat_map(|from| cells.of(from, data));
        let mut written = data.to.iter().flat_map(|to| cells.of(to, data));
        // Whoever reads packets waits for them.
        read.any(|cell| self.0.get(&cell) == Some(&true) && !cells.is_packet(cell))
            || written.any(|cell| self.0.contains_key(&cell))
    }

    fn add(&mut self, cells: &Cells, data: &Data) {
        for cell in data.from.iter().flat_map(|from| cells.of(from, data)) {
            self.0.entry(cell).or_insert(false);
        }
        for cell in data.to.iter().flat_map(|to| cells.of(to, data)) {
            self.0.insert(cell, true);
        }
    }
}

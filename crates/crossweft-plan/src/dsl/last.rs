//! Which reductions are the last ones: averages divide there.

use super::cells::Cells;
use super::program::Program;
use crate::place::{Kind, Raw};

/// Marks the reductions, run in this order, whose results hold the inputs of all ranks.
pub(super) fn mark(program: &mut Program, cells: &Cells, sequence: &[usize]) {
    let ranks = program.options.ranks;
    // By cell: how many ranks' inputs are in it.
    let mut held: Vec<u32> = (0..cells.len(ranks))
        .map(|cell| u32::from(cells.is_input(cell)))
        .collect();
    for &index in sequence {
        let Raw::Data(data) = &mut program.trace.instrs[index].raw else {
            continue;
        };
        let mut sums: Vec<u32> = Vec::new();
        for from in &data.from {
            let from = cells.of(from, data);
            sums.resize(from.len(), 0);
            for (sum, cell) in sums.iter_mut().zip(from) {
                *sum = sum.saturating_add(held[cell]);
            }
        }
        for to in &data.to {
            for (cell, sum) in cells.of(to, data).zip(&sums) {
                held[cell] = *sum;
            }
        }
        if let Kind::Reduce { last, .. } = &mut data.kind {
            *last = ranks > 1 && sums.iter().all(|sum| *sum == ranks);
        }
    }
}

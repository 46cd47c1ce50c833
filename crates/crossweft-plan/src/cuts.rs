//! Where operations cut the same data in different ways.
//!
//! A slice ends at whole granules, rounded up, so ends of slices come in the same order for every size only where data is
//! cut in one way: into as many slices of the same chunks, or not at all. Four slices of 5 granules end at 2, 4, 5 and 5,
//! two of them at 3 and 5: the first of two is of the second of four then. With a multiple of 4 granules it is not.

use std::collections::{BTreeSet, HashMap};

use crate::numbers::{gcd, lcm};
use crate::place::in_larger_buffer;
use crate::plan::{Buffer, InPlace, Plan};

/// Chunks of a buffer that are cut into slices, as `(begin, end, first chunk of the message, slices)`.
type Cut = (u32, u32, u32, u32);

/// How the data of one buffer is cut.
#[derive(Default)]
struct Cuts {
    sliced: BTreeSet<Cut>,
    /// Where operations that are not sliced begin or end.
    ends: BTreeSet<u32>,
}

impl Cuts {
    /// Whether a slice may end inside another one.
    fn are_mixed(&self, equal_chunks: bool) -> bool {
        let mut before: Option<Cut> = None;
        for &(begin, end, first, slices) in &self.sliced {
            let inside = (begin + 1)..end;
            if self.ends.range(inside).next().is_some() {
                return true;
            }
            if let Some((b, e, f, s)) = before
                && begin < e
            {
                // A last chunk may be shorter than others.
                let is_same = (b, e, s) == (begin, end, slices) && (f == first || equal_chunks);
                if !is_same {
                    return true;
                }
            }
            before = Some((begin, end, first, slices));
        }
        false
    }
}

/// Where data is cut in different ways, the granules that every chunk must be a multiple of for all slices of it to end where
/// they do exactly; none where that does not matter. Of more than there are, the most.
pub(crate) fn granules(plan: &Plan) -> Option<u64> {
    let mut buffers: HashMap<(u32, Buffer), Cuts> = HashMap::new();
    for (_, op) in plan.all_ops() {
        let Some(chunks) = op.chunks() else { continue };
        let (from, to) = op.operands();
        for operand in from.iter().chain(to) {
            let (mut buffer, mut index) = (operand.buffer, operand.index);
            if plan.in_place != InPlace::Forbidden {
                let (of, rank) = (plan.collective, operand.rank);
                (buffer, index) = in_larger_buffer(of, plan.chunks, rank, buffer, index);
                // One memory, whichever of its names is left.
                if buffer == Buffer::Output {
                    buffer = Buffer::Input;
                }
            }
            let end = index.saturating_add(chunks.count);
            let cuts = buffers.entry((operand.rank, buffer)).or_default();
            if chunks.slice.1 > 1 {
                cuts.sliced
                    .insert((index, end, chunks.first, chunks.slice.1));
            } else {
                cuts.ends.extend([index, end]);
            }
        }
    }
    let are_equal = plan.needs_equal_chunks();
    let mixed = buffers.values().filter(|cuts| cuts.are_mixed(are_equal));
    mixed
        .flat_map(|cuts| &cuts.sliced)
        .map(|&(begin, end, _, slices)| {
            let (count, slices) = (u64::from(end - begin), u64::from(slices));
            slices / gcd(slices, count)
        })
        .reduce(lcm)
}

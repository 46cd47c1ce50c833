//! Test data, and what is wrong with what became of it.

use crossweft_collective::{DataType, ReduceOp};
use crossweft_plan::Content;
use crossweft_verify::{
    Mismatch, Mismatches, Pattern, PreMultiplied, check_reduce_scatter, check_reduction, fill,
};

/// The inputs of all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestData<'a> {
    pub(crate) pattern: Pattern,
    pub(crate) dtype: DataType,
    pub(crate) op: ReduceOp,
    /// What each rank's input is multiplied by before the sum; none if by nothing.
    pub(crate) scalars: &'a [f64],
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
}

impl TestData<'_> {
    /// The input of `rank`, of that many bytes.
    pub(crate) fn input(&self, rank: u32, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        let Self {
            pattern,
            dtype,
            op,
            seed,
            ranks,
            ..
        } = *self;
        match self.scalars {
            [] => fill(pattern, dtype, op, seed, rank, ranks, &mut data),
            _ => self.products().fill(rank, &mut data),
        }
        data
    }

    fn products(&self) -> PreMultiplied<'_> {
        PreMultiplied {
            pattern: self.pattern,
            dtype: self.dtype,
            seed: self.seed,
            scalars: self.scalars,
        }
    }

    /// What is wrong with the output `got` of `rank`, whose blocks of `bytes` bytes hold what `content` says;
    /// it is also said on standard error.
    pub(crate) fn check(
        &self,
        rank: u32,
        bytes: u64,
        content: impl Fn(u32) -> Content,
        got: &[u8],
    ) -> u64 {
        let Self {
            pattern,
            dtype,
            op,
            seed,
            ranks: n,
            ..
        } = *self;
        let mut mismatches = Mismatches::default();
        for (block, got) in (0..).zip(got.chunks(bytes.max(1) as usize)) {
            let of_block = match content(block) {
                Content::Any => continue,
                Content::Reduction { block } if !self.scalars.is_empty() => {
                    self.products().check(block, got)
                }
                Content::Reduction { block } => {
                    check_reduce_scatter(pattern, dtype, op, seed, block, n, got)
                }
                Content::Inputs(inputs) => {
                    let inputs: Vec<(u32, u32)> = inputs
                        .iter()
                        .map(|input| (input.rank, input.block))
                        .collect();
                    check_reduction(pattern, dtype, op, seed, n, &inputs, got)
                }
            };
            mismatches.wrong += of_block.wrong;
            let before = u64::from(block) * bytes / dtype.size() as u64;
            mismatches.first = mismatches.first.or(of_block.first.map(|first| Mismatch {
                index: before + first.index,
                ..first
            }));
        }
        self.tell(rank, bytes, mismatches)
    }

    /// Says what is wrong on standard error, and returns how much is.
    pub(crate) fn tell(&self, rank: u32, bytes: u64, mismatches: Mismatches) -> u64 {
        let pattern = self.pattern;
        if let Some(first) = mismatches.first {
            crate::complain(&format!(
                "rank {rank}: {bytes} bytes, {pattern:?} inputs: {} wrong, first at element {}: \
                 {} instead of {}",
                mismatches.wrong, first.index, first.got, first.expected
            ));
        }
        mismatches.wrong
    }
}

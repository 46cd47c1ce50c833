//! Which vector instructions this machine has.

use crossweft_device::moe::rows::HostRows;
use crossweft_device::reduce::{HostReducer, Isa};
use crossweft_device::scale::HostScaler;
use crossweft_device::{DataType, ReduceOp};

/// The best instructions for reductions that this machine has.
#[must_use]
pub fn isa() -> Isa {
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        let f16c = is_x86_feature_detected!("f16c");
        if avx512 && f16c {
            return Isa::Avx512;
        }
        if is_x86_feature_detected!("avx2") && f16c {
            return Isa::Avx2;
        }
    }
    Isa::Baseline
}

/// The reduction of `dtype` and `op` with this machine's best instructions.
#[must_use]
pub fn reducer(dtype: DataType, op: ReduceOp) -> HostReducer {
    // SAFETY: `isa` has just found these instructions.
    unsafe { HostReducer::with_isa(dtype, op, isa()) }
}

/// The multiplication of `dtype` with this machine's best instructions.
#[must_use]
pub fn scaler(dtype: DataType) -> HostScaler {
    // SAFETY: as above.
    unsafe { HostScaler::with_isa(dtype, isa()) }
}

/// The arithmetic of a mixture of experts on rows of `dtype`, with this machine's best instructions; `None` if it is
/// not f32, f16 or bf16.
#[must_use]
pub fn rows(dtype: DataType) -> Option<HostRows> {
    // SAFETY: as above.
    unsafe { HostRows::with_isa(dtype, isa()) }
}

#[cfg(test)]
mod tests {
    use crossweft_device::moe::rows::{Rows as _, Term};
    use crossweft_device::reduce::{Location, Reducer, Sources};
    use crossweft_device::{Stopped, Waiting};

    use super::*;
    use crate::cpu::{Context, Grid, Schedule, Supervisor};

    struct Never;

    impl Supervisor for Never {
        fn check(&self, _: &Waiting, _: u32) -> Result<(), Stopped> {
            Err(Stopped::Deadline)
        }
    }

    /// Reduces `inputs` into two destinations and returns both.
    fn reduce(reducer: &HostReducer, inputs: &[Vec<u8>], element: usize) -> [Vec<u8>; 2] {
        let bytes = inputs[0].len();
        let mut out = [vec![0; bytes], vec![0; bytes]];
        let to = [out[0].as_mut_ptr() as u64, out[1].as_mut_ptr() as u64];
        let supervisor = &Never;
        let context = Context {
            supervisor,
            bell: None,
            peers: &[],
            spin: true,
        };
        let mut grid = Grid::new(1, Schedule::RoundRobin).unwrap();
        let divisor = u32::try_from(inputs.len()).unwrap();
        grid.launch(&context, &|block, _| {
            let from = |k: u32| Location::raw(inputs[k as usize].as_ptr() as u64);
            let sources = Sources {
                count: divisor,
                at: from,
            };
            let destinations = Sources {
                count: 2,
                at: |k: u32| Location::raw(to[k as usize]),
            };
            let elements = (bytes / element) as u64;
            // SAFETY: all buffers have `bytes` bytes and are nobody else's.
            unsafe { reducer.reduce(block, &sources, &destinations, elements, divisor, 1) }
        })
        .unwrap();
        out
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        // A size that is no multiple of anything, and one that is streamed.
        for bytes in [8 * 1003, (4 << 20) + 8 * 3] {
            let inputs: Vec<Vec<u8>> = (0..3_u64)
                .map(|k| {
                    let mut x = k + 1;
                    (0..bytes)
                        .map(|_| {
                            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                            (x >> 56) as u8
                        })
                        .collect()
                })
                .collect();
            for dtype in DataType::ALL {
                for op in ReduceOp::ALL {
                    for count in [2, 3] {
                        if bytes > 1 << 20 && op != ReduceOp::Avg {
                            continue;
                        }
                        let inputs = &inputs[..count];
                        let baseline = HostReducer::new(dtype, op);
                        let expected = reduce(&baseline, inputs, dtype.size());
                        assert_eq!(expected[0], expected[1]);
                        for set in [Isa::Avx2, Isa::Avx512] {
                            if set > isa() {
                                continue;
                            }
                            // SAFETY: this machine has more than these instructions.
                            let leaves = unsafe { HostReducer::with_isa(dtype, op, set) };
                            let found = reduce(&leaves, inputs, dtype.size());
                            assert!(found == expected, "{dtype} {op} of {count}, {}", set.name());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_products() {
        let mut x = 1_u64;
        let mut next = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            x >> 7
        };
        let data: Vec<u64> = (0..1003).map(|_| next()).collect();
        for dtype in DataType::ALL {
            let scalar = next();
            let products = |scaler: HostScaler| {
                let mut out = vec![0_u64; data.len()];
                let (dst, src) = (out.as_mut_ptr() as u64, data.as_ptr() as u64);
                let elements = size_of_val(data.as_slice()) / dtype.size();
                // SAFETY: both have as many bytes.
                unsafe { scaler.scale(dst, src, elements, &raw const scalar as u64) };
                out
            };
            let expected = products(HostScaler::new(dtype));
            for set in [Isa::Avx2, Isa::Avx512] {
                if set <= isa() {
                    // SAFETY: this machine has more than these instructions.
                    let found = products(unsafe { HostScaler::with_isa(dtype, set) });
                    assert!(found == expected, "{dtype}, {}", set.name());
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_weighted_sums() {
        let supervisor = &Never;
        let context = Context {
            supervisor,
            bell: None,
            peers: &[],
            spin: true,
        };
        // No multiple of a tile or a vector.
        const ELEMENTS: usize = 2 * 1024 + 24;
        let inputs: Vec<Vec<u64>> = (0..5_u64)
            .map(|k| {
                let mut x = k + 1;
                let next = |_| {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // Finite in every type: the upper bits of exponents are not all set.
                    x & 0xbfff_bfff_bfff_bfff
                };
                (0..ELEMENTS / 2).map(next).collect()
            })
            .collect();
        let sum = |leaves: HostRows, count: usize, element: usize| {
            let terms: Vec<Term> = inputs[..count]
                .iter()
                .zip([0.3, -1.5, 1.0, 7.25, 1e-3])
                .map(|(input, weight)| Term {
                    address: input.as_ptr() as u64,
                    weight,
                })
                .collect();
            let mut out = vec![0xff_u8; ELEMENTS * element];
            let to = out.as_mut_ptr() as u64;
            let mut grid = Grid::new(1, Schedule::RoundRobin).unwrap();
            let launched = grid.launch(&context, &|block, _| {
                let most = u32::try_from(count).unwrap();
                let terms = (most, |k: u32| terms[k as usize]);
                // SAFETY: inputs and output have as many elements and are nobody else's.
                unsafe { leaves.sum(block, to, terms, ELEMENTS as u64) };
                Ok(())
            });
            launched.unwrap();
            out
        };
        for dtype in [DataType::F32, DataType::F16, DataType::Bf16] {
            for count in 0..=inputs.len() {
                let run = |set| {
                    // SAFETY: no more than the machine has, below.
                    let leaves = unsafe { HostRows::with_isa(dtype, set) };
                    sum(leaves.unwrap(), count, dtype.size())
                };
                let expected = run(Isa::Baseline);
                assert_eq!(expected.iter().all(|&byte| byte == 0), count == 0);
                for set in [Isa::Avx2, Isa::Avx512] {
                    if set <= isa() {
                        assert!(run(set) == expected, "{dtype} {count} {}", set.name());
                    }
                }
            }
        }
        assert!(rows(DataType::I8).is_none());
    }
}

//! The host's reduction against a loop over numbers: every data type and operation, sources and
//! destinations of every kind, sizes around the tile.

mod common;

use common::{Guarded, HostBlock, Random, difference, reference};
use crossweft_device::packet::{copy_from_packets, copy_to_packets};
use crossweft_device::reduce::{HostReducer, Location, Reducer, Sources};
use crossweft_device::{DataType, ReduceOp, Site, Stopped, WaitKind};
use proptest::prelude::*;

const SITE: Site = Site {
    kind: WaitKind::Packet,
    peer: 1,
    channel: 0,
    op: 0,
};
const FLAG: u32 = 11;

#[derive(Clone, Debug)]
struct Case {
    dtype: DataType,
    op: ReduceOp,
    elements: usize,
    divisor: u32,
    /// Whether each source is packets, and its offset from 8-byte alignment if not.
    sources: Vec<(bool, usize)>,
    /// The same of each destination.
    destinations: Vec<(bool, usize)>,
    /// A destination that is the memory of a source, by their indices; both raw.
    in_place: Option<(usize, usize)>,
    seed: u64,
}

fn location(packets: bool, addr: u64) -> Location {
    Location {
        addr,
        packets: packets.then_some(SITE),
    }
}

fn place(packets: bool, bytes: usize, offset: usize) -> Guarded {
    if packets {
        Guarded::new(bytes.div_ceil(4) * 8, 0)
    } else {
        Guarded::new(bytes, offset)
    }
}

fn check(case: &Case) {
    let block = &HostBlock::NO_WAIT;
    let bytes = case.elements * case.dtype.size();
    let mut random = Random(case.seed);
    let data: Vec<_> = case.sources.iter().map(|_| random.bytes(bytes)).collect();
    let mut sources = Vec::new();
    for (&(packets, offset), data) in case.sources.iter().zip(&data) {
        if packets {
            let mut plain = Guarded::holding(data, 0);
            let mut memory = place(true, bytes, 0);
            // SAFETY: the ranges have these sizes.
            unsafe { copy_to_packets(block, memory.addr(), plain.addr(), bytes as u64, FLAG) };
            sources.push(memory);
        } else {
            sources.push(Guarded::holding(data, offset));
        }
    }
    let mut destinations: Vec<_> = case
        .destinations
        .iter()
        .map(|&(packets, offset)| place(packets, bytes, offset))
        .collect();

    let from: Vec<_> = case
        .sources
        .iter()
        .zip(&mut sources)
        .map(|(&(packets, _), memory)| location(packets, memory.addr()))
        .collect();
    let mut to: Vec<_> = case
        .destinations
        .iter()
        .zip(&mut destinations)
        .map(|(&(packets, _), memory)| location(packets, memory.addr()))
        .collect();
    if let Some((destination, source)) = case.in_place {
        to[destination] = from[source];
    }
    // SAFETY: the locations have room for the elements; nobody else uses them.
    let outcome = unsafe {
        HostReducer::new(case.dtype, case.op).reduce(
            block,
            &Sources {
                count: from.len() as u32,
                at: |i| from[i as usize],
            },
            &Sources {
                count: to.len() as u32,
                at: |i| to[i as usize],
            },
            case.elements as u64,
            case.divisor,
            FLAG,
        )
    };
    assert_eq!(outcome, Ok(()), "{case:?}");

    let expected = reference(case.dtype, case.op, case.divisor, &data);
    let mut first: Option<Vec<u8>> = None;
    for (i, &(packets, _)) in case.destinations.iter().enumerate() {
        let memory = match case.in_place {
            Some((destination, source)) if destination == i => &mut sources[source],
            _ => &mut destinations[i],
        };
        assert!(memory.intact(), "around destination {i}: {case:?}");
        let got = if packets {
            let mut plain = Guarded::new(bytes, 0);
            // SAFETY: the ranges have these sizes.
            let outcome = unsafe {
                copy_from_packets(block, SITE, plain.addr(), memory.addr(), bytes as u64, FLAG)
            };
            assert_eq!(outcome, Ok(()), "packets of destination {i}: {case:?}");
            plain.bytes().to_vec()
        } else {
            memory.bytes().to_vec()
        };
        if let Some(at) = difference(case.dtype, &got, &expected) {
            let size = case.dtype.size();
            let element = |bytes: &[u8]| bytes[at * size..(at + 1) * size].to_vec();
            let inputs: Vec<_> = data.iter().map(|d| element(d)).collect();
            panic!(
                "element {at} of destination {i}: {:?} from {inputs:?}, not {:?}: {case:?}",
                element(&got),
                element(&expected)
            );
        }
        // All destinations get the same bits, NaN or not.
        assert_eq!(first.get_or_insert(got.clone()), &got, "{case:?}");
    }
    for (i, (memory, data)) in sources.iter().zip(&data).enumerate() {
        assert!(memory.intact(), "around source {i}: {case:?}");
        let written = case.in_place.is_some_and(|(_, source)| source == i);
        if !written && !case.sources[i].0 {
            assert_eq!(memory.bytes(), data, "source {i} was changed: {case:?}");
        }
    }
}

/// An offset from 8-byte alignment that is aligned for elements.
fn aligned(dtype: DataType, random: u64) -> usize {
    random as usize % 8 / dtype.size() * dtype.size()
}

#[test]
fn every_type_operation_and_number_of_sources_around_the_tile() {
    let mut random = Random(5);
    for dtype in DataType::ALL {
        for op in ReduceOp::ALL {
            for count in 1..=6 {
                for elements in [1, 511, 512, 513, 1025] {
                    let mut places = |n| -> Vec<(bool, usize)> {
                        (0..n)
                            .map(|_| (random.below(2) == 0, aligned(dtype, random.next())))
                            .collect()
                    };
                    let (sources, destinations) = (places(count), places(1 + count % 3));
                    check(&Case {
                        dtype,
                        op,
                        elements,
                        divisor: [0, count as u32][random.below(2) as usize],
                        sources,
                        destinations,
                        in_place: None,
                        seed: random.next(),
                    });
                }
            }
        }
    }
}

#[test]
fn in_place_at_any_source() {
    let mut random = Random(6);
    for dtype in DataType::ALL {
        for op in ReduceOp::ALL {
            for count in 1..=4 {
                for source in 0..count {
                    for destination in 0..2 {
                        let mut sources: Vec<_> = (0..count)
                            .map(|_| (random.below(2) == 0, aligned(dtype, random.next())))
                            .collect();
                        sources[source].0 = false;
                        let mut destinations = vec![(random.below(2) == 0, 0); 2];
                        destinations[destination].0 = false;
                        check(&Case {
                            dtype,
                            op,
                            elements: [3, 700][random.below(2) as usize],
                            divisor: count as u32,
                            sources,
                            destinations,
                            in_place: Some((destination, source)),
                            seed: random.next(),
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn no_elements_touch_nothing() {
    for dtype in DataType::ALL {
        check(&Case {
            dtype,
            op: ReduceOp::Avg,
            elements: 0,
            divisor: 2,
            sources: vec![(false, 0), (true, 0)],
            destinations: vec![(false, 0), (true, 0)],
            in_place: None,
            seed: 0,
        });
    }
}

#[test]
fn only_averages_divide_and_only_final_ones() {
    let case = |op, divisor| Case {
        dtype: DataType::I32,
        op,
        elements: 20,
        divisor,
        sources: vec![(false, 0); 3],
        destinations: vec![(false, 0)],
        in_place: None,
        seed: 9,
    };
    for op in ReduceOp::ALL {
        for divisor in [0, 1, 3, 1000] {
            check(&case(op, divisor));
        }
    }
}

#[test]
fn a_missing_packet_ends_the_reduction() {
    let mut packets = Guarded::new(8 * 4, 0);
    let mut dst = Guarded::new(16, 0);
    let (from, to) = (location(true, packets.addr()), location(false, dst.addr()));
    // SAFETY: the locations have room for the elements.
    let outcome = unsafe {
        HostReducer::new(DataType::I32, ReduceOp::Sum).reduce(
            &HostBlock::NO_WAIT,
            &Sources {
                count: 1,
                at: |_| from,
            },
            &Sources {
                count: 1,
                at: |_| to,
            },
            4,
            0,
            FLAG,
        )
    };
    assert_eq!(outcome, Err(Stopped::Deadline));
    assert!(dst.intact());
}

fn cases() -> impl Strategy<Value = Case> {
    let places = |n| prop::collection::vec((any::<bool>(), 0_usize..8), 1..n);
    (
        prop::sample::select(DataType::ALL.to_vec()),
        prop::sample::select(ReduceOp::ALL.to_vec()),
        0_usize..1600,
        0_u32..9,
        places(7),
        places(4),
        any::<u64>(),
    )
        .prop_map(
            |(dtype, op, elements, divisor, sources, destinations, seed)| {
                let align = |places: Vec<(bool, usize)>| {
                    let aligned = |(packets, offset)| (packets, aligned(dtype, offset as u64));
                    places.into_iter().map(aligned).collect()
                };
                Case {
                    dtype,
                    op,
                    elements,
                    divisor,
                    sources: align(sources),
                    destinations: align(destinations),
                    in_place: None,
                    seed,
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        rng_seed: prop::test_runner::RngSeed::Fixed(8),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_reduction(case in cases()) {
        check(&case);
    }
}

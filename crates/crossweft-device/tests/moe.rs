//! What a GPU's threads do to rows of a mixture of experts, on the host: the bits of the host's own.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Barrier;

use common::{Guarded, Random};
use crossweft_device::element::{Bf16, Element, F16};
use crossweft_device::gpu::WARP;
use crossweft_device::gpu::moe::{GpuRows, WARP_TABLE_BYTES};
use crossweft_device::gpu::reduce::GpuElement;
use crossweft_device::moe::GROUP;
use crossweft_device::moe::dispatch::Quantise;
use crossweft_device::moe::rows::{HostRows, Rows, Term};
use crossweft_device::reduce::Isa;
use crossweft_device::{Block, DataType, Raw, Stopped, Waiting};

/// A thread of a warp, or one alone.
struct Lane<'a> {
    lane: u32,
    meet: Option<&'a Barrier>,
}

impl Block for Lane<'_> {
    type Memory = Raw;

    fn memory(&self) -> &Raw {
        &Raw
    }

    fn thread(&self) -> u32 {
        self.lane
    }

    fn threads(&self) -> u32 {
        self.meet.map_or(1, |_| WARP)
    }

    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped> {
        self.warp_sync();
        mine
    }

    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped> {
        panic!("waits for {waiting:?}");
    }

    fn refuse(&self, waiting: &Waiting) -> Stopped {
        panic!("refuses {waiting:?}");
    }

    fn wake(&self, _peer: u32) {}

    fn warp(&self) -> u32 {
        0
    }

    fn warps(&self) -> u32 {
        1
    }

    fn lane(&self) -> u32 {
        self.lane
    }

    fn lanes(&self) -> u32 {
        self.threads()
    }

    fn warp_sync(&self) {
        if let Some(meet) = self.meet {
            meet.wait();
        }
    }
}

const ALONE: Lane<'_> = Lane {
    lane: 0,
    meet: None,
};

/// Shared memory of a warp.
#[repr(align(16))]
struct Table([u8; WARP_TABLE_BYTES]);

/// Does `work` on every thread of a warp.
fn on_warp<E>(work: impl Fn(&Lane<'_>, &GpuRows<E>) + Sync) {
    let mut table = Table([0xa5; WARP_TABLE_BYTES]);
    let address = table.0.as_mut_ptr().expose_provenance() as u64;
    let meet = Barrier::new(WARP as usize);
    let (meet, work) = (&meet, &work);
    std::thread::scope(|scope| {
        for lane in 0..WARP {
            scope.spawn(move || {
                let meet = Some(meet);
                // SAFETY: the table is this warp's.
                let rows = unsafe { GpuRows::<E>::new(address) };
                work(&Lane { lane, meet }, &rows);
            });
        }
    });
}

fn host(dtype: DataType) -> HostRows {
    // SAFETY: every machine has these instructions.
    unsafe { HostRows::with_isa(dtype, Isa::Baseline) }.unwrap()
}

/// Elements from small to large, zeros, infinities and NaNs now and then.
fn elements(dtype: DataType, count: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..count {
        let x = match random.below(40) {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => 0.0,
            3 => -0.0,
            _ => (random.below(2001) as f32 - 1000.0) * 2_f32.powi(random.below(20) as i32 - 14),
        };
        match dtype {
            DataType::Bf16 => bytes.extend(Bf16::store(x).0.to_ne_bytes()),
            DataType::F16 => bytes.extend(F16::store(x).0.to_ne_bytes()),
            _ => bytes.extend(x.to_ne_bytes()),
        }
    }
    bytes
}

/// Elements of segments that are whole, that end within a thread's pieces, and of one piece.
fn sizes(dtype: DataType) -> [u64; 4] {
    let most = GpuRows::<f32>::SEGMENT / dtype.size() as u64;
    [most, most / 2 + 16, 144, 16]
}

fn sums<E: GpuElement + Element<Acc = f32>>(dtype: DataType) {
    let mut random = Random(3);
    for count in sizes(dtype) {
        let bytes = count as usize * dtype.size();
        for there in [0, 1, 2, 7, 32] {
            let mut terms: Vec<_> = (0..there)
                .map(|_| Guarded::holding(&elements(dtype, count as usize, &mut random), 0))
                .collect();
            // Some that do not count, between those that do.
            let most = (there as u32 + 3).min(32);
            let places: Vec<Term> = (0..most as usize)
                .map(|k| match k.checked_sub(most as usize - there) {
                    Some(k) => Term {
                        address: terms[k].addr(),
                        weight: random.below(9) as f32 / 4.0 - 1.0,
                    },
                    None => Term::default(),
                })
                .collect();
            let (mut ours, mut theirs) = (Guarded::new(bytes, 0), Guarded::new(bytes, 0));
            let (to, places) = (ours.addr(), &places);
            on_warp::<E>(|lane, rows| {
                // SAFETY: the buffers are as long, and live.
                unsafe { rows.sum(lane, to, (most, |k| places[k as usize]), count) };
            });
            let to = theirs.addr();
            // SAFETY: as above.
            unsafe { host(dtype).sum(&ALONE, to, (most, |k| places[k as usize]), count) };
            assert_eq!(ours.bytes(), theirs.bytes(), "{dtype}, {there} of {count}");
            assert!(ours.intact() && terms.iter().all(Guarded::intact));
        }
    }
}

#[test]
fn sums_are_the_host_s() {
    sums::<Bf16>(DataType::Bf16);
    sums::<F16>(DataType::F16);
    sums::<f32>(DataType::F32);
}

fn quantises<E: GpuElement + Element<Acc = f32>>(dtype: DataType) {
    let mut random = Random(5);
    for count in sizes(dtype) {
        let groups = count.div_ceil(GROUP) as usize;
        for how in [Quantise::F32, Quantise::PowersOfTwo, Quantise::Exponents] {
            let mut from = Guarded::holding(&elements(dtype, count as usize, &mut random), 0);
            let scale_bytes = match how {
                Quantise::Exponents => groups + 3,
                _ => 4 * groups,
            };
            let room = || {
                (
                    Guarded::new(count as usize, 0),
                    Guarded::new(scale_bytes, 0),
                )
            };
            let ((mut ours, mut scales), (mut theirs, mut their_scales)) = (room(), room());
            let (to, address) = ((ours.addr(), scales.addr()), from.addr());
            on_warp::<E>(|lane, rows| {
                // SAFETY: the buffers are as long, and live.
                unsafe { rows.quantise(lane, to, address, count, how) };
            });
            let to = (theirs.addr(), their_scales.addr());
            // SAFETY: as above.
            unsafe { host(dtype).quantise(&ALONE, to, address, count, how) };
            assert_eq!(ours.bytes(), theirs.bytes(), "{dtype} {how:?} {count}");
            assert_eq!(
                scales.bytes(),
                their_scales.bytes(),
                "{dtype} {how:?} {count}"
            );
            assert!(ours.intact() && scales.intact());
        }
    }
}

#[test]
fn quantised_rows_are_the_host_s() {
    quantises::<Bf16>(DataType::Bf16);
    quantises::<F16>(DataType::F16);
    quantises::<f32>(DataType::F32);
}

#[test]
fn rows_are_copied_to_some_places_at_any_alignment() {
    let mut random = Random(7);
    let segment = GpuRows::<f32>::SEGMENT as usize;
    for bytes in [segment, segment - 16, 48, 224, 12, 7, 1] {
        for offset in [0, 4, 1] {
            let from = random.bytes(bytes);
            let mut source = Guarded::holding(&from, 0);
            let mut targets: Vec<_> = (0..5)
                .map(|k| Guarded::new(bytes, if k % 2 == 0 { 0 } else { offset }))
                .collect();
            let mut places: Vec<u64> = targets.iter_mut().map(Guarded::addr).collect();
            places[2] = 0;
            let (address, places) = (source.addr(), &places);
            on_warp::<f32>(|lane, rows| {
                // SAFETY: the buffers are as long, and live.
                unsafe { rows.scatter(lane, (5, |k| places[k as usize]), address, bytes as u64) };
            });
            for (k, target) in targets.iter().enumerate() {
                assert_eq!(target.bytes() == from, k != 2, "{bytes} bytes to {k}");
                assert!(target.intact());
            }
        }
    }
}

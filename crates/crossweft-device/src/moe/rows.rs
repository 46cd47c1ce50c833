//! What the threads of a block do to rows: weighted sums, and quantising to E4M3.

use super::dispatch::Quantise;
use crate::block::Block;

/// A row with its weight.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Term {
    /// Address of its elements.
    pub address: u64,
    /// What they are multiplied by.
    pub weight: f32,
}

/// The arithmetic on rows of one data type, a segment at a time. Addresses and sizes of elements are multiples of 16.
pub trait Rows {
    /// The most bytes of elements, before they are quantised, that a warp has at a time; whole groups.
    const SEGMENT: u64;

    /// Warp: sums the products of `elements` elements of each of so many terms with its weight, in f32 and in order,
    /// and rounds once; zeros if there are none. Terms whose address is 0 do not count.
    ///
    /// # Safety
    /// There must be at most [`MAX_TOP_K`](super::MAX_TOP_K) terms. All addresses must be valid for the elements; nobody
    /// may write terms or access `to` meanwhile.
    unsafe fn sum<B: Block>(
        &self,
        block: &B,
        to: u64,
        terms: (u32, impl Fn(u32) -> Term),
        elements: u64,
    );

    /// Warp: quantises `elements` elements to E4M3 at `to.0`, with scales at `to.1`. The scale of a
    /// [`GROUP`](super::GROUP) is its largest magnitude, at least 1e-4, divided by 448, the largest E4M3; rounded up
    /// where it is to be a power of two. Behind exponents there are three zeros, which may fill up a word. The warp's other
    /// threads may read it then.
    ///
    /// # Safety
    /// `from` must be valid for the elements, `to` for as many bytes, a scale for each group and those zeros; nobody else
    /// may access `to`, or write `from`, meanwhile.
    unsafe fn quantise<B: Block>(
        &self,
        block: &B,
        to: (u64, u64),
        from: u64,
        elements: u64,
        how: Quantise,
    );

    /// Warp: copies `bytes` bytes to each of so many addresses that are not 0.
    ///
    /// # Safety
    /// There must be at most [`MAX_TOP_K`](super::MAX_TOP_K) addresses, each valid for the bytes, as `from` must be;
    /// nobody may write `from` or access the others meanwhile.
    unsafe fn scatter<B: Block>(
        &self,
        block: &B,
        to: (u32, impl Fn(u32) -> u64),
        from: u64,
        bytes: u64,
    );
}

/// The biased exponent of the least power of two that is no less than a positive normal number.
#[must_use]
pub(crate) const fn exponent_up(x: f32) -> u32 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) + (bits & 0x7f_ffff != 0) as u32;
    if exponent < 254 { exponent } else { 254 }
}

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub use host::HostRows;

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod host {
    #![allow(
        clippy::cast_possible_truncation,
        reason = "only sizes below a tile, on machines with 64-bit addresses"
    )]

    use super::super::{GROUP, MAX_TOP_K};
    use super::{Block, Quantise, Rows, Term, exponent_up};
    use crate::dtype::DataType;
    use crate::element::{Bf16, Element, F16};
    use crate::memory::Memory;
    use crate::norm::HostNorm;
    use crate::reduce::Isa;

    /// Elements that are summed at a time: 4 KiB of accumulators.
    const TILE: usize = 1024;

    /// Accumulators of a tile.
    type Tile = [f32; TILE];

    /// Rows of f32, f16 or bf16 on the host.
    #[derive(Clone, Copy, Debug)]
    pub struct HostRows {
        /// `tile = weight * x`, or `tile += weight * x`
        first: unsafe fn(tile: &mut Tile, x: u64, n: usize, weight: f32),
        add: unsafe fn(tile: &mut Tile, x: u64, n: usize, weight: f32),
        /// `x = tile`, rounded
        store: unsafe fn(x: u64, tile: &Tile, n: usize),
        /// What quantises.
        norm: HostNorm,
        element: u64,
    }

    impl HostRows {
        /// The rows of `dtype` with the instructions of `isa`; `None` if it has none.
        ///
        /// # Safety
        /// The machine must have the instructions.
        #[must_use]
        pub const unsafe fn with_isa(dtype: DataType, isa: Isa) -> Option<Self> {
            // SAFETY: the caller's promise.
            let Some(norm) = (unsafe { HostNorm::with_isa(dtype, isa) }) else {
                return None;
            };
            match dtype {
                DataType::F32 => Some(Self::of::<f32>(isa, norm)),
                DataType::F16 => Some(Self::of::<F16>(isa, norm)),
                DataType::Bf16 => Some(Self::of::<Bf16>(isa, norm)),
                _ => None,
            }
        }

        const fn of<E: Element<Acc = f32>>(isa: Isa, norm: HostNorm) -> Self {
            let element = size_of::<E>() as u64;
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => Self {
                    first: avx2::first::<E>,
                    add: avx2::add::<E>,
                    store: avx2::store::<E>,
                    norm,
                    element,
                },
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => Self {
                    first: avx512::first::<E>,
                    add: avx512::add::<E>,
                    store: avx512::store::<E>,
                    norm,
                    element,
                },
                _ => Self {
                    first: first::<E>,
                    add: add::<E>,
                    store: store::<E>,
                    norm,
                    element,
                },
            }
        }
    }

    // A warp is one thread here, and has whole rows.
    impl Rows for HostRows {
        const SEGMENT: u64 = u64::MAX;

        unsafe fn sum<B: Block>(
            &self,
            _block: &B,
            to: u64,
            (most, term): (u32, impl Fn(u32) -> Term),
            elements: u64,
        ) {
            let mut terms = [Term::default(); MAX_TOP_K as usize];
            let mut count = 0;
            let there = (0..most).map(term).filter(|term| term.address != 0);
            for (term, place) in there.zip(&mut terms) {
                *place = term;
                count += 1;
            }
            let terms = terms.get(..count).unwrap_or(&[]);
            let mut tile = [0.0; TILE];
            let mut done = 0;
            while done < elements {
                let n = (elements - done).min(TILE as u64) as usize;
                let at = done * self.element;
                // SAFETY: the caller's promise; no tile is larger than that.
                unsafe {
                    match terms {
                        [] => tile = [0.0; TILE],
                        [term, rest @ ..] => {
                            (self.first)(&mut tile, term.address + at, n, term.weight);
                            for term in rest {
                                (self.add)(&mut tile, term.address + at, n, term.weight);
                            }
                        }
                    }
                    (self.store)(to + at, &tile, n);
                }
                done += n as u64;
            }
        }

        unsafe fn quantise<B: Block>(
            &self,
            _block: &B,
            to: (u64, u64),
            from: u64,
            elements: u64,
            how: Quantise,
        ) {
            let mut done = 0;
            while done < elements {
                let n = (elements - done).min(GROUP) as usize;
                let group = done / GROUP;
                let x = from + done * self.element;
                // SAFETY: the caller's promise.
                unsafe {
                    let exact = (self.norm.largest(x, n)).max(1e-4) / 448.0;
                    let exponent = exponent_up(exact);
                    let scale = match how {
                        Quantise::No | Quantise::F32 => exact,
                        _ => f32::from_bits(exponent << 23),
                    };
                    self.norm.quantise(to.0 + done, x, n, scale);
                    match how {
                        Quantise::Exponents => ((to.1 + group) as *mut u8).write(exponent as u8),
                        _ => ((to.1 + 4 * group) as *mut f32).write_unaligned(scale),
                    }
                }
                done += n as u64;
            }
            if how == Quantise::Exponents {
                // SAFETY: as above.
                unsafe { ((to.1 + elements.div_ceil(GROUP)) as *mut [u8; 3]).write([0; 3]) };
            }
        }

        unsafe fn scatter<B: Block>(
            &self,
            block: &B,
            (most, to): (u32, impl Fn(u32) -> u64),
            from: u64,
            bytes: u64,
        ) {
            for to in (0..most).map(to).filter(|&to| to != 0) {
                // SAFETY: the caller's promise.
                unsafe { block.memory().copy(to, from, bytes) };
            }
        }
    }

    /// # Safety
    /// `x` must be valid for `n` elements, at most a tile. So for all of these.
    #[inline(always)]
    unsafe fn first<E: Element<Acc = f32>>(tile: &mut Tile, x: u64, n: usize, weight: f32) {
        for (i, sum) in tile.iter_mut().take(n).enumerate() {
            // SAFETY: the caller's promise.
            *sum = weight * unsafe { (x as *const E).add(i).read_unaligned() }.load();
        }
    }

    /// # Safety
    /// As for [`first`].
    #[inline(always)]
    unsafe fn add<E: Element<Acc = f32>>(tile: &mut Tile, x: u64, n: usize, weight: f32) {
        for (i, sum) in tile.iter_mut().take(n).enumerate() {
            // SAFETY: the caller's promise.
            *sum += weight * unsafe { (x as *const E).add(i).read_unaligned() }.load();
        }
    }

    /// # Safety
    /// As for [`first`].
    #[inline(always)]
    unsafe fn store<E: Element<Acc = f32>>(x: u64, tile: &Tile, n: usize) {
        for (i, &sum) in tile.iter().take(n).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { (x as *mut E).add(i).write_unaligned(E::store(sum)) };
        }
    }

    /// The leaves once more for each instruction set: the same bodies, vectorised anew.
    macro_rules! leaves {
        ($name:ident, $features:literal) => {
            #[cfg(target_arch = "x86_64")]
            mod $name {
                use super::{Element, Tile};

                /// # Safety
                /// As for the leaf of that name; the machine must have the instructions. So for all of these.
                #[target_feature(enable = $features)]
                pub(super) unsafe fn first<E: Element<Acc = f32>>(
                    tile: &mut Tile,
                    x: u64,
                    n: usize,
                    weight: f32,
                ) {
                    // SAFETY: the caller's promise.
                    unsafe { super::first::<E>(tile, x, n, weight) }
                }

                #[target_feature(enable = $features)]
                pub(super) unsafe fn add<E: Element<Acc = f32>>(
                    tile: &mut Tile,
                    x: u64,
                    n: usize,
                    weight: f32,
                ) {
                    // SAFETY: the caller's promise.
                    unsafe { super::add::<E>(tile, x, n, weight) }
                }

                #[target_feature(enable = $features)]
                pub(super) unsafe fn store<E: Element<Acc = f32>>(x: u64, tile: &Tile, n: usize) {
                    // SAFETY: the caller's promise.
                    unsafe { super::store::<E>(x, tile, n) }
                }
            }
        };
    }

    leaves!(avx2, "avx2");
    leaves!(avx512, "avx512f,avx512bw,avx512dq,avx512vl");
}

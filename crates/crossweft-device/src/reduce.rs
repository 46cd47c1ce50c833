//! Reductions: any number of sources, raw or packets, into any number of destinations.
//!
//! Sources are combined in the order given, in the accumulator's type, and rounded once when
//! stored. A destination may be a source at the same address (in place).

use crate::block::Block;
use crate::wait::Stopped;

/// Where an operand lies.
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// Address of the first byte, or of the first packet word.
    pub addr: u64,
    /// Whether there are packets at `addr`, and whose (for messages and wake-ups).
    pub packets: Option<crate::wait::Site>,
}

impl Location {
    /// Plain memory.
    #[inline(always)]
    #[must_use]
    pub const fn raw(addr: u64) -> Self {
        Self {
            addr,
            packets: None,
        }
    }
}

/// A list of locations, resolved one by one.
#[derive(Clone, Copy, Debug)]
pub struct Sources<F> {
    /// How many.
    pub count: u32,
    /// The `i`-th, for `i` below `count`.
    pub at: F,
}

/// One data type and operation, on one machine.
pub trait Reducer {
    /// Block: reduces `elements` elements of all `sources` into each of `destinations`. An average
    /// divides by `divisor`, unless that is 0 (partial results). `flag` is what packets carry.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends a wait for packets; destinations are then partly
    /// written.
    ///
    /// # Safety
    /// All locations must be valid for the elements (packets: twice the bytes, in whole words);
    /// nobody may write raw sources or access destinations meanwhile.
    unsafe fn reduce<B: Block, S: Fn(u32) -> Location, D: Fn(u32) -> Location>(
        &self,
        block: &B,
        sources: &Sources<S>,
        destinations: &Sources<D>,
        elements: u64,
        divisor: u32,
        flag: u32,
    ) -> Result<(), Stopped>;
}

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub use host::{HostReducer, Isa};

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod host {
    #![allow(
        clippy::cast_possible_truncation,
        reason = "only sizes below a tile, on machines with 64-bit addresses"
    )]

    use core::mem::MaybeUninit;

    use super::{Location, Reducer, Sources};
    use crate::block::Block;
    use crate::dtype::{DataType, ReduceOp};
    use crate::element::{Bf16, Element, F8E4M3, F8E5M2, F16};
    use crate::memory::Memory;
    use crate::packet::{self, PAYLOAD, WORD};
    use crate::wait::Stopped;

    /// Elements reduced at a time: the accumulators stay in the first-level cache.
    const TILE: u64 = 512;

    /// Room for a tile of any type; every byte is written before it is read.
    #[repr(align(64))]
    struct Tile(MaybeUninit<[u64; TILE as usize]>);

    impl Tile {
        const fn new() -> Self {
            Self(MaybeUninit::uninit())
        }

        fn addr(&mut self) -> u64 {
            self.0.as_mut_ptr() as u64
        }
    }

    /// Vector instructions that leaf loops may use. What the machine has is for the host side to find
    /// out; results are the same bits whichever is used.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum Isa {
        /// What every machine of the target has.
        Baseline,
        /// AVX2 and F16C.
        Avx2,
        /// AVX-512 F, BW, DQ and VL, and F16C.
        Avx512,
    }

    impl Isa {
        /// The name in messages.
        #[must_use]
        pub const fn name(self) -> &'static str {
            match self {
                Self::Baseline => "baseline",
                Self::Avx2 => "avx2",
                Self::Avx512 => "avx512",
            }
        }
    }

    /// Reductions of at least this many bytes store their results past the caches: nobody will
    /// find them there any more when they are read.
    const STREAM_MIN: u64 = 4 << 20;

    /// A reduction on the host: the vectorised leaf loops of one data type and operation. Chosen
    /// once, in prepare; the protocol around the leaves is then one piece of code.
    #[derive(Clone, Copy, Debug)]
    pub struct HostReducer {
        element: u64,
        average: bool,
        /// `acc = load(src)`
        first: unsafe fn(acc: u64, src: u64, n: usize),
        /// `acc = acc op load(src)`
        next: unsafe fn(acc: u64, src: u64, n: usize),
        /// `dst = store(acc / divisor)`
        last: unsafe fn(dst: u64, acc: u64, n: usize, divisor: u32),
        /// `dst = store((load(a) op load(b)) / divisor)`
        pair: unsafe fn(dst: u64, a: u64, b: u64, n: usize, divisor: u32),
    }

    impl HostReducer {
        /// The leaves of `dtype` and `op`, for any machine of the target.
        #[must_use]
        pub const fn new(dtype: DataType, op: ReduceOp) -> Self {
            Self::of_type(dtype, op, Isa::Baseline)
        }

        /// The leaves of `dtype` and `op`, with the instructions of `isa`.
        ///
        /// # Safety
        /// The machine must have them.
        #[must_use]
        pub const unsafe fn with_isa(dtype: DataType, op: ReduceOp, isa: Isa) -> Self {
            Self::of_type(dtype, op, isa)
        }

        const fn of_type(dtype: DataType, op: ReduceOp, isa: Isa) -> Self {
            match dtype {
                DataType::I8 => Self::of::<i8>(op, isa),
                DataType::U8 => Self::of::<u8>(op, isa),
                DataType::I16 => Self::of::<i16>(op, isa),
                DataType::U16 => Self::of::<u16>(op, isa),
                DataType::I32 => Self::of::<i32>(op, isa),
                DataType::U32 => Self::of::<u32>(op, isa),
                DataType::I64 => Self::of::<i64>(op, isa),
                DataType::U64 => Self::of::<u64>(op, isa),
                #[cfg(target_arch = "x86_64")]
                DataType::F16 if !matches!(isa, Isa::Baseline) => Self::of_f16(op),
                DataType::F16 => Self::of::<F16>(op, isa),
                DataType::Bf16 => Self::of::<Bf16>(op, isa),
                DataType::F32 => Self::of::<f32>(op, isa),
                DataType::F64 => Self::of::<f64>(op, isa),
                DataType::F8E4M3 => Self::of::<F8E4M3>(op, isa),
                DataType::F8E5M2 => Self::of::<F8E5M2>(op, isa),
            }
        }

        const fn of<E: Element>(op: ReduceOp, isa: Isa) -> Self {
            match op {
                ReduceOp::Sum => Self::with::<E, Sum>(false, isa),
                ReduceOp::Prod => Self::with::<E, Prod>(false, isa),
                ReduceOp::Min => Self::with::<E, Min>(false, isa),
                ReduceOp::Max => Self::with::<E, Max>(false, isa),
                ReduceOp::Avg => Self::with::<E, Sum>(true, isa),
            }
        }

        /// Halves with the machine's own conversions, which both instruction sets have.
        #[cfg(target_arch = "x86_64")]
        const fn of_f16(op: ReduceOp) -> Self {
            match op {
                ReduceOp::Sum => Self::with_f16c::<Sum>(false),
                ReduceOp::Prod => Self::with_f16c::<Prod>(false),
                ReduceOp::Min => Self::with_f16c::<Min>(false),
                ReduceOp::Max => Self::with_f16c::<Max>(false),
                ReduceOp::Avg => Self::with_f16c::<Sum>(true),
            }
        }

        #[cfg(target_arch = "x86_64")]
        const fn with_f16c<C: f16c::CombineEight>(average: bool) -> Self {
            Self {
                element: size_of::<F16>() as u64,
                average,
                first: f16c::first,
                next: f16c::next::<C>,
                last: f16c::last,
                pair: f16c::pair::<C>,
            }
        }

        const fn with<E: Element, C: Combine>(average: bool, isa: Isa) -> Self {
            let element = size_of::<E>() as u64;
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => Self {
                    element,
                    average,
                    first: avx2::first::<E>,
                    next: avx2::next::<E, C>,
                    last: avx2::last::<E>,
                    pair: avx2::pair::<E, C>,
                },
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => Self {
                    element,
                    average,
                    first: avx512::first::<E>,
                    next: avx512::next::<E, C>,
                    last: avx512::last::<E>,
                    pair: avx512::pair::<E, C>,
                },
                _ => Self {
                    element,
                    average,
                    first: first::<E>,
                    next: next::<E, C>,
                    last: last::<E>,
                    pair: pair::<E, C>,
                },
            }
        }
    }

    /// The leaves once more for each instruction set: the same bodies, inlined and vectorised anew.
    macro_rules! leaves {
        ($name:ident, $features:literal) => {
            #[cfg(target_arch = "x86_64")]
            mod $name {
                use super::{Combine, Element};

                #[target_feature(enable = $features)]
                pub(super) unsafe fn first<E: Element>(acc: u64, src: u64, n: usize) {
                    // SAFETY: the caller's promise.
                    unsafe { super::first::<E>(acc, src, n) }
                }

                #[target_feature(enable = $features)]
                pub(super) unsafe fn next<E: Element, C: Combine>(acc: u64, src: u64, n: usize) {
                    // SAFETY: the caller's promise.
                    unsafe { super::next::<E, C>(acc, src, n) }
                }

                #[target_feature(enable = $features)]
                pub(super) unsafe fn last<E: Element>(dst: u64, acc: u64, n: usize, divisor: u32) {
                    // SAFETY: the caller's promise.
                    unsafe { super::last::<E>(dst, acc, n, divisor) }
                }

                #[target_feature(enable = $features)]
                pub(super) unsafe fn pair<E: Element, C: Combine>(
                    dst: u64,
                    a: u64,
                    b: u64,
                    n: usize,
                    divisor: u32,
                ) {
                    // SAFETY: the caller's promise.
                    unsafe { super::pair::<E, C>(dst, a, b, n, divisor) }
                }
            }
        };
    }

    leaves!(avx2, "avx2");
    leaves!(avx512, "avx512f,avx512bw,avx512dq,avx512vl");

    impl Reducer for HostReducer {
        #[inline]
        unsafe fn reduce<B: Block, S: Fn(u32) -> Location, D: Fn(u32) -> Location>(
            &self,
            block: &B,
            sources: &Sources<S>,
            destinations: &Sources<D>,
            elements: u64,
            divisor: u32,
            flag: u32,
        ) -> Result<(), Stopped> {
            let divisor = if self.average { divisor } else { 0 };
            let memory = block.memory();
            let (mut acc, mut unpacked, mut result) = (Tile::new(), Tile::new(), Tile::new());
            // Only one source at a time can lie in the tile of unpacked packets.
            let is_packets = |k| (sources.at)(k).packets.is_some();
            let as_pair = sources.count == 2 && !(is_packets(0) && is_packets(1));
            let stream = elements * self.element >= STREAM_MIN;
            let mut done = 0;
            while done < elements {
                let n = if elements - done < TILE {
                    elements - done
                } else {
                    TILE
                };
                let (at, bytes) = (done * self.element, n * self.element);
                // A packet word holds 4 bytes, and `at` is a multiple of a tile's size.
                let at_packets = at * (WORD / PAYLOAD);
                let n = n as usize;

                let mut i = 0;
                let mut source = || -> Result<u64, Stopped> {
                    let location = (sources.at)(i);
                    i += 1;
                    let Some(site) = location.packets else {
                        return Ok(location.addr + at);
                    };
                    let tile = unpacked.addr();
                    let from = location.addr + at_packets;
                    // SAFETY: the tile holds `bytes`; the caller promises the packets.
                    unsafe {
                        packet::copy_from_packets(block, site, tile, from, bytes, flag)?;
                    }
                    Ok(tile)
                };

                let target = (destinations.at)(0);
                let out = match target.packets {
                    None if !stream => target.addr + at,
                    _ => result.addr(),
                };
                // SAFETY: tiles hold `n` accumulators; the caller promises the locations. Within a
                // tile everything is read before anything is written, so in place is fine.
                unsafe {
                    if as_pair {
                        (self.pair)(out, source()?, source()?, n, divisor);
                    } else {
                        (self.first)(acc.addr(), source()?, n);
                        let mut k = 1;
                        while k < sources.count {
                            (self.next)(acc.addr(), source()?, n);
                            k += 1;
                        }
                        (self.last)(out, acc.addr(), n, divisor);
                    }
                    let mut k = 0;
                    while k < destinations.count {
                        let target = (destinations.at)(k);
                        match target.packets {
                            Some(_) => {
                                let to = target.addr + at_packets;
                                packet::copy_to_packets(block, to, out, bytes, flag);
                            }
                            None if stream => {
                                memory.copy_streaming(target.addr + at, out, bytes);
                            }
                            None => memory.copy(target.addr + at, out, bytes),
                        }
                        k += 1;
                    }
                }
                done += n as u64;
            }
            if stream {
                memory.fence_streaming();
            }
            let mut k = 0;
            while k < destinations.count {
                if let Some(site) = (destinations.at)(k).packets {
                    block.wake(site.peer);
                }
                k += 1;
            }
            Ok(())
        }
    }

    /// The leaves of halves, eight at a time: compilers do not find these conversions by themselves.
    #[cfg(target_arch = "x86_64")]
    mod f16c {
        use core::arch::x86_64::{
            __m128i, __m256, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128,
            _mm_storeu_si128, _mm256_add_ps, _mm256_blendv_ps, _mm256_cmp_ps, _mm256_cvtph_ps,
            _mm256_cvtps_ph, _mm256_div_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps,
            _mm256_mul_ps, _mm256_set1_ps, _mm256_storeu_ps,
        };

        use super::{Combine, F16};
        const WIDTH: usize = 8;

        /// # Safety
        /// `src` must be valid for eight elements.
        #[inline]
        #[target_feature(enable = "avx2,f16c")]
        unsafe fn load(src: u64) -> __m256 {
            // SAFETY: the caller's promise.
            _mm256_cvtph_ps(unsafe { _mm_loadu_si128(src as *const __m128i) })
        }

        /// # Safety
        /// `dst` must be valid for eight elements.
        #[inline]
        #[target_feature(enable = "avx2,f16c")]
        unsafe fn store(dst: u64, acc: __m256) {
            // Every NaN becomes the same one, as in `Element::store`.
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(acc, acc);
            let acc = _mm256_blendv_ps(acc, _mm256_set1_ps(f32::NAN), nan);
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(acc);
            // SAFETY: the caller's promise.
            unsafe { _mm_storeu_si128(dst as *mut __m128i, halves) };
        }

        /// `Element::div` of eight.
        #[inline]
        #[target_feature(enable = "avx2,f16c")]
        fn divide(acc: __m256, divisor: u32) -> __m256 {
            match divisor {
                0 => acc,
                _ => _mm256_div_ps(acc, _mm256_set1_ps(divisor as f32)),
            }
        }

        /// `Combine::combine` of eight.
        pub(super) trait CombineEight: Combine {
            /// # Safety
            /// The machine must have AVX.
            unsafe fn combine(a: __m256, b: __m256) -> __m256;
        }

        macro_rules! combine_eight {
            ($($name:ident, |$a:ident, $b:ident| $body:expr);* $(;)?) => { $(
                impl CombineEight for super::$name {
                    #[inline]
                    #[target_feature(enable = "avx2,f16c")]
                    unsafe fn combine($a: __m256, $b: __m256) -> __m256 { $body }
                }
            )* };
        }

        // The instructions for minimum and maximum return the second operand if one is a NaN.
        combine_eight! {
            Sum, |a, b| _mm256_add_ps(a, b);
            Prod, |a, b| _mm256_mul_ps(a, b);
            Min, |a, b| _mm256_blendv_ps(_mm256_min_ps(b, a), b, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
            Max, |a, b| _mm256_blendv_ps(_mm256_max_ps(b, a), b, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
        }

        /// As [`super::first`].
        #[target_feature(enable = "avx2,f16c")]
        pub(super) unsafe fn first(acc: u64, src: u64, n: usize) {
            let mut i = 0;
            // SAFETY: the caller's promise, for the whole of each eight and for the tail.
            unsafe {
                while i + WIDTH <= n {
                    _mm256_storeu_ps((acc as *mut f32).add(i), load(src + 2 * i as u64));
                    i += WIDTH;
                }
                super::first::<F16>(acc + 4 * i as u64, src + 2 * i as u64, n - i);
            }
        }

        /// As [`super::next`].
        #[target_feature(enable = "avx2,f16c")]
        pub(super) unsafe fn next<C: CombineEight>(acc: u64, src: u64, n: usize) {
            let mut i = 0;
            // SAFETY: as in `first`.
            unsafe {
                while i + WIDTH <= n {
                    let at = (acc as *mut f32).add(i);
                    let sum =
                        <C as CombineEight>::combine(_mm256_loadu_ps(at), load(src + 2 * i as u64));
                    _mm256_storeu_ps(at, sum);
                    i += WIDTH;
                }
                super::next::<F16, C>(acc + 4 * i as u64, src + 2 * i as u64, n - i);
            }
        }

        /// As [`super::last`].
        #[target_feature(enable = "avx2,f16c")]
        pub(super) unsafe fn last(dst: u64, acc: u64, n: usize, divisor: u32) {
            let mut i = 0;
            // SAFETY: as in `first`.
            unsafe {
                while i + WIDTH <= n {
                    let sum = _mm256_loadu_ps((acc as *const f32).add(i));
                    store(dst + 2 * i as u64, divide(sum, divisor));
                    i += WIDTH;
                }
                super::last::<F16>(dst + 2 * i as u64, acc + 4 * i as u64, n - i, divisor);
            }
        }

        /// As [`super::pair`].
        #[target_feature(enable = "avx2,f16c")]
        pub(super) unsafe fn pair<C: CombineEight>(
            dst: u64,
            a: u64,
            b: u64,
            n: usize,
            divisor: u32,
        ) {
            let mut i = 0;
            // SAFETY: as in `first`; eight are read before they are written, so `dst` may be a source.
            unsafe {
                while i + WIDTH <= n {
                    let at = 2 * i as u64;
                    let sum = <C as CombineEight>::combine(load(a + at), load(b + at));
                    store(dst + at, divide(sum, divisor));
                    i += WIDTH;
                }
                let at = 2 * i as u64;
                super::pair::<F16, C>(dst + at, a + at, b + at, n - i, divisor);
            }
        }
    }

    trait Combine {
        fn combine<E: Element>(a: E::Acc, b: E::Acc) -> E::Acc;
    }

    macro_rules! combine {
        ($($name:ident, $f:ident);* $(;)?) => { $(
            struct $name;
            impl Combine for $name {
                #[inline(always)]
                fn combine<E: Element>(a: E::Acc, b: E::Acc) -> E::Acc { E::$f(a, b) }
            }
        )* };
    }

    combine! { Sum, add; Prod, mul; Min, min; Max, max }

    /// # Safety
    /// `src` must be valid for `n` elements, `acc` for `n` accumulators.
    #[inline(always)]
    unsafe fn first<E: Element>(acc: u64, src: u64, n: usize) {
        let (acc, src) = (acc as *mut E::Acc, src as *const E);
        let mut i = 0;
        while i < n {
            // SAFETY: the caller's promise.
            unsafe { acc.add(i).write(src.add(i).read_unaligned().load()) };
            i += 1;
        }
    }

    /// # Safety
    /// As for [`first`].
    #[inline(always)]
    unsafe fn next<E: Element, C: Combine>(acc: u64, src: u64, n: usize) {
        let (acc, src) = (acc as *mut E::Acc, src as *const E);
        let mut i = 0;
        while i < n {
            // SAFETY: the caller's promise.
            unsafe {
                let b = src.add(i).read_unaligned().load();
                acc.add(i).write(C::combine::<E>(acc.add(i).read(), b));
            }
            i += 1;
        }
    }

    /// # Safety
    /// As for [`first`], with `dst` for `n` elements.
    #[inline(always)]
    unsafe fn last<E: Element>(dst: u64, acc: u64, n: usize, divisor: u32) {
        let (dst, acc) = (dst as *mut E, acc as *const E::Acc);
        let mut i = 0;
        if divisor == 0 {
            while i < n {
                // SAFETY: the caller's promise.
                unsafe { dst.add(i).write_unaligned(E::store(acc.add(i).read())) };
                i += 1;
            }
            return;
        }
        while i < n {
            // SAFETY: the caller's promise.
            unsafe {
                dst.add(i)
                    .write_unaligned(E::store(E::div(acc.add(i).read(), divisor)))
            };
            i += 1;
        }
    }

    /// # Safety
    /// All three must be valid for `n` elements; `dst` may equal `a` or `b`, no other overlap.
    #[inline(always)]
    unsafe fn pair<E: Element, C: Combine>(dst: u64, a: u64, b: u64, n: usize, divisor: u32) {
        let sum = |x: E, y: E| C::combine::<E>(x.load(), y.load());
        // SAFETY: the caller's promise.
        let mut i = unsafe {
            match (dst == a || dst == b, divisor) {
                (false, _) => 0,
                (true, 0) => in_place(dst, a, b, n, |x, y| E::store(sum(x, y))),
                (true, _) => in_place(dst, a, b, n, |x, y| E::store(E::div(sum(x, y), divisor))),
            }
        };
        let (dst, a, b) = (dst as *mut E, a as *const E, b as *const E);
        if divisor == 0 {
            while i < n {
                // SAFETY: the caller's promise.
                unsafe {
                    let (x, y) = (a.add(i).read_unaligned(), b.add(i).read_unaligned());
                    dst.add(i)
                        .write_unaligned(E::store(C::combine::<E>(x.load(), y.load())));
                }
                i += 1;
            }
            return;
        }
        while i < n {
            // SAFETY: the caller's promise.
            unsafe {
                let (x, y) = (a.add(i).read_unaligned(), b.add(i).read_unaligned());
                let acc = E::div(C::combine::<E>(x.load(), y.load()), divisor);
                dst.add(i).write_unaligned(E::store(acc));
            }
            i += 1;
        }
    }

    /// Elements that are read before any of them is written.
    const AT_ONCE: usize = 64;

    /// All but the last elements of a [`pair`] whose destination is a source; returns how many those are. The compiler
    /// looks at run time whether memories overlap, and would do one element at a time.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn in_place<E: Element>(
        dst: u64,
        a: u64,
        b: u64,
        n: usize,
        f: impl Fn(E, E) -> E,
    ) -> usize {
        let (dst, a, b) = (dst as *mut E, a as *const E, b as *const E);
        let mut i = 0;
        while n - i >= AT_ONCE {
            // SAFETY: the caller's promise.
            unsafe {
                let mut x = a.add(i).cast::<[E; AT_ONCE]>().read_unaligned();
                let y = b.add(i).cast::<[E; AT_ONCE]>().read_unaligned();
                for (x, y) in x.iter_mut().zip(y) {
                    *x = f(*x, y);
                }
                dst.add(i).cast::<[E; AT_ONCE]>().write_unaligned(x);
            }
            i += AT_ONCE;
        }
        i
    }
}

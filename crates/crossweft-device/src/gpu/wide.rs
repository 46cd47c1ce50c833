//! Plain accesses of one width: where the leaves of this module differ by machine.
//!
//! Addresses are of global memory (a GPU's own, a peer's or the host's), aligned to the access.

/// Sixteen bytes, in four registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Bytes 0 to 3.
    pub a: u32,
    /// Bytes 4 to 7.
    pub b: u32,
    /// Bytes 8 to 11.
    pub c: u32,
    /// Bytes 12 to 15.
    pub d: u32,
}

/// Bytes of a [`Piece`].
pub const PIECE: u64 = 16;

impl Piece {
    /// Of sixteen bytes, the first in the lowest bits.
    #[inline(always)]
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "taken apart into words")]
    pub(in crate::gpu) const fn of(bytes: u128) -> Self {
        Self {
            a: bytes as u32,
            b: (bytes >> 32) as u32,
            c: (bytes >> 64) as u32,
            d: (bytes >> 96) as u32,
        }
    }

    /// The same, as far as the compiler can tell a new value each time: what is computed from it in
    /// a rarely taken branch of a loop stays there, rather than in registers around the loop.
    #[inline(always)]
    #[must_use]
    pub(in crate::gpu) fn opaque(self) -> Self {
        let Self { a, b, c, d } = self;
        Self {
            a: opaque(a),
            b: opaque(b),
            c: opaque(c),
            d: opaque(d),
        }
    }
}

#[cfg(target_arch = "nvptx64")]
mod machine {
    use core::arch::asm;

    use super::Piece;

    /// See [`Piece::opaque`].
    #[inline(always)]
    pub(in crate::gpu) fn opaque(mut value: u32) -> u32 {
        // SAFETY: no instruction.
        unsafe {
            asm!("/* {v} */", v = inout(reg32) value, options(nomem, nostack, preserves_flags));
        }
        value
    }

    macro_rules! scalars {
        ($($load:ident, $store:ident, $t:ty, $ptx:literal, $class:ident, $register:ty;)*) => { $(
            #[inline(always)]
            pub(in crate::gpu) unsafe fn $load(addr: u64) -> $t {
                let value: $register;
                // SAFETY: the caller's promise.
                unsafe {
                    asm!(concat!("ld.global.", $ptx, " {v}, [{a}];"), v = out($class) value,
                        a = in(reg64) addr, options(readonly, nostack, preserves_flags));
                }
                value as $t
            }

            #[inline(always)]
            pub(in crate::gpu) unsafe fn $store(addr: u64, value: $t) {
                // SAFETY: the caller's promise.
                unsafe {
                    asm!(concat!("st.global.", $ptx, " [{a}], {v};"),
                        v = in($class) <$register>::from(value), a = in(reg64) addr,
                        options(nostack, preserves_flags));
                }
            }
        )* };
    }

    scalars! {
        load1, store1, u8, "u8", reg32, u32;
        load2, store2, u16, "u16", reg32, u32;
        load4, store4, u32, "b32", reg32, u32;
        load8, store8, u64, "b64", reg64, u64;
    }

    /// Has the line at an address brought near, which may be any.
    #[inline(always)]
    pub(in crate::gpu) fn prefetch(addr: u64) {
        // SAFETY: a hint.
        unsafe {
            asm!("prefetch.global.L1 [{a}];", a = in(reg64) addr,
                options(readonly, nostack, preserves_flags));
        }
    }

    /// Sets bits of a word that only this rank's threads touch, perhaps in memory that those of a block share.
    #[inline(always)]
    pub(in crate::gpu) unsafe fn or4(addr: u64, bits: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("red.relaxed.sys.or.b32 [{a}], {v};", v = in(reg32) bits, a = in(reg64) addr,
                options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    pub(in crate::gpu) unsafe fn load16(addr: u64) -> Piece {
        let (a, b, c, d);
        // SAFETY: the caller's promise.
        unsafe {
            asm!("ld.global.v4.b32 {{{a}, {b}, {c}, {d}}}, [{p}];", a = out(reg32) a,
                b = out(reg32) b, c = out(reg32) c, d = out(reg32) d, p = in(reg64) addr,
                options(readonly, nostack, preserves_flags));
        }
        Piece { a, b, c, d }
    }

    #[inline(always)]
    pub(in crate::gpu) unsafe fn store16(addr: u64, value: Piece) {
        let Piece { a, b, c, d } = value;
        // SAFETY: the caller's promise.
        unsafe {
            asm!("st.global.v4.b32 [{p}], {{{a}, {b}, {c}, {d}}};", a = in(reg32) a,
                b = in(reg32) b, c = in(reg32) c, d = in(reg32) d, p = in(reg64) addr,
                options(nostack, preserves_flags));
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod machine {
    use super::Piece;

    #[inline(always)]
    pub(in crate::gpu) const fn opaque(value: u32) -> u32 {
        value
    }

    macro_rules! scalars {
        ($($load:ident, $store:ident, $t:ty;)*) => { $(
            #[inline(always)]
            pub(in crate::gpu) unsafe fn $load(addr: u64) -> $t {
                debug_assert!(addr.is_multiple_of(size_of::<$t>() as u64), "unaligned load");
                // SAFETY: the caller's promise.
                unsafe { (addr as *const $t).read() }
            }

            #[inline(always)]
            pub(in crate::gpu) unsafe fn $store(addr: u64, value: $t) {
                debug_assert!(addr.is_multiple_of(size_of::<$t>() as u64), "unaligned store");
                // SAFETY: the caller's promise.
                unsafe { (addr as *mut $t).write(value) }
            }
        )* };
    }

    scalars! {
        load1, store1, u8;
        load2, store2, u16;
        load4, store4, u32;
        load8, store8, u64;
    }

    #[inline(always)]
    pub(in crate::gpu) const fn prefetch(_addr: u64) {}

    #[inline(always)]
    pub(in crate::gpu) unsafe fn or4(addr: u64, bits: u32) {
        use core::sync::atomic::{AtomicU32, Ordering};
        // SAFETY: the caller's promise.
        unsafe { AtomicU32::from_ptr(addr as *mut u32) }.fetch_or(bits, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(in crate::gpu) unsafe fn load16(addr: u64) -> Piece {
        debug_assert!(addr.is_multiple_of(super::PIECE), "unaligned load");
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { (addr as *const [u32; 4]).read() };
        Piece { a, b, c, d }
    }

    #[inline(always)]
    pub(in crate::gpu) unsafe fn store16(addr: u64, value: Piece) {
        debug_assert!(addr.is_multiple_of(super::PIECE), "unaligned store");
        let Piece { a, b, c, d } = value;
        // SAFETY: the caller's promise.
        unsafe { (addr as *mut [u32; 4]).write([a, b, c, d]) }
    }
}

pub(in crate::gpu) use machine::*;

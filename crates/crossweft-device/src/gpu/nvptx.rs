//! NVIDIA: memory at system scope and special registers, as inline PTX.
//!
//! The compiler's own read-modify-write atomics lose order and scope on this target
//! (rust-lang/rust#136480), and what it knows of a pointer may turn a load into a non-coherent one,
//! so every access that another machine may see is written out here.

use core::arch::asm;

use crate::memory::{Memory, Raw};

impl Memory for Raw {
    #[inline(always)]
    unsafe fn load(&self, addr: u64) -> u64 {
        let value;
        // SAFETY: the caller's promise.
        unsafe {
            asm!("ld.relaxed.sys.global.b64 {v}, [{a}];", v = out(reg64) value, a = in(reg64) addr,
                options(readonly, nostack, preserves_flags));
        }
        value
    }

    #[inline(always)]
    unsafe fn load_pair(&self, addr: u64) -> [u64; 2] {
        let (a, b);
        // SAFETY: the caller's promise.
        unsafe {
            asm!("ld.relaxed.sys.global.v2.b64 {{{a}, {b}}}, [{p}];", a = out(reg64) a,
                b = out(reg64) b, p = in(reg64) addr,
                options(readonly, nostack, preserves_flags));
        }
        [a, b]
    }

    #[inline(always)]
    unsafe fn store_pair(&self, addr: u64, words: [u64; 2]) {
        let [a, b] = words;
        // SAFETY: the caller's promise.
        unsafe {
            asm!("st.relaxed.sys.global.v2.b64 [{p}], {{{a}, {b}}};", a = in(reg64) a,
                b = in(reg64) b, p = in(reg64) addr, options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn load_acquire(&self, addr: u64) -> u64 {
        let value;
        // SAFETY: the caller's promise. Not `readonly`: nothing after it may move before it.
        unsafe {
            asm!("ld.acquire.sys.global.b64 {v}, [{a}];", v = out(reg64) value, a = in(reg64) addr,
                options(nostack, preserves_flags));
        }
        value
    }

    #[inline(always)]
    unsafe fn store(&self, addr: u64, value: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("st.relaxed.sys.global.b64 [{a}], {v};", v = in(reg64) value, a = in(reg64) addr,
                options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn store_release(&self, addr: u64, value: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("st.release.sys.global.b64 [{a}], {v};", v = in(reg64) value, a = in(reg64) addr,
                options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn add(&self, addr: u64, value: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("red.relaxed.sys.global.add.u64 [{a}], {v};", v = in(reg64) value,
                a = in(reg64) addr, options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn add_release(&self, addr: u64, value: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("red.release.sys.global.add.u64 [{a}], {v};", v = in(reg64) value,
                a = in(reg64) addr, options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn fetch_add(&self, addr: u64, value: u64) -> u64 {
        let before;
        // SAFETY: the caller's promise.
        unsafe {
            asm!("atom.acq_rel.sys.global.add.u64 {b}, [{a}], {v};", b = out(reg64) before,
                v = in(reg64) value, a = in(reg64) addr, options(nostack, preserves_flags));
        }
        before
    }

    /// Without a fence: that would wait until everything this thread
    /// has sent to peers has arrived there, about a microsecond.
    #[inline(always)]
    unsafe fn fetch_add_local(&self, addr: u64, value: u64) -> u64 {
        let before;
        // SAFETY: the caller's promise.
        unsafe {
            asm!("atom.relaxed.sys.global.add.u64 {b}, [{a}], {v};", b = out(reg64) before,
                v = in(reg64) value, a = in(reg64) addr, options(nostack, preserves_flags));
        }
        before
    }

    #[inline(always)]
    unsafe fn raise(&self, addr: u64, value: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("red.relaxed.sys.global.max.u64 [{a}], {v};", v = in(reg64) value,
                a = in(reg64) addr, options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    fn fence(&self) {
        // SAFETY: a fence touches no memory.
        unsafe { asm!("fence.acq_rel.sys;", options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    fn fence_launch(&self) {}

    /// Tables and handles: aligned for `T`, as they always are. Bytes of a message go through
    /// [`super::wide`].
    #[inline(always)]
    unsafe fn read<T: Copy>(&self, addr: u64) -> T {
        // SAFETY: the caller's promise. A raw pointer made of an integer tells the compiler nothing
        // that would make this a non-coherent load.
        unsafe { (addr as *const T).read() }
    }

    #[inline(always)]
    unsafe fn write<T: Copy>(&self, addr: u64, value: T) {
        // SAFETY: the caller's promise.
        unsafe { (addr as *mut T).write(value) }
    }

    #[inline(always)]
    unsafe fn copy(&self, dst: u64, src: u64, bytes: u64) {
        // SAFETY: the caller's promise.
        unsafe { super::copy::copy_part(0_u32, 1, dst, src, bytes) }
    }
}

/// 1 on all threads of a warp if `mine` is not 0 on any, else 0.
#[inline(always)]
#[must_use]
pub fn vote_any(mine: u32) -> u32 {
    let all;
    // SAFETY: blocks have whole warps, and all threads of one come here together. Clobbers memory: what
    // the warp's threads wrote before is behind them all.
    unsafe {
        asm!(
            "{{",
            ".reg .pred %mine, %any;",
            "setp.ne.u32 %mine, {mine}, 0;",
            "vote.sync.any.pred %any, %mine, 0xffffffff;",
            "selp.u32 {all}, 1, 0, %any;",
            "}}",
            mine = in(reg32) mine,
            all = out(reg32) all,
            options(nostack),
        );
    }
    all
}

/// What `x` is on the thread of the warp whose index differs in the bits of `mask`.
#[inline(always)]
#[must_use]
pub fn exchange(x: u32, mask: u32) -> u32 {
    let other;
    // SAFETY: blocks have whole warps, and all threads of one come here together.
    unsafe {
        asm!("shfl.sync.bfly.b32 {o}, {x}, {m}, 0x1f, 0xffffffff;", o = out(reg32) other, x = in(reg32) x,
            m = in(reg32) mask, options(nostack));
    }
    other
}

/// The square root, rounded to nearest.
#[inline(always)]
#[must_use]
pub fn sqrt(x: f32) -> f32 {
    let root;
    // SAFETY: arithmetic.
    unsafe {
        asm!("sqrt.rn.f32 {r}, {x};", r = out(reg32) root, x = in(reg32) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    root
}

/// Brings the threads of a warp together; what they wrote before is behind them all.
#[inline(always)]
pub fn warp_sync() {
    // SAFETY: blocks have whole warps, and all threads of one come here together. Clobbers memory, as a barrier must.
    unsafe { asm!("bar.warp.sync 0xffffffff;", options(nostack)) };
}

/// Writes `mine` to a word that the threads of a block share, if it is 0; returns what it was.
///
/// # Safety
/// The address must be valid and 8-byte aligned, and nobody may access it otherwise meanwhile.
#[inline(always)]
pub unsafe fn claim(addr: u64, mine: u64) -> u64 {
    let before;
    // SAFETY: the caller's promise.
    unsafe {
        asm!("atom.relaxed.sys.cas.b64 {b}, [{a}], 0, {v};", b = out(reg64) before,
            v = in(reg64) mine, a = in(reg64) addr, options(nostack, preserves_flags));
    }
    before
}

/// `x`, of which the compiler knows nothing any more. Code behind a barrier that depends on what only
/// some threads know would otherwise be doubled with the barrier in it, and the threads of a block
/// would meet at different ones.
#[inline(always)]
#[must_use]
pub fn opaque(x: u32) -> u32 {
    let y;
    // SAFETY: a copy.
    unsafe {
        asm!("mov.b32 {y}, {x};", y = out(reg32) y, x = in(reg32) x,
            options(nomem, nostack, preserves_flags));
    }
    y
}

macro_rules! special {
    ($($(#[$doc:meta])* $name:ident, $register:literal;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        #[must_use]
        pub fn $name() -> u32 {
            let value;
            // SAFETY: reads a register. Not `pure`: what is computed from it would be computed
            // before every loop, and kept in registers that the loops need.
            unsafe {
                asm!(concat!("mov.u32 {v}, %", $register, ";"), v = out(reg32) value,
                    options(nomem, nostack, preserves_flags));
            }
            value
        }
    )* };
}

special! {
    /// This thread's index in its block.
    thread, "tid.x";
    /// Threads of a block.
    threads, "ntid.x";
    /// This block's index in the grid.
    block_x, "ctaid.x";
    /// The second index.
    block_y, "ctaid.y";
    /// Blocks of the grid.
    blocks_x, "nctaid.x";
}

/// Nanoseconds since some moment; advances in steps of up to a microsecond.
#[inline(always)]
#[must_use]
pub fn time_ns() -> u64 {
    let now;
    // SAFETY: reads a register; not `pure`, because it changes.
    unsafe {
        asm!("mov.u64 {v}, %globaltimer;", v = out(reg64) now,
            options(nomem, nostack, preserves_flags));
    }
    now
}

/// Waits until what was launched ahead of this kernel in its stream has ended, and its writes are seen: a launch may ask to
/// begin before that. From compute capability 9.0 on; older machines never begin early.
#[inline(always)]
pub fn follow() {
    #[cfg(target_feature = "sm_90")]
    // SAFETY: waits, for what waits for nothing behind it. Clobbers memory, as it must.
    unsafe {
        asm!("griddepcontrol.wait;", options(nostack, preserves_flags));
    }
}

/// Allows what is launched behind this kernel to begin as soon as all blocks have come here, if its launch asks for that.
#[inline(always)]
pub fn precede() {
    #[cfg(target_feature = "sm_90")]
    // SAFETY: a hint for the scheduler.
    unsafe {
        asm!(
            "griddepcontrol.launch_dependents;",
            options(nostack, preserves_flags)
        );
    }
}

/// Makes barriers ready, which needs nothing here.
///
/// # Safety
/// None; on other machines, it writes.
#[inline(always)]
pub unsafe fn ready() {}

/// Block barrier that agrees on the largest of four numbers, where 0 is all but always everybody's.
///
/// One function, never inlined: the compiler may double code, and the threads of a warp must not meet at
/// two copies of a barrier. They come here from waits that end at different times and perhaps from
/// different places, so their warp is brought together before the aligned form, which counts warps. (The
/// form that counts threads has two places itself, one for warps that have come apart, which sanitizers
/// take for different barriers.) Generic in the barrier's number, so that it becomes part of the crate that
/// calls it: modules of PTX refer to nothing outside.
#[inline(never)]
#[must_use]
pub fn barrier_max<const ID: u32>(mine: u32) -> u32 {
    let all: u32;
    // SAFETY: every thread of the block calls it as often, and all take the branch or none does.
    // Clobbers memory, as a barrier must.
    unsafe {
        asm!(
            "{{",
            ".reg .pred %mine, %any, %two, %three;",
            "setp.ne.u32 %mine, {mine}, 0;",
            "bar.warp.sync 0xffffffff;",
            "bar.cta.red.or.pred %any, {id}, %mine;",
            "mov.u32 {all}, 0;",
            "@!%any bra %agreed;",
            "setp.eq.u32 %mine, {mine}, 2;",
            "bar.cta.red.or.pred %two, {id}, %mine;",
            "setp.eq.u32 %mine, {mine}, 3;",
            "bar.cta.red.or.pred %three, {id}, %mine;",
            "selp.u32 {all}, 2, 1, %two;",
            "selp.u32 {all}, 3, {all}, %three;",
            "%agreed:",
            "}}",
            id = const ID,
            mine = in(reg32) mine,
            all = out(reg32) all,
            options(nostack),
        );
    }
    all
}

/// Whether one of them is a NaN. Written out, for the compiler makes twice as much of it.
#[inline(always)]
#[must_use]
#[allow(clippy::many_single_char_names, reason = "eight of a kind")]
pub fn any_nan((a, b, c, d, e, f, g, h): (f32, f32, f32, f32, f32, f32, f32, f32)) -> bool {
    let any: u32;
    // SAFETY: arithmetic.
    unsafe {
        asm!(
            "{{",
            ".reg .pred %any;",
            "setp.nan.f32 %any, {a}, {b};",
            "setp.nan.or.f32 %any, {c}, {d}, %any;",
            "setp.nan.or.f32 %any, {e}, {f}, %any;",
            "setp.nan.or.f32 %any, {g}, {h}, %any;",
            "selp.u32 {any}, 1, 0, %any;",
            "}}",
            a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d,
            e = in(reg32) e, f = in(reg32) f, g = in(reg32) g, h = in(reg32) h,
            any = out(reg32) any,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    any != 0
}

macro_rules! conversions {
    ($($(#[$doc:meta])* $name:ident, $ptx:literal;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        #[must_use]
        pub fn $name(low: f32, high: f32) -> u32 {
            let both;
            // SAFETY: arithmetic.
            unsafe {
                asm!(concat!($ptx, " {d}, {h}, {l};"), d = out(reg32) both, h = in(reg32) high,
                    l = in(reg32) low, options(pure, nomem, nostack, preserves_flags));
            }
            both
        }
    )* };
}

conversions! {
    /// Two binary16, rounded to nearest even. A NaN becomes another than on the host.
    f16x2, "cvt.rn.f16x2.f32";
    /// Two bfloat16, rounded to nearest even. A NaN becomes another than on the host.
    bf16x2, "cvt.rn.bf16x2.f32";
}

/// A binary16 as f32, which is exact.
#[inline(always)]
#[must_use]
pub fn f16_to_f32(bits: u16) -> f32 {
    let value;
    // SAFETY: arithmetic.
    unsafe {
        asm!("cvt.f32.f16 {d}, {s};", d = out(reg32) value, s = in(reg16) bits,
            options(pure, nomem, nostack, preserves_flags));
    }
    value
}

//! A kernel's parameter as an array of words.

/// A function that reads a word of the parameter of `$entry` at a byte offset. Indexed as it is: the compiler
/// would copy it to local memory for that.
#[cfg(target_arch = "nvptx64")]
macro_rules! word_of {
    ($entry:ident, $launch:ident) => {
        |offset: u64| {
            let word: u64;
            core::arch::asm!(
                "{{",
                ".reg .b64 %from;",
                concat!("mov.b64 %from, ", stringify!($entry), "_param_0;"),
                "add.s64 %from, %from, {offset};",
                "ld.param.b64 {word}, [%from];",
                "}}",
                offset = in(reg64) offset,
                word = out(reg64) word,
                options(pure, nomem, nostack, preserves_flags),
            );
            word
        }
    };
}

/// The same where parameters lie in memory.
#[cfg(target_arch = "amdgpu")]
macro_rules! word_of {
    ($entry:ident, $launch:ident) => {
        |offset: u64| {
            (&raw const $launch)
                .byte_add(offset as usize)
                .cast::<u64>()
                .read()
        }
    };
}

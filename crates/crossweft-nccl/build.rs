//! Gives the library the name that programs linked against NCCL ask the loader for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
}

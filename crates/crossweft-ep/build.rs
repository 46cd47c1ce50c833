//! Gives the library the name that programs linked against NCCL EP ask the loader for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl_ep.so.0");
}

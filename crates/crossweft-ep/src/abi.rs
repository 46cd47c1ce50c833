//! The exported functions. Functions that C calls cannot unwind: what panics is caught in
//! [`result`](crate::status::result).
#![allow(unsafe_code)]

use std::mem::offset_of;

use crossweft_moe::Layout;

use crate::config::{
    CombineConfig, CombineInputs, CombineOutputs, CompleteConfig, DispatchConfig, DispatchInputs,
    DispatchOutputs, GroupConfig, HandleConfig, LayoutInfo, Tensor, TensorAllocConfig, layout,
    signed,
};
use crate::group::Group;
use crate::nccl::Communicator;
use crate::pass::Pass;
use crate::pointer::{Address, Given, In, Out, give, take};
use crate::status::{self, Error};
use crate::tensor::{Described, UINT8, is_type};
use crate::{settings, table};

/// `libnccl_ep.so` 0.2.0.
const VERSION: i32 = 200;
/// More than any tensor has.
const MOST_DIMENSIONS: u32 = 8;
/// What `ncclEpHandleMemSize` says: handles keep their tables themselves, and callers must be able to allocate it.
const HANDLE_BYTES: usize = 64;

/// What a stream is on host memory: of no account.
type Stream = Address;

/// A descriptor with the sizes that it points to.
#[derive(Debug)]
#[repr(C)]
struct Owned {
    tensor: Tensor,
    sizes: [usize; MOST_DIMENSIONS as usize],
}

/// Functions that return `ncclResult_t`; bodies return `Result<(), Error>`.
macro_rules! calls {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        // SAFETY: nothing else in any program that uses NCCL EP has this name, and it is called as its header says.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> i32 {
            status::result(stringify!($name), || $body)
        }
    )*};
}

/// The words behind the last call of this thread that failed. Valid until the next one that does.
// SAFETY: the project's own name.
#[unsafe(no_mangle)]
extern "C" fn crossweftEpGetLastError() -> *const std::ffi::c_char {
    status::last()
}

/// A handle for a pass of `group`.
fn init(
    group: Address,
    kind: i32,
    config: &Given<HandleConfig>,
    top_k: i32,
) -> Result<Pass, Error> {
    let group = table::group(group)?;
    let layout: Layout = layout(group.algorithm, kind, config)?;
    Pass::new(&group, layout, top_k)
}

calls! {
    fn ncclEpGetVersion(version: Out<i32>) {
        version.set("version", VERSION)
    }

    /// Only a descriptor: the caller gives it memory.
    fn ncclEpTensorAlloc(
        tensor: Out<Address>, ndim: u32, datatype: i32, sizes: In<usize>, config: Given<TensorAllocConfig>,
    ) {
        tensor.check("tensor")?;
        config.read()?;
        if ndim == 0 || ndim > MOST_DIMENSIONS || !is_type(datatype) {
            return Err(Error::argument(format!(
                "{ndim} dimensions of type {datatype}; there can be 1 to {MOST_DIMENSIONS}, of ncclDataType_t"
            )));
        }
        let mut all = [0; MOST_DIMENSIONS as usize];
        all[..ndim as usize].copy_from_slice(&sizes.read("sizes", ndim as usize)?);
        let address = give(|Address(place)| Owned {
            tensor: Tensor::without_memory(ndim, datatype, place + offset_of!(Owned, sizes) as u64),
            sizes: all,
        });
        table::insert_tensor(address);
        tensor.set("tensor", address)
    }

    fn ncclEpTensorDestroy(tensor: Address) {
        if tensor == Address::NULL {
            return Ok(());
        }
        table::remove_tensor(tensor)?;
        // SAFETY: it was in the table, so it is from above, and is there no longer; the caller does not use it any more.
        unsafe { take::<Owned>(tensor) };
        Ok(())
    }

    /// Collective; blocks.
    fn ncclEpCreateGroup(group: Out<Address>, comm: Address, config: Given<GroupConfig>) {
        group.set("ep_group", Address::NULL)?;
        settings::check_device()?;
        let made = Group::new(Communicator::new(comm)?, config.required())?;
        group.set("ep_group", table::insert_group(made))
    }

    fn ncclEpGroupDestroy(group: Address) {
        table::remove_group(group).map(drop)
    }

    fn ncclEpHandleMemSize(
        group: Address, kind: i32, config: Given<HandleConfig>, size: Out<usize>, top_k: i32,
    ) {
        size.check("size_out")?;
        init(group, kind, &config, top_k)?;
        size.set("size_out", HANDLE_BYTES)
    }

    fn ncclEpInitHandle(
        handle: Out<Address>, group: Address, kind: i32, config: Given<HandleConfig>, top_k: i32,
        memory: Given<Tensor>,
    ) {
        handle.set("handle", Address::NULL)?;
        let pass = init(group, kind, &config, top_k)?;
        if let Some(memory) = Described::read("handle_mem", &memory, pass.group().comm())? {
            memory.expect_type(UINT8)?;
            if !matches!(memory.sizes[..], [bytes] if bytes >= HANDLE_BYTES) {
                return Err(Error::argument(format!(
                    "handle_mem has sizes {:?}; it must have one, of {HANDLE_BYTES} at least",
                    memory.sizes
                )));
            }
        }
        handle.set("handle", table::insert_pass(pass))
    }

    /// With high throughput collective; blocks.
    fn ncclEpUpdateHandle(
        handle: Address, topk_idx: Given<Tensor>, info: Given<LayoutInfo>, _stream: Stream,
    ) {
        table::with_pass(handle, |pass| pass.update(&topk_idx, &info))
    }

    /// The same, of a handle that it makes.
    fn ncclEpCreateHandle(
        handle: Out<Address>, group: Address, kind: i32, topk_idx: Given<Tensor>, info: Given<LayoutInfo>,
        config: Given<HandleConfig>, _stream: Stream,
    ) {
        let cleared = handle.set("handle", Address::NULL);
        let make = || {
            cleared?;
            let shape = topk_idx.required()?;
            let sizes = In::<usize>::at(shape.sizes).read("the sizes of topk_idx", shape.ndim.min(2) as usize)?;
            let top_k = sizes.get(1).and_then(|k| u32::try_from(*k).ok()).unwrap_or(0);
            init(group, kind, &config, signed("top-k", top_k)?)
        };
        let ranks = table::group(group)?;
        let pass = Pass::create(&ranks, make(), &topk_idx, &info)?;
        handle.set("handle", table::insert_pass(pass))
    }

    fn ncclEpHandleDestroy(handle: Address) {
        table::remove_pass(handle).map(drop)
    }

    /// Collective; blocks, but for peers' tokens with `send_only`.
    fn ncclEpDispatch(
        handle: Address, inputs: Given<DispatchInputs>, outputs: Given<DispatchOutputs>, info: Given<LayoutInfo>,
        config: Given<DispatchConfig>, _stream: Stream,
    ) {
        let (inputs, outputs) = (inputs.required()?, outputs.required()?);
        let (info, config) = (info.read()?, config.read()?);
        table::with_pass(handle, |pass| pass.dispatch(&inputs, &outputs, info, config))
    }

    /// Collective; blocks, but for peers' sums with `send_only`.
    fn ncclEpCombine(
        handle: Address, inputs: Given<CombineInputs>, outputs: Given<CombineOutputs>, config: Given<CombineConfig>,
        _stream: Stream,
    ) {
        let (inputs, outputs, config) = (inputs.required()?, outputs.required()?, config.read()?);
        table::with_pass(handle, |pass| pass.combine(&inputs, &outputs, config))
    }

    /// Blocks.
    fn ncclEpComplete(handle: Address, config: Given<CompleteConfig>, _stream: Stream) {
        config.read()?;
        table::with_pass(handle, Pass::complete)
    }

    fn ncclEpMaskQuery(group: Address, mask: Out<i32>, _stream: Stream) {
        mask.set_all("mask_status", table::group(group)?.active()?)
    }

    /// Local: ranks that must agree pass the same.
    fn ncclEpMaskUpdate(group: Address, mask: In<i32>, _stream: Stream) {
        let group = table::group(group)?;
        let active = mask.read("mask", group.ranks() as usize)?;
        if let Some(other) = active.iter().find(|active| !matches!(active, 0 | 1)) {
            return Err(Error::argument(format!("mask has {other}; it can be 1 for active, 0 for masked")));
        }
        group.set_active(&active)
    }

    /// Takes all ranks in again. Local, for calls carry their number, so nothing has to be cleared together.
    fn ncclEpMaskClean(group: Address, _stream: Stream) {
        let group = table::group(group)?;
        group.set_active(&vec![1; group.ranks() as usize])
    }

    fn ncclEpGetAsyncError(group: Address, error: Out<i32>) {
        error.set("error_out", table::group(group)?.error()?.into())
    }

    fn ncclEpErrorClear(group: Address) {
        table::group(group)?.clear_error()
    }
}

#[cfg(test)]
mod tests {
    use crate::status::{self, Error, Status};

    #[test]
    fn a_panic_ends_at_the_interface() {
        let result = status::result("ncclEpTest", || -> Result<(), Error> {
            panic!("injected: 7")
        });
        assert_eq!(result, Status::Internal as i32);
        // SAFETY: a string that is valid until this thread's next error.
        let text = unsafe { std::ffi::CStr::from_ptr(status::last()) };
        let text = text.to_str().unwrap();
        assert!(
            text.contains("ncclEpTest") && text.contains("injected: 7"),
            "{text}"
        );
    }
}

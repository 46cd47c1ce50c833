//! The part of the driver's C interface that is used here: types, constants, symbols.
//!
//! Written by hand after `cuda.h` of CUDA 13.0, with the names that the library exports (`_v2`
//! where the header renames). Layouts are asserted at the end.
#![allow(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "names and arguments are the driver's"
)]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use super::driver::{Driver, Slot};
use super::error::CudaError;

pub(super) type Code = c_uint;
pub(super) type CuDevice = c_int;
pub(super) type CuPointer = u64;
pub(super) type CuMemory = c_ulonglong;

/// An opaque handle of the driver; null is none.
macro_rules! handles {
    ($($name:ident)*) => {$(
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) struct $name(pub(super) *mut c_void);

        impl $name {
            pub(super) const NULL: Self = Self(std::ptr::null_mut());
        }

        // SAFETY: the driver's handles may be used from any thread; only the driver looks behind
        // the pointer.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! { CuContext CuStream CuEvent CuModule CuFunction CuGraph CuGraphExec }

pub(super) const SUCCESS: Code = 0;
pub(super) const INVALID_VALUE: Code = 1;
pub(super) const OUT_OF_MEMORY: Code = 2;
pub(super) const DEINITIALIZED: Code = 4;
pub(super) const NO_DEVICE: Code = 100;
pub(super) const INVALID_CONTEXT: Code = 201;
pub(super) const NOT_FOUND: Code = 500;
pub(super) const NOT_READY: Code = 600;
pub(super) const NOT_PERMITTED: Code = 800;
pub(super) const NOT_SUPPORTED: Code = 801;

/// Attributes of a device.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum DeviceAttribute {
    MaxThreadsPerBlock = 1,
    ClockRate = 13,
    Multiprocessors = 16,
    MemoryClockRate = 36,
    MaxThreadsPerMultiprocessor = 39,
    AsyncEngines = 40,
    ComputeMajor = 75,
    ComputeMinor = 76,
    HostNativeAtomics = 86,
    CooperativeLaunch = 95,
    MaxSharedBytesPerBlock = 97,
    VirtualMemory = 102,
    PosixFd = 103,
    RdmaWithVirtualMemory = 110,
    Fabric = 128,
    Multicast = 132,
}

/// Attributes of an ordered pair of devices.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum PeerAttribute {
    PerformanceRank = 1,
    Access = 2,
    NativeAtomics = 3,
}

/// Attributes of a function.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum FunctionAttribute {
    MaxThreads = 0,
    SharedBytes = 1,
    LocalBytes = 3,
    Registers = 4,
    MaxDynamicSharedBytes = 8,
}

/// Attributes of a pointer.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum PointerAttribute {
    MemoryType = 2,
    Managed = 8,
    Device = 9,
    LegacyIpc = 10,
    RangeStart = 11,
    RangeBytes = 12,
    Pool = 17,
}

pub(super) const MEMORY_HOST: c_uint = 1;
pub(super) const MEMORY_DEVICE: c_uint = 2;

pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// Of an event that is recorded into a graph: it is a node of that, and takes the time at each replay.
pub(super) const EVENT_RECORD_EXTERNAL: c_uint = 1;
pub(super) const CAPTURE_THREAD_LOCAL: c_int = 1;
pub(super) const CAPTURE_RELAXED: c_int = 2;
pub(super) const CAPTURE_NONE: c_int = 0;
pub(super) const CAPTURE_ACTIVE: c_int = 1;

pub(super) const HOST_PORTABLE: c_uint = 1;
pub(super) const HOST_DEVICE_MAP: c_uint = 2;

pub(super) const HANDLE_FD: c_int = 1;
pub(super) const HANDLE_FABRIC: c_int = 8;
pub(super) const ALLOCATION_PINNED: c_int = 1;
pub(super) const LOCATION_DEVICE: c_int = 1;
pub(super) const GRANULARITY_RECOMMENDED: c_int = 1;
pub(super) const READ_WRITE: c_int = 3;
pub(super) const IPC_LAZY_PEER_ACCESS: c_uint = 1;

/// Options of the just-in-time compiler.
pub(super) mod jit {
    use std::ffi::c_int;

    pub(in super::super) const ERROR_LOG: c_int = 5;
    pub(in super::super) const ERROR_LOG_BYTES: c_int = 6;
    pub(in super::super) const MAX_REGISTERS: c_int = 0;
    pub(in super::super) const OPTIMIZATION: c_int = 7;
    pub(in super::super) const LINE_INFO: c_int = 13;
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationProperties {
    pub(super) kind: c_int,
    pub(super) handle_types: c_int,
    pub(super) location: Location,
    pub(super) win32: *mut c_void,
    pub(super) compression: u8,
    pub(super) rdma: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// What `cuLaunchKernelEx` takes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: CuStream,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) count: c_uint,
}

/// One of them; `value` is a union of 64 bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchAttribute {
    pub(super) id: c_int,
    pub(super) padding: c_int,
    pub(super) value: [c_int; 16],
}

/// The launch may begin before what is ahead of it in its stream has ended: `value` is 1.
pub(super) const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessDescription {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MulticastProperties {
    pub(super) devices: c_uint,
    pub(super) bytes: usize,
    pub(super) handle_types: c_ulonglong,
    pub(super) flags: c_ulonglong,
}

/// 64 opaque bytes: a legacy IPC handle, or a fabric handle.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Opaque64(pub(super) [u8; 64]);

/// Declares the symbols: a slot for each, and a method of [`Driver`] that looks it up on its first
/// call and turns the code it returns into a `Result`.
macro_rules! symbols {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),*);)*) => {
        /// Each name and the types of its arguments, to be compared with the header.
        #[cfg(test)]
        const DECLARED: &[(&str, &[&str])] = &[$((stringify!($name), &[$(stringify!($type)),*]),)*];

        /// A slot for each symbol, filled when it is first called.
        #[derive(Debug, Default)]
        pub(super) struct Table {
            $(pub(super) $name: Slot<unsafe extern "C" fn($($type),*) -> Code>,)*
        }

        impl Driver {
            $(
                $(#[$attribute])*
                /// # Safety
                /// What the driver's documentation asks for.
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<(), CudaError> {
                    // SAFETY: the type is that of the header for the symbol of this name.
                    let function = unsafe {
                        self.symbol(&self.table().$name, stringify!($name))?
                    };
                    // SAFETY: the caller's promise.
                    self.check(stringify!($name), unsafe { function($($argument),*) })
                }
            )*
        }
    };
}

symbols! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    #[expect(dead_code, reason = "called through its slot, because failing is how it is reached")]
    fn cuGetErrorName(code: Code, name: *mut *const c_char);

    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut CuDevice, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CuDevice);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CuDevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CuDevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: DeviceAttribute, device: CuDevice);
    fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: CuDevice);
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: CuDevice, peer: CuDevice);
    fn cuDeviceGetP2PAttribute(
        value: *mut c_int, attribute: PeerAttribute, source: CuDevice, target: CuDevice
    );

    fn cuDevicePrimaryCtxRetain(context: *mut CuContext, device: CuDevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CuDevice);
    fn cuCtxPushCurrent_v2(context: CuContext);
    fn cuCtxPopCurrent_v2(context: *mut CuContext);
    fn cuCtxGetCurrent(context: *mut CuContext);
    fn cuCtxGetDevice(device: *mut CuDevice);

    fn cuStreamCreate(stream: *mut CuStream, flags: c_uint);
    fn cuStreamCreateWithPriority(stream: *mut CuStream, flags: c_uint, priority: c_int);
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    fn cuStreamDestroy_v2(stream: CuStream);
    fn cuStreamQuery(stream: CuStream);
    /// Since CUDA 12.0.
    fn cuStreamGetId(stream: CuStream, id: *mut c_ulonglong);
    fn cuStreamWaitEvent(stream: CuStream, event: CuEvent, flags: c_uint);
    fn cuStreamIsCapturing(stream: CuStream, status: *mut c_int);
    fn cuStreamGetCaptureInfo_v2(
        stream: CuStream, status: *mut c_int, id: *mut c_ulonglong, graph: *mut CuGraph,
        dependencies: *mut *const c_void, count: *mut usize
    );
    fn cuStreamBeginCapture_v2(stream: CuStream, mode: c_int);
    fn cuStreamEndCapture(stream: CuStream, graph: *mut CuGraph);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int);

    fn cuEventCreate(event: *mut CuEvent, flags: c_uint);
    fn cuEventDestroy_v2(event: CuEvent);
    fn cuEventRecord(event: CuEvent, stream: CuStream);
    fn cuEventRecordWithFlags(event: CuEvent, stream: CuStream, flags: c_uint);
    fn cuEventQuery(event: CuEvent);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: CuEvent, end: CuEvent);

    fn cuGraphInstantiateWithFlags(exec: *mut CuGraphExec, graph: CuGraph, flags: c_ulonglong);
    fn cuGraphUpload(exec: CuGraphExec, stream: CuStream);
    fn cuGraphLaunch(exec: CuGraphExec, stream: CuStream);
    fn cuGraphExecDestroy(exec: CuGraphExec);
    fn cuGraphDestroy(graph: CuGraph);
    fn cuGraphGetNodes(graph: CuGraph, nodes: *mut *mut c_void, count: *mut usize);

    fn cuModuleLoadDataEx(
        module: *mut CuModule, image: *const c_void, count: c_uint, options: *mut c_int,
        values: *mut *mut c_void
    );
    fn cuModuleLoadData(module: *mut CuModule, image: *const c_void);
    fn cuModuleUnload(module: CuModule);
    fn cuModuleGetFunction(function: *mut CuFunction, module: CuModule, name: *const c_char);
    /// Since CUDA 12.4.
    fn cuFuncLoad(function: CuFunction);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: FunctionAttribute, function: CuFunction);
    fn cuFuncSetAttribute(function: CuFunction, attribute: FunctionAttribute, value: c_int);
    /// Since CUDA 12.4.
    fn cuFuncGetParamInfo(
        function: CuFunction, index: usize, offset: *mut usize, bytes: *mut usize
    );
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: CuFunction, threads: c_int, shared_bytes: usize
    );
    fn cuLaunchKernel(
        function: CuFunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint,
        stream: CuStream, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
    /// Since CUDA 11.8.
    fn cuLaunchKernelEx(
        config: *const LaunchConfig, function: CuFunction, parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
    fn cuLaunchCooperativeKernel(
        function: CuFunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint,
        stream: CuStream, parameters: *mut *mut c_void
    );

    fn cuMemCreate(
        memory: *mut CuMemory, bytes: usize, properties: *const AllocationProperties,
        flags: c_ulonglong
    );
    fn cuMemRelease(memory: CuMemory);
    fn cuMemAddressReserve(
        address: *mut CuPointer, bytes: usize, alignment: usize, hint: CuPointer,
        flags: c_ulonglong
    );
    fn cuMemAddressFree(address: CuPointer, bytes: usize);
    fn cuMemMap(
        address: CuPointer, bytes: usize, offset: usize, memory: CuMemory, flags: c_ulonglong
    );
    fn cuMemUnmap(address: CuPointer, bytes: usize);
    fn cuMemSetAccess(
        address: CuPointer, bytes: usize, access: *const AccessDescription, count: usize
    );
    fn cuMemGetAllocationGranularity(
        granularity: *mut usize, properties: *const AllocationProperties, option: c_int
    );
    fn cuMemGetAllocationPropertiesFromHandle(
        properties: *mut AllocationProperties, memory: CuMemory
    );
    fn cuMemRetainAllocationHandle(memory: *mut CuMemory, address: *mut c_void);
    fn cuMemExportToShareableHandle(
        handle: *mut c_void, memory: CuMemory, kind: c_int, flags: c_ulonglong
    );
    fn cuMemImportFromShareableHandle(memory: *mut CuMemory, handle: *mut c_void, kind: c_int);

    fn cuMemAlloc_v2(address: *mut CuPointer, bytes: usize);
    fn cuMemFree_v2(address: CuPointer);
    fn cuMemGetAddressRange_v2(base: *mut CuPointer, bytes: *mut usize, address: CuPointer);
    fn cuPointerGetAttributes(
        count: c_uint, attributes: *const PointerAttribute, values: *mut *mut c_void,
        address: CuPointer
    );
    fn cuIpcGetMemHandle(handle: *mut Opaque64, address: CuPointer);
    fn cuIpcOpenMemHandle_v2(address: *mut CuPointer, handle: Opaque64, flags: c_uint);
    fn cuIpcCloseMemHandle(address: CuPointer);

    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(address: *mut c_void);
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(address: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(device: *mut CuPointer, host: *mut c_void, flags: c_uint);

    fn cuMemcpyAsync(to: CuPointer, from: CuPointer, bytes: usize, stream: CuStream);
    fn cuMemcpyPeerAsync(
        to: CuPointer, to_context: CuContext, from: CuPointer, from_context: CuContext,
        bytes: usize, stream: CuStream
    );
    fn cuMemsetD8Async(to: CuPointer, value: u8, bytes: usize, stream: CuStream);
    fn cuMemsetD32Async(to: CuPointer, value: c_uint, words: usize, stream: CuStream);

    fn cuMulticastGetGranularity(
        granularity: *mut usize, properties: *const MulticastProperties, option: c_int
    );
}

// The layouts that cuda.h has on 64-bit machines.
const _: () = {
    assert!(size_of::<usize>() == 8);
    assert!(size_of::<AllocationProperties>() == 32);
    assert!(std::mem::offset_of!(AllocationProperties, win32) == 16);
    assert!(std::mem::offset_of!(AllocationProperties, rdma) == 25);
    assert!(size_of::<AccessDescription>() == 12);
    assert!(size_of::<LaunchConfig>() == 56);
    assert!(std::mem::offset_of!(LaunchConfig, stream) == 32);
    assert!(size_of::<LaunchAttribute>() == 72);
    assert!(std::mem::offset_of!(LaunchAttribute, value) == 8);
    assert!(size_of::<MulticastProperties>() == 32);
    assert!(size_of::<Opaque64>() == 64);
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::*;

    /// How an argument is passed, which is all that has to agree.
    fn passed_by_header(argument: &str) -> String {
        let types = argument.trim().trim_start_matches("const ");
        if types.contains('*') {
            return "pointer".to_owned();
        }
        let words: Vec<_> = types.split_whitespace().collect();
        let (_, named) = words.split_last().unwrap_or((&"", &[]));
        match named.join(" ").as_str() {
            "CUcontext" | "CUstream" | "CUevent" | "CUmodule" | "CUfunction" | "CUgraph"
            | "CUgraphExec" | "CUlinkState" => "pointer",
            "size_t"
            | "unsigned long long"
            | "CUdeviceptr"
            | "CUmemGenericAllocationHandle"
            | "cuuint64_t" => "8 bytes",
            "unsigned char" => "1 byte",
            "CUipcMemHandle" => "64 bytes",
            // int, unsigned int, CUdevice, and enumerations.
            _ => "4 bytes",
        }
        .to_owned()
    }

    fn passed_here(declared: &str) -> &'static str {
        match declared {
            pointer if pointer.starts_with('*') => "pointer",
            "CuContext" | "CuStream" | "CuEvent" | "CuModule" | "CuFunction" | "CuGraph"
            | "CuGraphExec" => "pointer",
            "usize" | "c_ulonglong" | "CuPointer" | "CuMemory" => "8 bytes",
            "u8" => "1 byte",
            "Opaque64" => "64 bytes",
            _ => "4 bytes",
        }
    }

    /// The declarations of a header: for each name, as the library exports it, its arguments.
    fn read_header(text: &str) -> BTreeMap<String, Vec<Vec<String>>> {
        let mut plain = String::new();
        for (index, part) in text.split("/*").enumerate() {
            let code = if index == 0 {
                part
            } else {
                part.split_once("*/").map_or("", |p| p.1)
            };
            plain.push_str(code);
        }
        let renamed: BTreeMap<_, _> = plain
            .lines()
            .filter_map(|line| {
                let mut words = line.strip_prefix("#define ")?.split_whitespace();
                let (name, to) = (words.next()?, words.next()?);
                let to = to.rsplit('(').next()?.trim_end_matches(')');
                (to.starts_with(name)).then_some((name.to_owned(), to.to_owned()))
            })
            .collect();
        let mut found = BTreeMap::<_, Vec<_>>::new();
        for declaration in plain.split("CUDAAPI").skip(1) {
            let Some((name, rest)) = declaration.split_once('(') else {
                continue;
            };
            let Some((arguments, _)) = rest.split_once(')') else {
                continue;
            };
            let name = name.trim();
            let arguments: Vec<_> = match arguments.trim() {
                "void" => Vec::new(),
                some => some.split(',').map(passed_by_header).collect(),
            };
            for exported in [Some(name), renamed.get(name).map(String::as_str)] {
                let names = found
                    .entry(exported.unwrap_or(name).to_owned())
                    .or_default();
                names.push(arguments.clone());
            }
        }
        found
    }

    /// Compares with `$CUDA_HOME/include/cuda.h`, where there is one.
    #[test]
    fn declarations_agree_with_the_header() {
        let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
        let path = home.unwrap_or_default().join("include/cuda.h");
        let Ok(text) = std::fs::read_to_string(&path) else {
            println!("skipped: CUDA_HOME names no toolkit with include/cuda.h");
            return;
        };
        let header = read_header(&text);
        for (name, declared) in DECLARED {
            let here: Vec<_> = declared
                .iter()
                .map(|declared| passed_here(declared))
                .collect();
            let there = header
                .get(*name)
                .unwrap_or_else(|| panic!("no {name} in the header"));
            assert!(
                there.iter().any(|there| *there == here),
                "{name}: {here:?}, not {there:?}"
            );
        }
        println!("{} declarations agree", DECLARED.len());
    }
}

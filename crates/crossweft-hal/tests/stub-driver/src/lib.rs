//! A stand-in for `libcuda.so.1` that works on host memory, records what is called, and fails when
//! told to.
//!
//! Some symbols are missing on purpose: `cuFuncLoad`, `cuFuncGetParamInfo`, `cuGraphUpload`. Tests
//! steer it by the `stub_*` functions; each copy of the library file has a state of its own.
#![allow(
    non_snake_case,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    clippy::too_many_arguments,
    clippy::cast_possible_truncation,
    unused_mut,
    unused_variables,
    unsafe_op_in_unsafe_fn,
    missing_docs,
    missing_debug_implementations,
    dead_code,
    reason = "names and contracts are the driver's; every pointer is a place that the caller gave"
)]

use std::alloc::{Layout, alloc_zeroed};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fs::File;
use std::os::fd::IntoRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

type Code = c_uint;
type Handle = *mut c_void;

const INVALID_VALUE: Code = 1;
const INVALID_IMAGE: Code = 200;
const INVALID_CONTEXT: Code = 201;
const INVALID_PTX: Code = 218;
const NOT_FOUND: Code = 500;
const NOT_READY: Code = 600;
const UNIT: usize = 2 << 20;

#[repr(C)]
pub struct Opaque([u64; 8]);

struct State {
    calls: Vec<String>,
    /// Codes to return from the next calls of a function, in order.
    failures: BTreeMap<String, Vec<Code>>,
    settings: BTreeMap<String, i64>,
    next: usize,
    log: Option<(usize, usize)>,
    source: Vec<u8>,
    cubin: Vec<u8>,
}

static STATE: Mutex<State> = Mutex::new(State {
    calls: Vec::new(),
    failures: BTreeMap::new(),
    settings: BTreeMap::new(),
    next: 0x1000,
    log: None,
    source: Vec::new(),
    cubin: Vec::new(),
});

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn setting(&self, name: &str, otherwise: i64) -> i64 {
        self.settings.get(name).copied().unwrap_or(otherwise)
    }

    fn handle(&mut self) -> usize {
        self.next += 0x10;
        self.next
    }
}

/// Text of a name that a test passes.
unsafe fn text(name: *const c_char) -> String {
    CStr::from_ptr(name).to_string_lossy().into_owned()
}

/// Makes the next call of a function fail; several queue up.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_fail(name: *const c_char, code: Code) {
    state().failures.entry(text(name)).or_default().push(code);
}

/// Changes how the stub behaves; what it looks at is written where it does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_set(name: *const c_char, value: i64) {
    state().settings.insert(text(name), value);
}

/// Copies the names called since the last time, one a line, and forgets them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_calls(place: *mut u8, bytes: usize) -> usize {
    let calls = std::mem::take(&mut state().calls).join("\n");
    let length = calls.len().min(bytes);
    std::ptr::copy_nonoverlapping(calls.as_ptr(), place, length);
    length
}

/// Number of contexts on the calling thread's stack.
#[unsafe(no_mangle)]
pub extern "C" fn stub_depth() -> usize {
    CURRENT.with_borrow(Vec::len)
}

/// Declares functions of the driver. Each is recorded, and fails if a test wants it to; otherwise
/// it does what its body says, which sees the state and ends in a code.
macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$state:ident| $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Code {
            let mut $state = state();
            $state.calls.push(stringify!($name).to_owned());
            if let Some(codes) = $state.failures.get_mut(stringify!($name))
                && !codes.is_empty()
            {
                return codes.remove(0);
            }
            $body
        }
    )*};
}

/// A function that only succeeds, whatever it is given.
macro_rules! succeed {
    ($($name:ident($($type:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($(_: $type),*) -> Code {
            let mut state = state();
            state.calls.push(stringify!($name).to_owned());
            match state.failures.get_mut(stringify!($name)) {
                Some(codes) if !codes.is_empty() => codes.remove(0),
                _ => 0,
            }
        }
    )*};
}

/// Functions that only make a handle.
macro_rules! make {
    ($($name:ident($($type:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(place: *mut usize $(, _: $type)*) -> Code {
            let mut state = state();
            state.calls.push(stringify!($name).to_owned());
            match state.failures.get_mut(stringify!($name)) {
                Some(codes) if !codes.is_empty() => codes.remove(0),
                _ => {
                    *place = state.handle();
                    0
                }
            }
        }
    )*};
}

fn zeroed(bytes: usize) -> *mut u8 {
    let layout = Layout::from_size_align(bytes.max(1), UNIT).unwrap_or(Layout::new::<u64>());
    // Never freed: tests are short, and a late copy must not hurt.
    unsafe { alloc_zeroed(layout) }
}

make! {
    cuStreamCreate(c_uint);
    cuStreamCreateWithPriority(c_uint, c_int);
    cuEventCreate(c_uint);
    cuGraphInstantiateWithFlags(Handle, c_ulonglong);
    cuMemCreate(usize, *const c_void, c_ulonglong);
    cuMemImportFromShareableHandle(*mut c_void, c_int);
}

succeed! {
    cuInit(c_uint);
    cuDevicePrimaryCtxRelease_v2(c_int);
    cuStreamDestroy_v2(Handle);
    cuStreamWaitEvent(Handle, Handle, c_uint);
    cuStreamBeginCapture_v2(Handle, c_int);
    cuThreadExchangeStreamCaptureMode(*mut c_int);
    cuEventDestroy_v2(Handle);
    cuEventRecord(Handle, Handle);
    cuEventRecordWithFlags(Handle, Handle, u32);
    cuEventQuery(Handle);
    cuGraphLaunch(Handle, Handle);
    cuGraphExecDestroy(Handle);
    cuGraphDestroy(Handle);
    cuModuleUnload(Handle);
    cuFuncSetAttribute(Handle, c_int, c_int);
    cuLaunchKernel(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut Handle,
        *mut Handle
    );
    cuLaunchKernelEx(*const c_void, Handle, *mut Handle, *mut Handle);
    cuLaunchCooperativeKernel(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut Handle
    );
    cuMemRelease(c_ulonglong);
    cuMemAddressFree(u64, usize);
    cuMemMap(u64, usize, usize, c_ulonglong, c_ulonglong);
    cuMemUnmap(u64, usize);
    cuMemSetAccess(u64, usize, *const c_void, usize);
    cuMemFree_v2(u64);
    cuIpcGetMemHandle(*mut c_void, u64);
    cuIpcCloseMemHandle(u64);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemFreeHost(*mut c_void);
}

driver! {
    fn cuDriverGetVersion(version: *mut c_int) |state| {
        *version = state.setting("version", 13_000) as c_int;
        0
    }
    fn cuGetErrorName(code: Code, name: *mut *const c_char) |state| {
        *name = match code {
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            801 => c"CUDA_ERROR_NOT_SUPPORTED",
            _ => return INVALID_VALUE,
        }.as_ptr();
        0
    }

    fn cuDeviceGetCount(count: *mut c_int) |state| {
        *count = state.setting("devices", 2) as c_int;
        0
    }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) |state| {
        *device = ordinal;
        0
    }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) |state| {
        let text = c"Stub GPU".to_bytes_with_nul();
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len());
        0
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) |state| {
        *uuid = [device as u8; 16];
        0
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) |state| {
        *bytes = 16 << 30;
        0
    }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) |state| {
        let usual = match attribute {
            1 => 1024,
            16 => 132,
            39 => 2048,
            75 => 9,
            76 => 0,
            _ => 1,
        };
        let answer = state.setting(&format!("attribute {attribute}"), usual);
        if answer < 0 {
            return INVALID_VALUE;
        }
        *value = answer as c_int;
        0
    }
    fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) |state| {
        let id = c"0000:18:00.0".to_bytes_with_nul();
        std::ptr::copy_nonoverlapping(id.as_ptr().cast(), text, id.len());
        0
    }
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) |state| {
        *can = state.setting("peers", 1) as c_int;
        0
    }
    fn cuDeviceGetP2PAttribute(
        value: *mut c_int, attribute: c_int, source: c_int, target: c_int
    ) |state| {
        *value = 1;
        0
    }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) |state| {
        *context = 0x100 + device as usize;
        0
    }
    fn cuCtxPushCurrent_v2(context: usize) |state| {
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        0
    }
    fn cuCtxPopCurrent_v2(context: *mut usize) |state| {
        match CURRENT.with_borrow_mut(Vec::pop) {
            Some(popped) => {
                *context = popped;
                0
            }
            None => INVALID_CONTEXT,
        }
    }
    fn cuCtxGetCurrent(context: *mut usize) |state| {
        *context = CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0));
        0
    }

    fn cuCtxGetDevice(device: *mut c_int) |state| {
        match CURRENT.with_borrow(|stack| stack.last().copied()) {
            Some(context) => {
                *device = (context - 0x100) as c_int;
                0
            }
            None => INVALID_CONTEXT,
        }
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) |_state| {
        *least = 0;
        *greatest = -5;
        0
    }

    fn cuStreamQuery(stream: Handle) |state| {
        if state.setting("busy", 0) == 1 { NOT_READY } else { 0 }
    }
    fn cuStreamGetId(stream: Handle, id: *mut c_ulonglong) |state| {
        *id = state.setting("stream id", 5) as c_ulonglong;
        0
    }
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int) |state| {
        *status = state.setting("capturing", 0) as c_int;
        0
    }
    fn cuStreamGetCaptureInfo_v2(
        stream: Handle, status: *mut c_int, id: *mut c_ulonglong, graph: *mut Handle, nodes: *mut Handle,
        count: *mut usize
    ) |state| {
        *status = state.setting("capturing", 0) as c_int;
        *id = 77;
        0
    }
    fn cuStreamEndCapture(stream: Handle, graph: *mut usize) |state| {
        *graph = state.handle();
        0
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) |state| {
        *milliseconds = 1.5;
        0
    }
    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) |state| {
        *count = 3;
        0
    }

    fn cuModuleLoadDataEx(
        module: *mut usize, image: *const c_char, count: c_uint, options: *mut c_int,
        values: *mut usize
    ) |state| {
        let find = |wanted| (0..count as usize).find(|&i| *options.add(i) == wanted);
        if text(image).starts_with("nonsense") {
            if let Some((log, bytes)) = find(5).zip(find(6)) {
                let words = b"line 1: unknown word\0";
                let place = std::ptr::with_exposed_provenance_mut(*values.add(log));
                let bytes = words.len().min(*values.add(bytes));
                std::ptr::copy_nonoverlapping(words.as_ptr(), place, bytes);
            }
            return INVALID_PTX;
        }
        *module = state.handle();
        0
    }
    fn cuModuleLoadData(module: *mut usize, image: *const u8) |state| {
        if std::slice::from_raw_parts(image, 9) != b"cubin of " {
            return INVALID_IMAGE;
        }
        *module = state.handle();
        0
    }
    fn cuModuleGetFunction(function: *mut usize, module: Handle, name: *const c_char) |state| {
        if text(name) == "absent" {
            return NOT_FOUND;
        }
        *function = state.handle();
        0
    }
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Handle) |state| {
        *value = 32;
        0
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: Handle, threads: c_int, bytes: usize
    ) |state| {
        *blocks = 2;
        0
    }

    fn cuMemGetAllocationGranularity(
        granularity: *mut usize, properties: *const c_void, option: c_int
    ) |state| {
        *granularity = UNIT;
        0
    }
    fn cuMemGetAllocationPropertiesFromHandle(
        properties: *mut [c_int; 8], memory: c_ulonglong
    ) |state| {
        (*properties)[1] = state.setting("handle types", 1) as c_int;
        0
    }
    fn cuMemAddressReserve(
        address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: c_ulonglong
    ) |state| {
        *address = zeroed(bytes).expose_provenance() as u64;
        0
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) |state| {
        *address = zeroed(bytes).expose_provenance() as u64;
        0
    }
    fn cuMemHostAlloc(address: *mut *mut u8, bytes: usize, flags: c_uint) |state| {
        *address = zeroed(bytes);
        0
    }
    fn cuMemHostGetDevicePointer_v2(device: *mut u64, host: *mut u8, flags: c_uint) |state| {
        *device = host.expose_provenance() as u64;
        0
    }
    fn cuMemRetainAllocationHandle(memory: *mut usize, address: Handle) |state| {
        if state.setting("mapped", 0) == 0 {
            return INVALID_VALUE;
        }
        *memory = state.handle();
        0
    }
    fn cuMemExportToShareableHandle(
        place: *mut c_int, memory: c_ulonglong, kind: c_int, flags: c_ulonglong
    ) |state| {
        if kind == 1 {
            let Ok(file) = File::open("/dev/null") else { return NOT_FOUND };
            *place = file.into_raw_fd();
        } else {
            *place.cast::<[u8; 64]>() = [7; 64];
        }
        0
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) |state| {
        *base = address / UNIT as u64 * UNIT as u64;
        *bytes = UNIT;
        0
    }
    // The settings "pointer 2", "pointer 8" and so on answer by the attribute's number.
    fn cuPointerGetAttributes(
        count: c_uint, attributes: *const c_int, values: *mut *mut u32, address: u64
    ) |state| {
        for index in 0..count as usize {
            let attribute = *attributes.add(index);
            let answer = state.setting(&format!("pointer {attribute}"), 0);
            **values.add(index) = answer as u32;
        }
        0
    }
    fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: Opaque, flags: c_uint) |state| {
        *address = zeroed(UNIT).expose_provenance() as u64;
        0
    }

    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: Handle) |state| {
        copy(to, from, bytes);
        0
    }
    fn cuMemcpyPeerAsync(
        to: u64, to_context: Handle, from: u64, from_context: Handle, bytes: usize, stream: Handle
    ) |state| {
        copy(to, from, bytes);
        if state.setting("peer copies are wrong", 0) == 1 {
            let last = std::ptr::with_exposed_provenance_mut::<u8>(to as usize).add(bytes - 1);
            *last ^= 1;
        }
        0
    }
    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: Handle) |state| {
        std::ptr::write_bytes(std::ptr::with_exposed_provenance_mut::<u8>(to as usize), value, bytes);
        0
    }
    fn cuMemsetD32Async(to: u64, value: c_uint, words: usize, stream: Handle) |state| {
        let words = 0..words;
        let first = std::ptr::with_exposed_provenance_mut::<u32>(to as usize);
        words.for_each(|index| *first.add(index) = value);
        0
    }

    fn cuMulticastGetGranularity(
        granularity: *mut usize, properties: *const c_void, option: c_int
    ) |state| {
        *granularity = UNIT;
        0
    }
}

unsafe fn copy(to: u64, from: u64, bytes: usize) {
    let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
    std::ptr::copy(
        from,
        std::ptr::with_exposed_provenance_mut(to as usize),
        bytes,
    );
}

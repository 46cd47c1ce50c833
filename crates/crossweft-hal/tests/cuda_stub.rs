//! The CUDA device without a GPU: a stand-in for the driver's library records what is called and
//! fails when told to.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossweft_hal::HalError;
use crossweft_hal::cpu::SharedMemory;
use crossweft_hal::cuda::{
    Argument, Cache, CompileOptions, Context, CudaError, DeviceMemory, Driver, Event,
    ForeignExport, ForeignMemory, Kernel, MemoryOptions, Module, Multicast, PinnedMemory,
    PointerKind, PrivateMemory, Reach, Shape, ShareHandle, Stream, Version, detect_with,
    probe_peers,
};

/// A copy of the stub, so that each test has one of its own.
struct Stub {
    library: *mut c_void,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Stub {
    /// `None`, said in a line, where the stub was not built beside this program.
    fn new() -> Option<Self> {
        let program = std::env::current_exe().unwrap();
        let built = program.with_file_name("libcrossweft_stub_driver.so");
        if !built.exists() {
            // Cargo builds it; a program that was taken elsewhere does without.
            assert!(
                std::env::var_os("CARGO").is_none(),
                "no {}",
                built.display()
            );
            println!("skipped: {} is not there", built.display());
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        std::fs::copy(built, &path).unwrap();
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: our own library, which does nothing when it is loaded.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null());
        Some(Self {
            library,
            path,
            _folder: folder,
        })
    }

    fn driver(&self) -> Arc<Driver> {
        self.load(off()).unwrap()
    }

    fn context(&self) -> Arc<Context> {
        Context::retain(&self.driver().device(0).unwrap()).unwrap()
    }

    fn load(&self, multicast: Multicast) -> Result<Arc<Driver>, CudaError> {
        load(&self.path, multicast)
    }

    fn fail(&self, function: &str, code: u32) {
        let name = CString::new(function).unwrap();
        // SAFETY: the stub's function has this type.
        unsafe {
            let fail: unsafe extern "C" fn(*const c_char, u32) = self.function(c"stub_fail");
            fail(name.as_ptr(), code);
        }
    }

    fn set(&self, setting: &str, value: i64) {
        let name = CString::new(setting).unwrap();
        // SAFETY: the stub's function has this type.
        unsafe {
            let set: unsafe extern "C" fn(*const c_char, i64) = self.function(c"stub_set");
            set(name.as_ptr(), value);
        }
    }

    /// What was called since the last time, without the bookkeeping of contexts.
    fn calls(&self) -> Vec<String> {
        let mut text = vec![0; 1 << 20];
        // SAFETY: the stub's function has this type.
        let length = unsafe {
            let calls: unsafe extern "C" fn(*mut u8, usize) -> usize = self.function(c"stub_calls");
            calls(text.as_mut_ptr(), text.len())
        };
        let text = String::from_utf8(text[..length].to_vec()).unwrap();
        let calls = text.lines().filter(|name| !name.starts_with("cuCtx"));
        calls.map(str::to_owned).collect()
    }

    /// Contexts on this thread's stack.
    fn depth(&self) -> usize {
        // SAFETY: the stub's function has this type.
        unsafe {
            let depth: unsafe extern "C" fn() -> usize = self.function(c"stub_depth");
            depth()
        }
    }

    /// # Safety
    /// `F` must be the type of the function of that name.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> F {
        // SAFETY: the library is open, and `F` the type of what is found.
        unsafe {
            let place = libc::dlsym(self.library, name.as_ptr());
            assert!(!place.is_null() && size_of::<F>() == size_of_val(&place));
            std::mem::transmute_copy(&place)
        }
    }
}

fn load(path: &Path, multicast: Multicast) -> Result<Arc<Driver>, CudaError> {
    // SAFETY: the stub, or nothing that could be loaded.
    unsafe { Driver::load(path, multicast) }
}

fn off() -> Multicast {
    Multicast::decide(|_| None)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(30)
}

const MIB: u64 = 1 << 20;

macro_rules! stub {
    () => {
        match Stub::new() {
            Some(stub) => stub,
            None => return,
        }
    };
}

#[test]
fn no_library_is_an_error_that_says_so() {
    let error = load(Path::new("/nowhere/libcuda.so.1"), off()).unwrap_err();
    assert!(matches!(error, CudaError::NoDriver { .. }));
    let text = error.to_string();
    assert!(text.contains("/nowhere/libcuda.so.1"), "{text}");
    assert!(text.contains("install the NVIDIA driver"), "{text}");
    assert!(!text.contains('\n'), "{text}");
    let text = HalError::from(error).to_string();
    assert!(text.contains("no CUDA driver"), "{text}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libcuda.so.1");
    std::fs::write(&path, "not a library").unwrap();
    let error = load(&path, off()).unwrap_err();
    assert!(matches!(error, CudaError::NoDriver { .. }), "{error}");
}

#[test]
fn old_drivers_and_no_devices() {
    let stub = stub!();
    stub.set("version", 11_030);
    let error = stub.load(off()).unwrap_err();
    assert!(matches!(
        error,
        CudaError::TooOld {
            found: Version {
                major: 11,
                minor: 3
            },
            ..
        }
    ));
    assert!(!stub.calls().contains(&"cuInit".to_owned()));
    stub.set("version", 12_080);
    stub.fail("cuInit", 100);
    let error = stub.load(off()).unwrap_err();
    assert!(matches!(error, CudaError::NoDevice { .. }), "{error}");
    assert!(error.to_string().contains("CUDA driver 12.8"), "{error}");
    stub.fail("cuInit", 803);
    let error = stub.load(off()).unwrap_err();
    assert!(error.to_string().contains("one version of both"), "{error}");
    let driver = stub.driver();
    assert_eq!(driver.version().to_string(), "12.8");
    let error = driver.device(2).unwrap_err();
    assert!(matches!(
        error,
        CudaError::UnknownDevice {
            ordinal: 2,
            count: 2
        }
    ));
}

#[test]
fn a_missing_symbol_is_unsupported_and_the_rest_works() {
    let stub = stub!();
    let context = stub.context();
    let stream = Stream::new(&context).unwrap();
    let graph = stream.begin_capture().unwrap().end().unwrap();
    let exec = graph.instantiate().unwrap();
    let error = exec.upload(&stream).unwrap_err();
    assert!(
        matches!(
            error,
            CudaError::Unsupported {
                symbol: "cuGraphUpload",
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("CUDA 13.0"), "{error}");
    // SAFETY: the stub's graph does nothing.
    unsafe { exec.launch(&stream) }.unwrap();
    exec.upload(&stream).unwrap_err();
    assert_eq!(
        context.driver().lookups()["cuGraphUpload"],
        1,
        "looked up once"
    );
    assert_eq!(context.driver().lookups()["cuStreamCreate"], 1);
}

#[test]
fn codes_become_typed_errors() {
    let stub = stub!();
    let context = stub.context();
    stub.fail("cuStreamCreate", 801);
    let error = Stream::new(&context).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuStreamCreate failed on CUDA device 0: CUDA_ERROR_NOT_SUPPORTED (801); this device or \
         driver cannot do it"
    );
    stub.fail("cuStreamCreate", 12_345);
    let error = Stream::new(&context).unwrap_err().to_string();
    assert!(error.contains("an error without a name (12345)"), "{error}");
    stub.fail("cuStreamQuery", 700);
    let error = Stream::new(&context).unwrap().is_idle().unwrap_err();
    assert!(error.is_context_lost());
    assert!(error.to_string().contains("start a new process"), "{error}");
    stub.fail("cuMemCreate", 2);
    let error = DeviceMemory::allocate(&context, 3 * MIB, &MemoryOptions::default()).unwrap_err();
    assert!(matches!(
        error,
        CudaError::OutOfMemory {
            bytes: Some(4_194_304),
            device: Some(0),
            ..
        }
    ));
    assert_eq!(stub.depth(), 0);
}

#[test]
fn devices_and_their_peers() {
    let stub = stub!();
    stub.set("attribute 13", -1);
    stub.set("attribute 128", 0);
    let driver = stub.driver();
    let devices = driver.devices().unwrap();
    let properties = devices[1].properties().unwrap();
    assert_eq!(properties.name, "Stub GPU");
    assert_eq!(properties.compute, (9, 0));
    assert_eq!(properties.multiprocessors, 132);
    assert_eq!(properties.pci, "0000:18:00.0");
    assert_eq!(
        properties.clock_khz, 0,
        "an attribute that the driver does not know"
    );
    assert!(properties.fd_handles && !properties.fabric_handles);
    assert_eq!(
        properties.uuid.to_string(),
        "GPU-01010101-0101-0101-0101-010101010101"
    );
    assert!(devices[0].peer(&devices[1]).unwrap().access);
    stub.set("peers", 0);
    assert!(!devices[0].peer(&devices[1]).unwrap().access);
    assert!(devices[0].peer(&devices[0]).unwrap().access);
}

#[test]
fn contexts_are_released_and_nothing_stays_current() {
    let stub = stub!();
    let context = stub.context();
    let other = Context::retain(&stub.driver().device(1).unwrap()).unwrap();
    assert_eq!(stub.depth(), 0);
    let inside = context.with_current(|| {
        let stream = Stream::new(&context).unwrap();
        drop(Stream::new(&other).unwrap());
        drop(stream);
        stub.depth()
    });
    assert_eq!(
        inside.unwrap(),
        1,
        "the one that was current is not pushed again"
    );
    assert_eq!(stub.depth(), 0);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        context.with_current(|| panic!("on purpose"))
    }));
    assert!(panicked.is_err());
    assert_eq!(stub.depth(), 0);
    stub.fail("cuCtxPushCurrent_v2", 201);
    let error = context.with_current(|| panic!("is not run")).unwrap_err();
    assert!(error.to_string().contains("cuCtxPushCurrent_v2"), "{error}");
    assert_eq!(stub.depth(), 0);

    // The last user releases it, whichever that is.
    let stream = Stream::new(&context).unwrap();
    stub.calls();
    drop(context);
    assert_eq!(stub.calls(), [""; 0]);
    drop(stream);
    assert_eq!(
        stub.calls(),
        [
            // Nothing left to do: it is kept for whoever needs a stream next, as long as the context.
            "cuStreamIsCapturing",
            "cuStreamQuery",
            "cuStreamDestroy_v2",
            "cuDevicePrimaryCtxRelease_v2",
        ]
    );
}

#[test]
fn streams_wait_no_longer_than_they_may() {
    let stub = stub!();
    let context = stub.context();
    let stream = Stream::new(&context).unwrap();
    stream.synchronize(soon()).unwrap();
    stub.set("busy", 1);
    assert!(!stream.is_idle().unwrap());
    let error = stream.synchronize(soon()).unwrap_err();
    assert!(
        matches!(error, CudaError::Deadline { device: 0, .. }),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("keep its buffers until the stream, or the device, has come to its end"),
        "{error}"
    );
    stub.set("busy", 0);
    stream.synchronize(Instant::now()).unwrap();

    stub.set("capturing", 1);
    assert!(stream.is_capturing().unwrap());
    stub.calls();
    assert!(matches!(
        stream.synchronize(soon()),
        Err(CudaError::Capturing { .. })
    ));
    assert!(
        !stub.calls().contains(&"cuStreamQuery".to_owned()),
        "it would spoil the capture"
    );

    assert_eq!(stream.id().unwrap(), Some(5));
    // SAFETY: the stub looks behind no stream.
    let theirs = unsafe { Stream::from_raw(&context, 0xabc0) };
    assert_eq!(theirs.raw(), 0xabc0);
    assert!(theirs.again().is_none());
    // SAFETY: as above.
    let lasting = unsafe { Stream::lasting(&context, 0xdef0) };
    assert_eq!(lasting.again().unwrap().raw(), 0xdef0);
    assert!(stream.again().is_none());
    drop((theirs, lasting));
    assert!(!stub.calls().contains(&"cuStreamDestroy_v2".to_owned()));

    let event = Event::with_timing(&context).unwrap();
    event.record(&stream).unwrap();
    event.synchronize(soon()).unwrap();
    assert_eq!(event.since(&event).unwrap(), Duration::from_micros(1500));
}

#[test]
fn captures_end_even_when_forgotten() {
    let stub = stub!();
    let stream = Stream::new(&stub.context()).unwrap();
    stub.calls();
    let graph = stream.begin_capture().unwrap().end().unwrap();
    assert_eq!(graph.nodes().unwrap(), 3);
    drop(graph);
    let expected = [
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphGetNodes",
        "cuGraphDestroy",
    ];
    assert_eq!(stub.calls(), expected);
    drop(stream.begin_capture().unwrap());
    let expected = [
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphDestroy",
    ];
    assert_eq!(stub.calls(), expected);
}

#[test]
fn what_does_not_compile_says_why() {
    let stub = stub!();
    let context = stub.context();
    let load =
        |ptx: &str, options: &CompileOptions| Module::load(&context, "a module", ptx, options);
    let plain = CompileOptions::default();
    stub.calls();
    load("text", &plain).unwrap();
    assert!(stub.calls().contains(&"cuModuleLoadDataEx".to_owned()));
    let error = load("nonsense", &plain).unwrap_err();
    assert!(matches!(error, CudaError::Compile { .. }), "{error}");
    assert!(
        error.to_string().contains("line 1: unknown word"),
        "{error}"
    );
    assert!(error.to_string().contains("a module"), "{error}");
    assert!(load("a\0b", &plain).is_err());
    // Without a word from the compiler, the code still tells what it is about; others are others.
    stub.fail("cuModuleLoadDataEx", 200);
    assert!(matches!(
        load("text", &plain),
        Err(CudaError::Compile { .. })
    ));
    stub.fail("cuModuleLoadDataEx", 2);
    assert!(matches!(
        load("text", &plain),
        Err(CudaError::OutOfMemory { .. })
    ));
    // SAFETY: the stub only looks at the first bytes.
    let cubin = |bytes: &[u8]| unsafe { Module::load_cubin(&context, "m", bytes) };
    assert!(cubin(b"cubin of something").is_ok());
    assert!(cubin(b"something else").is_err());
}

#[test]
fn modules_are_loaded_once_for_all_who_ever_have_them() {
    static TEXT: &str = ".version 7.8";
    let stub = stub!();
    let context = stub.context();
    let options = CompileOptions::default();
    let other = CompileOptions {
        max_registers: Some(32),
        ..CompileOptions::default()
    };
    let loads = || {
        let calls = stub.calls();
        calls.iter().filter(|c| *c == "cuModuleLoadDataEx").count()
    };
    let get = |options| Module::shared(&context, "text", TEXT, options).unwrap();
    stub.calls();
    let (first, second) = (get(&options), get(&options));
    assert_eq!(loads(), 1);
    let third = get(&other);
    assert_eq!(loads(), 1);
    // Nobody has them any more: they stay, for unloading would wait for kernels.
    drop((first, second, third));
    get(&options);
    get(&other);
    assert_eq!(stub.calls(), [""; 0]);
    // By name, the text is made only where it is needed.
    let made = std::cell::Cell::new(0);
    let named = |name| {
        let text = || {
            made.set(made.get() + 1);
            TEXT.to_owned()
        };
        Module::shared_by_name(&context, name, text, &options).unwrap()
    };
    let (one, again, other) = (named("one"), named("one"), named("other"));
    assert_eq!((loads(), made.get()), (2, 2));
    // What is nobody else's goes with its kernels, what is shared with the context.
    let alone = Module::load(&context, "text", TEXT, &options).unwrap();
    stub.calls();
    drop((one, again, other, alone));
    assert_eq!(stub.calls(), ["cuModuleUnload"]);
    drop(context);
    let mut unloaded = vec!["cuModuleUnload"; 4];
    unloaded.push("cuDevicePrimaryCtxRelease_v2");
    assert_eq!(stub.calls(), unloaded);
}

#[test]
fn kernels_are_touched_before_they_are_launched() {
    let stub = stub!();
    let context = stub.context();
    let options = CompileOptions::default();
    let module = Module::load(&context, "m", "text", &options).unwrap();
    assert!(matches!(
        module.kernel("absent"),
        Err(CudaError::UnknownKernel { .. })
    ));
    stub.calls();
    let kernel = module.kernel("add").unwrap();
    // The stub has no cuFuncLoad; an attribute does the same.
    let expected = [
        &["cuModuleGetFunction"][..],
        &["cuFuncGetAttribute"; 5],
        // Of which kind the device is.
        &["cuDeviceGetAttribute"; 2],
    ];
    assert_eq!(stub.calls(), expected.concat());
    assert_eq!(kernel.attributes().registers, 32);
    assert_eq!(kernel.max_active_blocks(256, 0).unwrap(), 2);
    assert_eq!(kernel.max_resident_blocks(256, 0).unwrap(), 264);
    let resident = |needed| Kernel::resident_threads(&[&kernel, &kernel], 384, needed);
    assert_eq!(resident(264).unwrap(), Ok(384));
    assert_eq!(resident(265).unwrap(), Err(264));
    assert_eq!(
        kernel.parameter_bytes().unwrap(),
        None,
        "the stub cannot tell"
    );

    let stream = Stream::new(&context).unwrap();
    let (address, count) = (0_u64, 7_u32);
    let arguments = [Argument::from(&address), Argument::from(&count)];
    stub.calls();
    // SAFETY: the stub looks at no argument.
    unsafe {
        kernel
            .launch(&stream, &Shape::linear(2, 32), &arguments)
            .unwrap();
        kernel
            .launch_early(&stream, &Shape::linear(2, 32), &arguments)
            .unwrap();
        let shape = Shape::linear(2, 32).with_shared_bytes(1024);
        kernel
            .launch_cooperative(&stream, &shape, &arguments)
            .unwrap();
    }
    assert_eq!(
        stub.calls(),
        [
            "cuLaunchKernel",
            "cuLaunchKernelEx",
            "cuLaunchCooperativeKernel"
        ]
    );
    drop(module);
    assert_eq!(stub.calls(), [""; 0], "the kernel keeps its module");
    drop(kernel);
    assert_eq!(stub.calls(), ["cuModuleUnload"]);
}

#[test]
fn launches_begin_early_where_driver_and_device_have_that() {
    for (version, major, expected) in [
        (13_000, 9, "cuLaunchKernelEx"),
        (13_000, 10, "cuLaunchKernelEx"),
        (12_020, 9, "cuLaunchKernel"),
        // Kernels for such a device do not wait for what is ahead of them.
        (13_000, 8, "cuLaunchKernel"),
    ] {
        let stub = stub!();
        stub.set("version", version);
        stub.set("attribute 75", major);
        let context = stub.context();
        let options = CompileOptions::default();
        let module = Module::load(&context, "m", "text", &options).unwrap();
        let kernel = module.kernel("add").unwrap();
        let stream = Stream::new(&context).unwrap();
        stub.calls();
        // SAFETY: the stub looks at no argument.
        unsafe { kernel.launch_early(&stream, &Shape::linear(2, 32), &[]) }.unwrap();
        assert_eq!(stub.calls(), [expected], "CUDA {version}, sm_{major}x");
    }
}

#[test]
fn device_memory_is_made_and_unmade_in_order() {
    let stub = stub!();
    let context = stub.context();
    let peer = stub.driver().device(1).unwrap();
    stub.calls();
    let options = MemoryOptions {
        peers: &[peer],
        fabric: true,
        zeroed: false,
    };
    let memory = DeviceMemory::allocate(&context, 3 * MIB, &options).unwrap();
    let calls: Vec<_> = stub.calls();
    let calls: Vec<_> = calls
        .iter()
        .filter(|name| name.starts_with("cuMem"))
        .collect();
    let expected = [
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ];
    assert_eq!(calls, expected);
    assert_eq!(memory.bytes(), 4 * MIB);
    assert_eq!(memory.export_fabric().unwrap(), [7; 64]);
    memory.write(5, b"hello").unwrap();
    memory.fill(10, b'!', 2).unwrap();
    let mut seen = [0; 7];
    memory.read(5, &mut seen).unwrap();
    assert_eq!(&seen, b"hello!!");
    assert!(matches!(
        memory.write(4 * MIB - 1, b"ab"),
        Err(CudaError::OutOfRange { .. })
    ));
    assert!(matches!(
        memory.fill(u64::MAX, 0, 2),
        Err(CudaError::OutOfRange { .. })
    ));
    let long: Vec<u8> = (0..3 * MIB).map(|index| (index % 251) as u8).collect();
    memory.write(1, &long).unwrap();
    let mut seen = vec![0; long.len()];
    memory.read(1, &mut seen).unwrap();
    assert_eq!(seen, long, "longer than what goes at a time");
    stub.calls();
    drop(memory);
    assert_eq!(
        stub.calls(),
        ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
    );
    drop((context, options));
    let calls = stub.calls();
    assert_eq!(
        calls,
        [
            "cuStreamDestroy_v2",
            "cuMemFreeHost",
            "cuDevicePrimaryCtxRelease_v2"
        ]
    );
}

#[test]
fn memory_is_for_all_devices_that_can_reach_it() {
    let stub = stub!();
    let context = stub.context();
    let memory = DeviceMemory::allocate(&context, 1, &MemoryOptions::default()).unwrap();
    let allowed = || {
        stub.calls();
        memory.allow_all().unwrap();
        stub.calls().contains(&"cuMemSetAccess".to_owned())
    };
    assert!(allowed());
    stub.set("peers", 0);
    assert!(!allowed(), "no other device can");
}

#[test]
fn half_made_memory_is_unmade() {
    let stub = stub!();
    let context = stub.context();
    let allocate = || DeviceMemory::allocate(&context, 1, &MemoryOptions::default());
    let undone = [
        ("cuMemAddressReserve", &["cuMemRelease"][..]),
        ("cuMemMap", &["cuMemAddressFree", "cuMemRelease"]),
        (
            "cuMemSetAccess",
            &["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"],
        ),
    ];
    for (failing, undone) in undone {
        stub.fail(failing, 801);
        stub.calls();
        allocate().unwrap_err();
        let calls = stub.calls();
        let behind = calls.iter().skip_while(|name| *name != failing).skip(1);
        assert!(
            behind.filter(|n| *n != "cuGetErrorName").eq(undone),
            "{calls:?}"
        );
    }
    // Fabric handles that are not permitted are done without.
    stub.fail("cuMemCreate", 800);
    let options = MemoryOptions {
        fabric: true,
        ..MemoryOptions::default()
    };
    let memory = DeviceMemory::allocate(&context, 1, &options).unwrap();
    assert!(!memory.has_fabric_handle());
    assert!(matches!(
        memory.export_fabric(),
        Err(CudaError::NotShareable { .. })
    ));
    stub.set("attribute 102", 0);
    assert!(matches!(allocate(), Err(CudaError::Incapable { .. })));
}

#[test]
fn memory_is_exported_and_imported() {
    let stub = stub!();
    let context = stub.context();
    let memory = DeviceMemory::allocate(&context, 1, &MemoryOptions::default()).unwrap();
    let fd = memory.export_fd().unwrap();
    let flags = rustix::io::fcntl_getfd(&fd).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    stub.calls();
    let import = |handle| DeviceMemory::import(&context, handle, memory.bytes(), &[]);
    let again = import(ShareHandle::Fd(fd)).unwrap();
    assert_eq!(again.bytes(), memory.bytes());
    let expected = [
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ];
    assert_eq!(stub.calls(), expected);
    import(ShareHandle::Fabric([1; 64])).unwrap();
    // Once more without a descriptor, so that it can be exported.
    stub.calls();
    stub.set("mapped", 1);
    let own = memory.again().unwrap();
    assert_eq!(own.bytes(), memory.bytes());
    assert_eq!(stub.calls()[0], "cuMemRetainAllocationHandle");
    own.export_fd().unwrap();
    let error = import(ShareHandle::LegacyIpc([1; 64])).unwrap_err();
    assert!(error.to_string().contains("ForeignMemory"), "{error}");
    stub.fail("cuMemMap", 1);
    let error = import(ShareHandle::Fabric([1; 64])).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("2097152 bytes that were announced"),
        "{error}"
    );
}

#[test]
fn copies_that_hang_leave_their_buffer_alone() {
    let stub = stub!();
    let context = stub.context();
    let memory = PrivateMemory::allocate(&context, 64).unwrap();
    // SAFETY: memory of that context, used by nobody else.
    let write = |data: &[u8]| unsafe { context.write(memory.address(), data) };
    write(&[1; 64]).unwrap();
    stub.fail("cuStreamQuery", 719);
    stub.calls();
    assert!(write(&[2; 64]).unwrap_err().is_context_lost());
    write(&[3; 64]).unwrap();
    let calls = stub.calls();
    assert!(
        calls.contains(&"cuMemHostAlloc".to_owned()),
        "a new one: {calls:?}"
    );
    assert!(!calls.contains(&"cuMemFreeHost".to_owned()), "{calls:?}");
}

#[test]
fn shared_memory_is_pinned_while_it_is_mapped() {
    let stub = stub!();
    let context = stub.context();
    let shared = Arc::new(SharedMemory::create(8192).unwrap());
    let pinned = PinnedMemory::register(&context, Arc::clone(&shared)).unwrap();
    assert_eq!(pinned.host_address(), shared.addr());
    assert_eq!(pinned.device_address(), shared.addr());
    assert_eq!(pinned.bytes(), 8192);
    assert_eq!(Arc::strong_count(&shared), 2);
    stub.calls();
    drop(pinned);
    assert_eq!(stub.calls(), ["cuMemHostUnregister"]);
    assert_eq!(Arc::strong_count(&shared), 1);
    stub.fail("cuMemHostRegister_v2", 712);
    let error = PinnedMemory::register(&context, Arc::clone(&shared)).unwrap_err();
    assert!(error.to_string().contains("registered already"), "{error}");
    assert_eq!(Arc::strong_count(&shared), 1);
    stub.fail("cuMemHostGetDevicePointer_v2", 1);
    stub.calls();
    PinnedMemory::allocate(&context, 100).unwrap_err();
    assert!(stub.calls().contains(&"cuMemFreeHost".to_owned()));
}

#[test]
fn pinned_memory_is_kept_for_the_next_who_asks_for_as_much() {
    let stub = stub!();
    let context = stub.context();
    let pin = |bytes| PinnedMemory::allocate(&context, bytes).unwrap();
    let memory = |stub: &Stub| {
        let calls = stub.calls().into_iter();
        calls
            .filter(|c| c.starts_with("cuMemHostAlloc") || c.starts_with("cuMemFree"))
            .collect::<Vec<_>>()
    };
    let first = pin(100);
    assert_eq!((first.bytes(), first.words().len()), (100, 12));
    first.words()[11].store(7, Ordering::Relaxed);
    let address = first.host_address();
    assert_eq!(memory(&stub), ["cuMemHostAlloc"]);
    drop(first);
    // In steps of powers of two, and zeroed.
    let (again, larger) = (pin(4096), pin(4097));
    assert_eq!(again.host_address(), address);
    let is_zero = |word: &AtomicU64| word.load(Ordering::Relaxed) == 0;
    assert!(again.words().iter().all(is_zero));
    assert_eq!(memory(&stub), ["cuMemHostAlloc"]);
    drop((again, larger));
    assert_eq!(memory(&stub), [""; 0]);
    // What is kept is nothing that others lack.
    stub.fail("cuMemHostAlloc", 2);
    let large = pin(1 << 20);
    let expected = [
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemFreeHost",
        "cuMemHostAlloc",
    ];
    assert_eq!(memory(&stub), expected);
    stub.fail("cuMemHostAlloc", 2);
    let error = PinnedMemory::allocate(&context, 1 << 30).unwrap_err();
    assert!(matches!(error, CudaError::OutOfMemory { .. }), "{error}");
    assert_eq!(memory(&stub), ["cuMemHostAlloc"]);
    drop((large, context));
    let expected = ["cuMemFreeHost", "cuDevicePrimaryCtxRelease_v2"];
    assert_eq!(stub.calls(), expected);
}

#[test]
fn foreign_pointers_are_classified() {
    let stub = stub!();
    let context = stub.context();
    let address = 7 * 2 * MIB + 100;
    let export = |bytes| ForeignExport::new(&context, address, bytes);
    let refused = |bytes, word: &str| {
        let text = export(bytes).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    };
    assert_eq!(context.pointer_info(1).unwrap().kind, PointerKind::Unknown);
    refused(8, "not a device's memory");
    stub.fail("cuPointerGetAttributes", 201);
    assert_eq!(context.pointer_info(1).unwrap().kind, PointerKind::Unknown);
    stub.set("pointer 2", 1);
    assert_eq!(context.pointer_info(1).unwrap().kind, PointerKind::Pinned);
    refused(8, "not a device's memory");
    stub.set("pointer 2", 2);
    stub.set("pointer 8", 1);
    refused(8, "managed");
    stub.set("pointer 8", 0);
    stub.set("pointer 17", 1);
    refused(8, "cudaMallocAsync");
    stub.set("pointer 17", 0);
    refused(0, "empty");
    refused(u64::MAX, "empty");
    refused(2 * MIB, "beyond its allocation");

    // An allocation of cudaMalloc: its handle, and the offset in it.
    let exported = export(50).unwrap();
    assert!(matches!(
        exported.pieces[..],
        [(ShareHandle::LegacyIpc(_), 2_097_152)]
    ));
    assert_eq!((exported.offset, exported.bytes), (100, 50));
    stub.calls();
    let imported = ForeignMemory::import(&context, exported, &[]).unwrap();
    drop(imported);
    assert_eq!(
        stub.calls(),
        ["cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"]
    );
    stub.fail("cuIpcGetMemHandle", 1);
    refused(50, "no IPC handle");

    // A mapped range: every chunk that it touches.
    stub.set("mapped", 1);
    let exported = export(4 * MIB).unwrap();
    assert_eq!(exported.pieces.len(), 3, "parts of the first and last");
    assert_eq!((exported.offset, exported.bytes), (100, 4 * MIB));
    stub.calls();
    let imported = ForeignMemory::import(&context, exported, &[]).unwrap();
    assert_eq!(imported.bytes(), 4 * MIB);
    let calls = stub.calls();
    let count = |name| calls.iter().filter(|call| *call == name).count();
    assert_eq!(count("cuMemImportFromShareableHandle"), 3);
    assert_eq!((count("cuMemMap"), count("cuMemSetAccess")), (3, 1));
    drop(imported);
    let expected = [
        &["cuMemUnmap"; 3][..],
        &["cuMemAddressFree"],
        &["cuMemRelease"; 3],
    ]
    .concat();
    assert_eq!(stub.calls(), expected);
    // Where the driver says that legacy IPC does it, that is one handle instead of many.
    stub.set("pointer 10", 1);
    let exported = export(8).unwrap();
    assert!(matches!(
        exported.pieces[..],
        [(ShareHandle::LegacyIpc(_), _)]
    ));
    stub.set("pointer 10", 0);
    stub.set("handle types", 8);
    assert!(matches!(
        export(8).unwrap().pieces[..],
        [(ShareHandle::Fabric(_), _)]
    ));
    stub.set("handle types", 0);
    refused(8, "without asking for a handle");

    let outside = ForeignExport {
        pieces: vec![(ShareHandle::Fabric([0; 64]), 2 * MIB)],
        offset: MIB,
        bytes: 2 * MIB,
    };
    assert!(ForeignMemory::import(&context, outside, &[]).is_err());
}

#[test]
fn peers_are_probed_and_remembered() {
    let stub = stub!();
    let driver = stub.driver();
    let contexts: Vec<_> = driver
        .devices()
        .unwrap()
        .iter()
        .map(|device| Context::retain(device).unwrap())
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let probe =
        |cache: &Cache| probe_peers(&contexts, None, Duration::from_millis(20), cache).unwrap();
    let cache = Cache::at(folder.path());
    stub.set("peer copies are wrong", 1);
    let matrix = probe(&cache);
    assert_eq!(matrix.pairs[0][0], Reach::Works);
    let Reach::Broken { reason } = &matrix.pairs[0][1] else {
        panic!("{matrix:?}")
    };
    assert!(reason.contains("byte 65535"), "{reason}");
    stub.set("peer copies are wrong", 0);
    let matrix = probe(&cache);
    assert!(!matrix.was_cached, "what is broken is tried again");
    assert!(
        matrix
            .pairs
            .iter()
            .flatten()
            .all(|reach| *reach == Reach::Works)
    );
    stub.calls();
    let again = probe(&cache);
    assert!(again.was_cached);
    assert_eq!(again.pairs, matrix.pairs);
    assert!(!stub.calls().contains(&"cuMemcpyPeerAsync".to_owned()));

    stub.set("peers", 0);
    let matrix = probe(&Cache::none());
    assert_eq!(matrix.pairs[1][0], Reach::Denied);
    stub.set("peers", 1);
    stub.fail("cuMemcpyPeerAsync", 217);
    let matrix = probe(&Cache::none());
    assert!(matches!(&matrix.pairs[0][1], Reach::Broken { reason } if reason.contains("217")));
    assert_eq!(matrix.pairs[1][0], Reach::Works);
}

/// The rule about multicast: not one symbol of it is looked up unless that is allowed.
#[test]
fn multicast_symbols_are_not_looked_up_unless_allowed() {
    let stub = stub!();
    let switch = ("CROSSWEFT_MULTICAST", "1");
    let vetoes = [
        ("NCCL_NVLS_ENABLE", "0"),
        ("NVSHMEM_DISABLE_NVLS", "1"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ];
    // Every combination of the switch and the vetoes.
    for bits in 0..16_u32 {
        let set: Vec<_> = std::iter::once(switch)
            .chain(vetoes)
            .enumerate()
            .filter(|(index, _)| bits & (1 << index) != 0)
            .map(|(_, variable)| variable)
            .collect();
        let multicast = Multicast::decide(|name| {
            let found = set.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        });
        let allowed = bits == 1;
        assert_eq!(multicast.is_allowed(), allowed, "{set:?}");

        stub.calls();
        let detection = detect_with(stub.load(multicast.clone()), multicast, Cache::none());
        let driver = detection.driver.unwrap();
        assert_eq!(driver.multicast().is_allowed(), allowed);
        let asked = driver.multicast_granularity(2, 1 << 21);
        match asked {
            Ok(granularity) => assert!(allowed && granularity == 1 << 21),
            Err(CudaError::MulticastOff { .. }) => assert!(!allowed),
            Err(error) => panic!("{error}"),
        }
        let context = Context::retain(&driver.device(0).unwrap()).unwrap();
        DeviceMemory::allocate(&context, 1, &MemoryOptions::default()).unwrap();
        let is_multicast = |name: &str| name.contains("Multicast");
        let looked_up = driver.lookups();
        let looked_up = looked_up.keys().filter(|name| is_multicast(name)).count();
        assert_eq!(looked_up, usize::from(allowed), "{set:?}");
        let called = stub
            .calls()
            .iter()
            .filter(|name| is_multicast(name))
            .count();
        assert_eq!(called, usize::from(allowed), "{set:?}");
    }
}

#[test]
fn detection_says_what_is_used_and_why_not() {
    let nothing = detect_with(
        load(Path::new("/nowhere/libcuda.so.1"), off()),
        off(),
        Cache::none(),
    );
    assert!(matches!(nothing.driver, Err(CudaError::NoDriver { .. })));
    assert!(nothing.devices.is_empty() && nothing.features.is_empty());

    let stub = stub!();
    stub.set("attribute 95", 0);
    stub.set("peers", 0);
    let detection = detect_with(stub.load(off()), off(), Cache::none());
    assert_eq!(detection.devices.len(), 2);
    assert!(!detection.peers[0][1].access && detection.peers[1][1].access);
    let feature = |name: &str| {
        let found = detection
            .features
            .iter()
            .find(|feature| feature.name == name);
        found.unwrap_or_else(|| panic!("no {name}"))
    };
    assert!(feature("memory by file descriptor").used);
    assert!(!feature("cooperative launch").used);
    assert!(feature("peer access").why.contains("not between all"));
    assert!(
        feature("NVLink multicast")
            .why
            .contains("CROSSWEFT_MULTICAST=1")
    );
    assert!(!feature("cache").used);
    assert!(!feature("NVLink multicast").used);
    assert!(
        detection
            .features
            .iter()
            .all(|feature| !feature.why.is_empty())
    );
    assert!(
        !stub.calls().iter().any(|name| name.contains("PrimaryCtx")),
        "looking takes no memory of a device"
    );
    stub.fail("cuDeviceGetName", 999);
    let detection = detect_with(stub.load(off()), off(), Cache::none());
    assert!(matches!(
        detection.driver,
        Err(CudaError::Call {
            device: Some(0),
            ..
        })
    ));
}

#[test]
fn threads_of_ones_own_may_be_excepted_from_captures() {
    let stub = stub!();
    let driver = stub.driver();
    stub.calls();
    driver.relax_capture_of_this_thread().unwrap();
    assert_eq!(stub.calls(), ["cuThreadExchangeStreamCaptureMode"]);
    // For the time of some calls, and back.
    let during = driver.aside_from_captures(|| stub.calls()).unwrap();
    assert_eq!(during, ["cuThreadExchangeStreamCaptureMode"]);
    assert_eq!(stub.calls(), ["cuThreadExchangeStreamCaptureMode"]);
}

#[test]
fn a_thread_is_excepted_from_captures_for_a_while() {
    let stub = stub!();
    let driver = stub.driver();
    stub.calls();
    let result = driver.aside_from_captures(|| {
        assert_eq!(stub.calls(), ["cuThreadExchangeStreamCaptureMode"]);
        5
    });
    assert_eq!(result.unwrap(), 5);
    assert_eq!(stub.calls(), ["cuThreadExchangeStreamCaptureMode"]);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        driver.aside_from_captures(|| panic!("on purpose"))
    }));
    assert!(panicked.is_err());
    assert_eq!(stub.calls(), ["cuThreadExchangeStreamCaptureMode"; 2]);
    stub.fail("cuThreadExchangeStreamCaptureMode", 1);
    assert!(driver.aside_from_captures(|| panic!("is not run")).is_err());
}

#[test]
fn the_current_device_is_that_of_the_thread_s_context() {
    let stub = stub!();
    let context = stub.context();
    let driver = stub.driver();
    assert!(driver.current_device().unwrap().is_none());
    let current = context.with_current(|| driver.current_device()).unwrap();
    assert_eq!(current.unwrap().unwrap().ordinal(), context.ordinal());
    stub.fail("cuCtxGetDevice", 999);
    assert!(driver.current_device().is_err());
}

#[test]
fn a_stream_s_capture_has_a_number() {
    let stub = stub!();
    let stream = Stream::new(&stub.context()).unwrap();
    assert_eq!(stream.capture().unwrap(), None);
    stub.set("capturing", 1);
    assert_eq!(stream.capture().unwrap(), Some(77));
    // Spoilt.
    stub.set("capturing", 2);
    let error = stream.capture().unwrap_err();
    assert!(matches!(error, CudaError::Capturing { .. }), "{error}");
    stub.set("capturing", 0);
}

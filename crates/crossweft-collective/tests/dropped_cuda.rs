//! What is dropped while its kernel runs, on a stand-in for the CUDA driver.
#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossweft_collective::{
    Algorithm, Communicator, CommunicatorOptions, DataType, ReduceOp, SymmetricBuffer,
    run_in_threads_on,
};
use crossweft_executor::{Buffers, Options, Prepared, RawBuffers};
use crossweft_hal::Device;
use crossweft_hal::cuda::{Context, Driver, Multicast, Stream};

const LIMIT: Duration = Duration::from_secs(60);
const BYTES: u64 = 4096;

/// The stub, in a copy of its own.
struct Stub {
    library: *mut c_void,
    context: Arc<Context>,
    _folder: tempfile::TempDir,
}

// SAFETY: the loader's handle may be used from any thread, and the stub locks its state.
unsafe impl Sync for Stub {}

impl Stub {
    /// `None`, said in a line, where the stub was not built beside this program.
    fn new() -> Option<Self> {
        let program = std::env::current_exe().unwrap();
        let built = program.with_file_name("libcrossweft_stub_driver.so");
        if !built.exists() {
            // Cargo builds it; a program that was taken elsewhere does without.
            let path = built.display();
            assert!(std::env::var_os("CARGO").is_none(), "no {path}");
            println!("skipped: {path} is not there");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        std::fs::copy(built, &path).unwrap();
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: our own library, which does nothing when it is loaded.
        let (library, driver) = unsafe {
            let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            (library, Driver::load(&path, Multicast::decide(|_| None)))
        };
        assert!(!library.is_null());
        let device = driver.unwrap().device(0).unwrap();
        Some(Self {
            library,
            context: Context::retain(&device).unwrap(),
            _folder: folder,
        })
    }

    fn set(&self, setting: &str, value: i64) {
        let name = CString::new(setting).unwrap();
        // SAFETY: the stub's function has this type.
        unsafe {
            let set: unsafe extern "C" fn(*const c_char, i64) = self.function(c"stub_set");
            set(name.as_ptr(), value);
        }
    }

    /// How often a function was called since the calls of any were counted last.
    fn count(&self, function: &str) -> usize {
        let mut text = vec![0; 1 << 20];
        // SAFETY: the stub's function has this type.
        let length = unsafe {
            let calls: unsafe extern "C" fn(*mut u8, usize) -> usize = self.function(c"stub_calls");
            calls(text.as_mut_ptr(), text.len())
        };
        let text = String::from_utf8(text[..length].to_vec()).unwrap();
        text.lines().filter(|name| *name == function).count()
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

    /// A rank that is alone, on the stub's device.
    fn rank(&self, rank_main: impl Fn(&Communicator) + Sync) {
        let device = |_| Ok(Device::Cuda(Arc::clone(&self.context)));
        let options = CommunicatorOptions { timeout: LIMIT };
        run_in_threads_on(device, 1, options, |communicator| {
            rank_main(communicator);
            Ok(())
        })
        .unwrap();
    }

    /// A plan that has been launched on a stream, which is somebody else's, and has not ended.
    fn launched(&self, communicator: &Communicator, stream: &Stream) -> Arc<Prepared> {
        let buffer: SymmetricBuffer = communicator.allocate(BYTES).unwrap();
        let mut options = Options::new(DataType::F32, ReduceOp::Sum, BYTES);
        options.buffers = Buffers::Registered {
            input: buffer.registered(),
            output: buffer.registered(),
        };
        let plan = Algorithm::OneShot.plan(1, 1).unwrap();
        let (endpoint, deadline) = (communicator.endpoint(), Instant::now() + LIMIT);
        let prepared = Prepared::prepare(endpoint, &plan, options, deadline).unwrap();
        let address = buffer.registered().local().addr();
        let buffers = RawBuffers {
            input: address,
            output: address,
            input_offset: 0,
            output_offset: 0,
            bytes: BYTES,
        };
        // SAFETY: the stub runs nothing.
        unsafe { prepared.launch_on_cuda(stream, &buffers, LIMIT) }.unwrap();
        self.set("busy", 1);
        self.count("");
        prepared
    }
}

const THEIRS: u64 = 0xabc0;

#[test]
fn a_plan_waits_for_the_stream_that_its_last_launch_is_on() {
    let Some(stub) = Stub::new() else { return };
    stub.rank(|communicator| {
        // SAFETY: the stub looks behind no stream.
        let stream = unsafe { Stream::lasting(&stub.context, THEIRS) };
        let prepared = stub.launched(communicator, &stream);
        let is_gone = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                drop(prepared);
                is_gone.store(true, Ordering::Release);
            });
            while stub.count("cuStreamQuery") == 0 {
                assert!(!is_gone.load(Ordering::Acquire), "it did not wait");
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(50));
            assert!(!is_gone.load(Ordering::Acquire));
            assert_eq!(stub.count("cuMemUnmap"), 0, "under a kernel");
            stub.set("busy", 0);
        });
        assert!(stub.count("cuMemUnmap") > 0);
    });
}

#[test]
fn what_cannot_be_waited_for_keeps_its_memory() {
    let Some(stub) = Stub::new() else { return };
    stub.rank(|communicator| {
        // SAFETY: as above.
        let stream = unsafe { Stream::lasting(&stub.context, THEIRS) };
        let prepared = stub.launched(communicator, &stream);
        // The handle is another stream's by now.
        stub.set("stream id", 6);
        drop(prepared);
        assert_eq!(stub.count("cuMemUnmap"), 0);
        stub.set("busy", 0);
    });
}

#[test]
fn whoever_keeps_a_plan_until_its_launches_have_ended_does_not_wait_again() {
    let Some(stub) = Stub::new() else { return };
    stub.rank(|communicator| {
        // SAFETY: as above.
        let stream = unsafe { Stream::from_raw(&stub.context, THEIRS) };
        let prepared = stub.launched(communicator, &stream);
        drop(prepared);
        assert!(stub.count("cuMemUnmap") > 0);
        stub.set("busy", 0);
    });
}

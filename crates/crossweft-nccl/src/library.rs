//! Another library with NCCL's interface, loaded at run time. What it is called for: [`delegate`](crate::delegate).
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crossweft_collective::Collective;

use crate::config::{MAGIC, UNDEFINED};
use crate::delegate::Message;
use crate::status::{Error, Status};

/// `ncclUniqueId`, which C passes by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Id([u8; 128]);

/// The beginning of `ncclConfig_t`, as of 2.25: what all later versions take, too.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    /// blocking, cgaClusterSize, minCTAs, maxCTAs
    numbers: [i32; 4],
    net_name: *const c_char,
    /// splitShare, trafficClass
    more: [i32; 2],
    name: *const c_char,
}

/// The version whose fields [`Config`] has.
const CONFIG_VERSION: u32 = 22500;

/// Fields with functions of these names, where the library has them.
macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        #[derive(Debug)]
        struct Functions {
            $($field: Option<unsafe extern "C" fn($($argument),*) -> $result>,)*
        }

        impl Functions {
            /// # Safety
            /// What the library exports under these names must take and return what NCCL's do.
            unsafe fn of(handle: *mut c_void) -> Self {
                Self {
                    $($field: {
                        // SAFETY: a handle that is never closed, and a string.
                        let found = unsafe { libc::dlsym(handle, $name.as_ptr()) };
                        (!found.is_null()).then(|| {
                            // SAFETY: a function of this type, as the caller says.
                            unsafe {
                                std::mem::transmute::<
                                    *mut c_void,
                                    unsafe extern "C" fn($($argument),*) -> $result,
                                >(found)
                            }
                        })
                    },)*
                }
            }
        }
    };
}

functions! {
    get_version = c"ncclGetVersion": fn(*mut i32) -> i32;
    get_unique_id = c"ncclGetUniqueId": fn(*mut Id) -> i32;
    init = c"ncclCommInitRankConfig": fn(*mut u64, i32, Id, i32, *mut Config) -> i32;
    get_async_error = c"ncclCommGetAsyncError": fn(u64, *mut i32) -> i32;
    destroy = c"ncclCommDestroy": fn(u64) -> i32;
    abort = c"ncclCommAbort": fn(u64) -> i32;
    get_error_string = c"ncclGetErrorString": fn(i32) -> *const c_char;
    get_last_error = c"ncclGetLastError": fn(u64) -> *const c_char;
    group_start = c"ncclGroupStart": fn() -> i32;
    group_end = c"ncclGroupEnd": fn() -> i32;
    make_operation = c"ncclRedOpCreatePreMulSum": fn(*mut i32, *const u64, i32, i32, u64) -> i32;
    destroy_operation = c"ncclRedOpDestroy": fn(i32, u64) -> i32;
    all_reduce = c"ncclAllReduce": fn(u64, u64, usize, i32, i32, u64, u64) -> i32;
    reduce_scatter = c"ncclReduceScatter": fn(u64, u64, usize, i32, i32, u64, u64) -> i32;
    reduce = c"ncclReduce": fn(u64, u64, usize, i32, i32, i32, u64, u64) -> i32;
    broadcast = c"ncclBroadcast": fn(u64, u64, usize, i32, i32, u64, u64) -> i32;
    all_gather = c"ncclAllGather": fn(u64, u64, usize, i32, u64, u64) -> i32;
    all_to_all = c"ncclAlltoAll": fn(u64, u64, usize, i32, u64, u64) -> i32;
    gather = c"ncclGather": fn(u64, u64, usize, i32, i32, u64, u64) -> i32;
    scatter = c"ncclScatter": fn(u64, u64, usize, i32, i32, u64, u64) -> i32;
    send = c"ncclSend": fn(u64, usize, i32, i32, u64, u64) -> i32;
    recv = c"ncclRecv": fn(u64, usize, i32, i32, u64, u64) -> i32;
}

/// `ncclUint8`.
const BYTES: i32 = 1;
/// `ncclScalarHostImmediate`.
const HOST_IMMEDIATE: i32 = 1;

/// The library.
#[derive(Debug)]
pub(crate) struct Library {
    path: PathBuf,
    functions: Functions,
}

/// A communicator of the library's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle(u64);

/// What a call passes. Addresses and the stream are those that a caller of this library has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arguments {
    pub(crate) send: u64,
    pub(crate) recv: u64,
    pub(crate) count: usize,
    /// `ncclDataType_t`.
    pub(crate) dtype: i32,
    /// `ncclRedOp_t`, where something is reduced.
    pub(crate) op: i32,
    pub(crate) stream: u64,
}

/// What a function has returned, and which it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Returned {
    pub(crate) name: &'static str,
    pub(crate) code: i32,
}

impl Library {
    /// Loads the library at `path`, which must not be this one.
    pub(crate) fn load(path: &Path) -> Result<Self, Error> {
        let failed = |why: String| {
            Error::usage(format!(
                "CROSSWEFT_NCCL_LIB: {} cannot be used: {why}",
                path.display()
            ))
        };
        if !path.is_absolute() {
            return Err(failed(
                "give an absolute path, for the loader takes a name for that of a library it has, such as this one"
                    .to_owned(),
            ));
        }
        let name = CString::new(path.as_os_str().as_bytes());
        let name = name.map_err(|error| failed(error.to_string()))?;
        // Its own calls of NCCL's functions are to reach itself, not what was loaded before.
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND;
        // SAFETY: a string. The user, who has named the library, answers for what its constructors do.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if handle.is_null() {
            return Err(failed(loader_error()));
        }
        // SAFETY: the user says that it is a library with NCCL's interface.
        let functions = unsafe { Functions::of(handle) };
        let Some(version) = functions.get_version else {
            return Err(failed("it has no ncclGetVersion".to_owned()));
        };
        let own: fn(&Path) -> Result<Self, Error> = Self::load;
        if base_of(version as *const c_void) == base_of(own as *const c_void) {
            return Err(failed(
                "it is this library itself, which would call itself for ever; give NCCL's own, or a copy".to_owned(),
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            functions,
        })
    }

    /// Where it lies.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn missing(&self, name: &str) -> Error {
        Error::usage(format!(
            "{} has no {name}; take what needs it out of CROSSWEFT_NCCL_DELEGATE",
            self.path.display()
        ))
    }

    fn has<F: Copy>(&self, function: Option<F>, name: &str) -> Result<F, Error> {
        function.ok_or_else(|| self.missing(name))
    }

    /// The error behind a code. The others do not know of it.
    pub(crate) fn error(&self, comm: Option<Handle>, returned: Returned) -> Error {
        let Returned { name, code } = returned;
        let comm = comm.map_or(0, |comm| comm.0);
        // SAFETY: it takes any number, and returns a string that stays.
        let words = self.functions.get_error_string.map(|f| unsafe { f(code) });
        // SAFETY: it takes a communicator or none, and returns a string that is valid until it is asked again.
        let last = self.functions.get_last_error.map(|f| unsafe { f(comm) });
        let words = [words, last].into_iter().flatten().map(text);
        let words: Vec<String> = words.filter(|words| !words.is_empty()).collect();
        let path = self.path.display();
        Error {
            status: Status::of_code(code),
            text: format!("{name} of {path} returned {code}: {}", words.join("; ")),
            shared: false,
            early: false,
        }
    }

    fn done(&self, comm: Option<Handle>, name: &'static str, code: i32) -> Result<(), Error> {
        match code {
            0 => Ok(()),
            _ => Err(self.error(comm, Returned { name, code })),
        }
    }

    /// `ncclGetVersion`.
    pub(crate) fn version(&self) -> Result<i32, Error> {
        let function = self.has(self.functions.get_version, "ncclGetVersion")?;
        let mut version = 0;
        // SAFETY: a place for the result.
        self.done(None, "ncclGetVersion", unsafe {
            function(&raw mut version)
        })?;
        Ok(version)
    }

    /// `ncclGetUniqueId`.
    pub(crate) fn unique_id(&self) -> Result<[u8; 128], Error> {
        let function = self.has(self.functions.get_unique_id, "ncclGetUniqueId")?;
        let mut id = Id([0; 128]);
        // SAFETY: a place for the result.
        self.done(None, "ncclGetUniqueId", unsafe { function(&raw mut id) })?;
        Ok(id.0)
    }

    /// Begins to make a communicator that does not block, named `name`.
    pub(crate) fn init(
        &self,
        id: [u8; 128],
        (rank, count): (i32, i32),
        name: &'static CStr,
    ) -> Result<(Handle, Returned), Error> {
        let function = self.has(self.functions.init, "ncclCommInitRankConfig")?;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: CONFIG_VERSION,
            numbers: [0, UNDEFINED, UNDEFINED, UNDEFINED],
            net_name: std::ptr::null(),
            more: [UNDEFINED; 2],
            name: name.as_ptr(),
        };
        let mut comm = 0;
        // SAFETY: a place for the result, and a structure that says how large it is; the name is never freed.
        let code = unsafe { function(&raw mut comm, count, Id(id), rank, &raw mut config) };
        let name = "ncclCommInitRankConfig";
        Ok((Handle(comm), Returned { name, code }))
    }

    /// `ncclCommGetAsyncError`.
    pub(crate) fn asynchronous(&self, comm: Handle) -> Result<i32, Error> {
        let name = "ncclCommGetAsyncError";
        let function = self.has(self.functions.get_async_error, name)?;
        let mut code = 0;
        // SAFETY: a communicator of the library's, and a place for the result.
        self.done(Some(comm), name, unsafe { function(comm.0, &raw mut code) })?;
        Ok(code)
    }

    /// `ncclCommDestroy`.
    pub(crate) fn destroy(&self, comm: Handle) -> Result<(), Error> {
        let function = self.has(self.functions.destroy, "ncclCommDestroy")?;
        // SAFETY: a communicator of the library's, which nobody uses any more.
        self.done(None, "ncclCommDestroy", unsafe { function(comm.0) })
    }

    /// `ncclCommAbort`.
    pub(crate) fn abort(&self, comm: Handle) {
        if let Some(function) = self.functions.abort {
            // SAFETY: a communicator of the library's, which nobody uses any more. Whatever it returns, it is gone.
            let _ = unsafe { function(comm.0) };
        }
    }

    /// Makes an operation that multiplies by the element in the low bits of `factor`, then adds.
    pub(crate) fn make_operation(
        &self,
        comm: Handle,
        factor: u64,
        dtype: i32,
    ) -> Result<i32, Error> {
        let name = "ncclRedOpCreatePreMulSum";
        let function = self.has(self.functions.make_operation, name)?;
        let mut op = 0;
        // SAFETY: places for the result and of the factor, which is read before this returns.
        let code = unsafe {
            function(
                &raw mut op,
                &raw const factor,
                dtype,
                HOST_IMMEDIATE,
                comm.0,
            )
        };
        self.done(Some(comm), name, code)?;
        Ok(op)
    }

    /// Takes it away.
    pub(crate) fn destroy_operation(&self, comm: Handle, op: i32) -> Result<(), Error> {
        let name = "ncclRedOpDestroy";
        let function = self.has(self.functions.destroy_operation, name)?;
        // SAFETY: an operation of this communicator.
        self.done(Some(comm), name, unsafe { function(op, comm.0) })
    }

    /// Whether it has what `collective` needs.
    pub(crate) fn offers(&self, collective: Collective) -> Result<(), Error> {
        let f = &self.functions;
        let (there, name) = match collective {
            Collective::AllReduce => (f.all_reduce.is_some(), "ncclAllReduce"),
            Collective::ReduceScatter => (f.reduce_scatter.is_some(), "ncclReduceScatter"),
            Collective::Reduce { .. } => (f.reduce.is_some(), "ncclReduce"),
            Collective::Broadcast { .. } => (f.broadcast.is_some(), "ncclBroadcast"),
            Collective::AllGather => (f.all_gather.is_some(), "ncclAllGather"),
            Collective::AllToAll => (f.all_to_all.is_some(), "ncclAlltoAll"),
            Collective::Gather { .. } => (f.gather.is_some(), "ncclGather"),
            Collective::Scatter { .. } => (f.scatter.is_some(), "ncclScatter"),
            Collective::SendRecv => {
                let needed = f.send.is_some() && f.recv.is_some() && f.group_start.is_some();
                (
                    needed && f.group_end.is_some(),
                    "ncclSend and ncclRecv, and groups",
                )
            }
            _ => (false, "such a collective"),
        };
        match there {
            true => Ok(()),
            false => Err(self.missing(name)),
        }
    }

    /// Begins a collective.
    pub(crate) fn collective(
        &self,
        comm: Handle,
        collective: Collective,
        arguments: &Arguments,
    ) -> Result<Returned, Error> {
        let Arguments {
            send,
            recv,
            count,
            dtype,
            op,
            stream,
        } = *arguments;
        let (f, comm) = (&self.functions, comm.0);
        let number = |root: u32| i32::try_from(root).unwrap_or(i32::MAX);
        /// Calls a function, if it is there.
        macro_rules! call {
            ($field:ident, $name:literal, $($argument:expr),*) => {{
                let function = self.has(f.$field, $name)?;
                // SAFETY: a communicator of the library's; buffers, sizes and types are what the caller has
                // promised for the same call here.
                Returned { name: $name, code: unsafe { function($($argument),*) } }
            }};
        }
        Ok(match collective {
            Collective::AllReduce => {
                call!(
                    all_reduce,
                    "ncclAllReduce",
                    send,
                    recv,
                    count,
                    dtype,
                    op,
                    comm,
                    stream
                )
            }
            Collective::ReduceScatter => {
                call!(
                    reduce_scatter,
                    "ncclReduceScatter",
                    send,
                    recv,
                    count,
                    dtype,
                    op,
                    comm,
                    stream
                )
            }
            Collective::Reduce { root } => {
                call!(
                    reduce,
                    "ncclReduce",
                    send,
                    recv,
                    count,
                    dtype,
                    op,
                    number(root),
                    comm,
                    stream
                )
            }
            Collective::Broadcast { root } => {
                call!(
                    broadcast,
                    "ncclBroadcast",
                    send,
                    recv,
                    count,
                    dtype,
                    number(root),
                    comm,
                    stream
                )
            }
            Collective::AllGather => {
                call!(
                    all_gather,
                    "ncclAllGather",
                    send,
                    recv,
                    count,
                    dtype,
                    comm,
                    stream
                )
            }
            Collective::AllToAll => {
                call!(
                    all_to_all,
                    "ncclAlltoAll",
                    send,
                    recv,
                    count,
                    dtype,
                    comm,
                    stream
                )
            }
            Collective::Gather { root } => {
                call!(
                    gather,
                    "ncclGather",
                    send,
                    recv,
                    count,
                    dtype,
                    number(root),
                    comm,
                    stream
                )
            }
            Collective::Scatter { root } => {
                call!(
                    scatter,
                    "ncclScatter",
                    send,
                    recv,
                    count,
                    dtype,
                    number(root),
                    comm,
                    stream
                )
            }
            _ => return Err(self.missing("such a collective")),
        })
    }
}

impl Library {
    /// Begins sends and receives of bytes, as one group.
    pub(crate) fn messages<'a>(
        &self,
        comm: Handle,
        messages: impl Iterator<Item = &'a Message>,
    ) -> Result<Returned, Error> {
        let f = &self.functions;
        let (send, recv) = (self.has(f.send, "ncclSend")?, self.has(f.recv, "ncclRecv")?);
        let start = self.has(f.group_start, "ncclGroupStart")?;
        let end = self.has(f.group_end, "ncclGroupEnd")?;
        // SAFETY: it takes nothing.
        self.done(Some(comm), "ncclGroupStart", unsafe { start() })?;
        for message in messages {
            let Message {
                sends,
                peer,
                address,
                bytes,
                stream,
            } = *message;
            let peer = i32::try_from(peer).unwrap_or(i32::MAX);
            let function = if sends { send } else { recv };
            // SAFETY: a communicator of the library's; buffers and sizes are what the caller has promised for the
            // same call here. One that is refused is the group's error.
            let _ = unsafe { function(address, bytes, BYTES, peer, comm.0, stream) };
        }
        let name = "ncclGroupEnd";
        // SAFETY: it takes nothing, and ends the group that was begun above on this thread.
        let code = unsafe { end() };
        Ok(Returned { name, code })
    }
}

/// What the loader says of its last error on this thread.
fn loader_error() -> String {
    // SAFETY: the sentence belongs to this thread, and is copied before its next call.
    let sentence = unsafe { libc::dlerror() };
    match sentence.is_null() {
        true => "the loader does not say why".to_owned(),
        false => text(sentence),
    }
}

/// A string of the library's, or of the loader's.
fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a string, that is valid until it is copied.
    let words = unsafe { CStr::from_ptr(words) };
    words.to_string_lossy().into_owned()
}

/// Where the library begins in memory that has code at `address`.
fn base_of(address: *const c_void) -> Option<u64> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: it takes any address, and writes the structure if it knows it.
    let known = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
    // SAFETY: zeros are a valid value, and so is what was written.
    let found = unsafe { found.assume_init() };
    known.then(|| found.dli_fbase.expose_provenance() as u64)
}

//! The communicator, through the library that made it.
//!
//! `ncclComm_t` is that library's own, so nothing is read through it: the library is found in the process, by its loader
//! name, and asked by the same functions that programs call. A group takes from the communicator which ranks there are and one
//! all-gather, by which rank 0 tells the others where to meet; after that the two have nothing to do with each other.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use crate::pointer::Address;
use crate::status::{Error, Status};

const UINT8: i32 = 1;
const SUCCESS: i32 = 0;
const IN_PROGRESS: i32 = 7;

type Number = extern "C" fn(Address, *mut i32) -> i32;
type AllGather = extern "C" fn(*const c_void, *mut c_void, usize, i32, Address, Address) -> i32;
type WindowPointer = extern "C" fn(Address, Address, *mut Address) -> i32;
type LastError = extern "C" fn(Address) -> *const std::ffi::c_char;

/// A communicator, as far as it is used here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Communicator {
    library: NonNull<c_void>,
    handle: Address,
}

// SAFETY: the loader's handle belongs to the process and may be used from any thread; so may the communicator's.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// What `ncclComm_t` is. Finds the library, which must be there: it has made the communicator.
    pub(crate) fn new(handle: Address) -> Result<Self, Error> {
        if handle == Address::NULL {
            return Err(Error::argument("comm is NULL"));
        }
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
        // SAFETY: a string; nothing is loaded, so nothing is run.
        let found = unsafe { libc::dlopen(c"libnccl.so.2".as_ptr(), flags) };
        let library = NonNull::new(found).ok_or_else(|| {
            Error::usage(
                "no libnccl.so.2 is loaded in this process, so comm is no communicator of it: link or load \
                 crossweft's before making communicators",
            )
        })?;
        Ok(Self { library, handle })
    }

    fn function(&self, name: &CStr) -> Result<NonNull<c_void>, Error> {
        // SAFETY: the library is never closed; a string.
        let found = unsafe { libc::dlsym(self.library.as_ptr(), name.as_ptr()) };
        NonNull::new(found).ok_or_else(|| {
            Error::usage(format!(
                "the libnccl.so.2 of this process has no {}",
                name.to_string_lossy()
            ))
        })
    }

    fn number(&self, name: &CStr) -> Result<i32, Error> {
        let function = self.function(name)?;
        // SAFETY: functions of these names have this type in every version of NCCL.
        let function: Number = unsafe { transmute(function) };
        let mut number = 0;
        self.check(name, function(self.handle, &raw mut number))?;
        Ok(number)
    }

    fn check(&self, name: &CStr, result: i32) -> Result<(), Error> {
        if result == SUCCESS {
            return Ok(());
        }
        let status = match result {
            1 | 2 => Status::System,
            4 => Status::Argument,
            5 => Status::Usage,
            6 | 8 => Status::Remote,
            _ => Status::Internal,
        };
        let name = name.to_string_lossy();
        let words = self.last_error().unwrap_or_default();
        Err(Error::new(
            status,
            format!("{name} returned {result}: {words}"),
        ))
    }

    fn last_error(&self) -> Result<String, Error> {
        let function = self.function(c"ncclGetLastError")?;
        // SAFETY: as above.
        let function: LastError = unsafe { transmute(function) };
        let text = function(self.handle);
        if text.is_null() {
            return Ok(String::new());
        }
        // SAFETY: not null, so a string, which is copied before anything else is called.
        Ok(unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned())
    }

    /// This rank, and how many there are.
    pub(crate) fn ranks(&self) -> Result<(u32, u32), Error> {
        let rank = self.number(c"ncclCommUserRank")?;
        let count = self.number(c"ncclCommCount")?;
        match (u32::try_from(rank), u32::try_from(count)) {
            (Ok(rank), Ok(count)) if rank < count => Ok((rank, count)),
            _ => Err(Error::argument(format!(
                "comm says that it is rank {rank} of {count}"
            ))),
        }
    }

    /// The payloads of all ranks, in rank order; they are not all zeros. Collective; blocks.
    pub(crate) fn all_gather(
        &self,
        payload: &[u8],
        (rank, ranks): (u32, u32),
        deadline: Instant,
    ) -> Result<Vec<u8>, Error> {
        let name = c"ncclAllGather";
        let function = self.function(name)?;
        // SAFETY: functions of this name have this type in every version of NCCL.
        let function: AllGather = unsafe { transmute(function) };
        let own = payload.to_vec();
        let mut all = vec![0; own.len() * ranks as usize];
        let mut result = function(
            own.as_ptr().cast(),
            all.as_mut_ptr().cast(),
            own.len(),
            UINT8,
            self.handle,
            Address::NULL,
        );
        while result == IN_PROGRESS {
            if Instant::now() > deadline {
                // The call still uses them.
                std::mem::forget((own, all));
                return Err(Error::new(
                    Status::Remote,
                    "the communicator did not finish an all-gather in time",
                ));
            }
            std::thread::sleep(Duration::from_micros(50));
            result = self.number(c"ncclCommGetAsyncError")?;
        }
        self.check(name, result)?;
        if all.chunks(own.len()).nth(rank as usize) != Some(&own[..]) {
            // The call was only gathered, and uses them later.
            std::mem::forget((own, all));
            return Err(Error::usage(
                "the communicator's all-gather has not run: make groups outside ncclGroupStart and ncclGroupEnd",
            ));
        }
        Ok(all)
    }

    /// Where a window begins.
    pub(crate) fn window(&self, window: Address) -> Result<Address, Error> {
        let name = c"ncclWinGetUserPtr";
        let function = self.function(name)?;
        // SAFETY: functions of this name have this type since there are such.
        let function: WindowPointer = unsafe { transmute(function) };
        let mut address = Address::NULL;
        self.check(name, function(self.handle, window, &raw mut address))?;
        Ok(address)
    }
}

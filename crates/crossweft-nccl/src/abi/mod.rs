//! The exported functions, each under its own name and, for profilers that stand in front of it, with a `p`.
//!
//! Both names call one private function, so that whoever takes over `ncclX` and calls `pncclX` does not come round
//! in a circle. Functions that C calls cannot unwind: what panics is caught in [`status`](crate::failure::status)
//! and [`value`].
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::comm::Comm;
use crate::failure::{guarded, note};
use crate::pointer::Address;
use crate::status::{Error, Status};
use crate::{group, table};

mod collectives;
mod communicators;
mod device;
mod general;
mod memory;
mod parameters;
mod sided;

/// Functions that return `ncclResult_t`; bodies return `Result<Status, Error>`.
macro_rules! calls {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $crate::abi::exports! {$(
            $(#[$doc])*
            fn $name($($argument: $type),*) -> i32 {
                $crate::failure::status(stringify!($name), || $body)
            }
        )*}
    };
}

/// Functions that return anything.
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        #[allow(clippy::too_many_arguments, reason = "NCCL's functions have so many")]
        const _: () = {
            $(#[$doc])*
            fn both($($argument: $type),*) -> $result $body

            // SAFETY: nothing else in any program that uses NCCL has this name, and it is called as NCCL's
            // header says.
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $type),*) -> $result {
                both($($argument),*)
            }

            // SAFETY: as above.
            #[unsafe(export_name = concat!("p", stringify!($name)))]
            extern "C" fn profiled($($argument: $type),*) -> $result {
                both($($argument),*)
            }
        };
    )*};
}
pub(crate) use {calls, exports};

/// What a stream is on host memory: of no account, but to another library.
type Stream = Address;

/// Does something with the communicator behind a handle; an error is also the communicator's last one.
fn on<T>(comm: Address, act: impl FnOnce(&Arc<Comm>) -> Result<T, Error>) -> Result<T, Error> {
    let comm = table::comm(comm)?;
    act(&comm).inspect_err(|error| comm.note(error))
}

/// Makes calls on the communicator behind a handle, at once or with the group. If that is refused, the other ranks
/// learn it.
fn calling<T>(comm: Address, act: impl FnOnce(&Arc<Comm>) -> Result<T, Error>) -> Result<T, Error> {
    // One that has failed in a call is past that.
    grouped(|| on(comm, |comm| asking(comm, || act(comm))))
}

/// Looks at what all ranks are to do together. If that is refused, the other ranks learn it.
fn asking<T>(comm: &Arc<Comm>, act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    act().inspect_err(|error| comm.refuse(error))
}

/// A call that counts in a group: if it fails, so does the group.
fn grouped<T>(act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    guarded(act).inspect_err(group::fail)
}

/// The value of a function that has no way to return an error; `otherwise` if there was one.
fn value<T>(name: &str, otherwise: T, act: impl FnOnce() -> Result<T, Error>) -> T {
    guarded(act).unwrap_or_else(|error| {
        note(name, &error);
        otherwise
    })
}

/// A number that C has as `int` and that cannot be negative.
fn unsigned(name: &str, number: i32) -> Result<u32, Error> {
    u32::try_from(number).map_err(|_| Error::argument(format!("{name} is {number}")))
}

/// For C, which has `int` where this is never negative.
fn signed(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn success<T>(_: T) -> Status {
    Status::Success
}

#[cfg(test)]
mod tests {
    use crate::status::Status;

    calls! {
        fn ncclTestThatPanics(number: i32) {
            if number == 7 {
                panic!("injected: {number}");
            }
            Ok(Status::Success)
        }
    }

    #[test]
    fn a_panic_ends_at_the_interface() {
        unsafe extern "C" {
            fn ncclTestThatPanics(number: i32) -> i32;
            fn pncclTestThatPanics(number: i32) -> i32;
            fn ncclGetLastError(comm: u64) -> *const std::ffi::c_char;
        }
        // SAFETY: both are defined above, and do as Rust functions do.
        let results = unsafe {
            (
                ncclTestThatPanics(1),
                ncclTestThatPanics(7),
                pncclTestThatPanics(7),
            )
        };
        let internal = Status::InternalError.code();
        assert_eq!(results, (Status::Success.code(), internal, internal));
        // SAFETY: it returns a string that is valid until the next call.
        let text = unsafe { std::ffi::CStr::from_ptr(ncclGetLastError(0)) };
        let text = text.to_str().unwrap();
        assert!(
            text.contains("ncclTestThatPanics") && text.contains("injected: 7"),
            "{text}"
        );
    }
}

//! Version, errors, groups.

use std::ffi::c_char;

use super::{calls, exports, success, value};
use crate::pointer::{Address, Out, Versioned};
use crate::status::{Error, Status};
use crate::{failure, group, settings, simulate, table};

calls! {
    fn ncclGetVersion(version: Out<i32>) {
        version.set("version", settings::version()?).map(success)
    }

    fn ncclCommGetAsyncError(comm: Address, error: Out<i32>) {
        let status = table::comm(comm)?.asynchronous();
        error.set("asyncError", status.code()).map(success)
    }

    fn ncclGroupStart() {
        group::start();
        Ok(Status::Success)
    }

    fn ncclGroupEnd() {
        group::end()
    }

    fn ncclGroupSimulateEnd(info: Versioned) {
        simulate::end(&info).map(success)
    }

    /// Encrypts NCCL's sockets with a key. Here the ranks of a host talk over loopback, shared memory and Unix
    /// sockets, after each has proved the unique id's secret.
    fn ncclSetEncryption(_config: Address) {
        Err(Error::unsupported(
            "encryption of the bootstrap connections",
            "ranks only listen on loopback and prove a secret before they are listened to",
        ))
    }
}

exports! {
    fn ncclGetErrorString(result: i32) -> *const c_char {
        Status::describe(result).as_ptr()
    }

    fn ncclGetLastError(comm: Address) -> *const c_char {
        let own = || Ok(table::comm(comm).ok().and_then(|comm| comm.last_error()));
        failure::last(value("ncclGetLastError", None, own))
    }

    /// Deprecated there, and nothing to reset here: `NCCL_DEBUG` is read when an error happens.
    fn ncclResetDebugInit() -> () {}
}

const _: () = {
    // SAFETY: as for the other names; this one has no twin.
    #[unsafe(no_mangle)]
    extern "C" fn ncclResetDebugInitInternal() {}
};

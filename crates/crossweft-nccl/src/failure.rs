//! Where the words behind an error go: `ncclGetLastError`, and standard error if `NCCL_DEBUG` says so.

use std::cell::RefCell;
use std::ffi::CString;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use crate::settings;
use crate::status::{Error, Status};

/// The last error of any thread: a watchdog may ask for what another thread has met.
static LAST: Mutex<String> = Mutex::new(String::new());

thread_local! {
    /// The last error of this thread.
    static OWN: RefCell<String> = const { RefCell::new(String::new()) };
    /// What this thread was told last.
    static TOLD: RefCell<CString> = RefCell::new(CString::default());
}

/// Notes an error of a call on this thread. Cannot panic: whoever calls this has caught what can.
pub(crate) fn note(name: &str, error: &Error) -> Status {
    let text = format!("{name}: {error}");
    if settings::prints_errors() {
        // Who has closed it does not want to read it.
        let _ = writeln!(std::io::stderr(), "crossweft: NCCL WARN {text}");
    }
    // Nobody asks a thread that is so far gone that it has no variables any more.
    let _ = OWN.try_with(|own| own.borrow_mut().clone_from(&text));
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = text;
    error.status
}

/// The last error: `comm`'s own if there is one, or else this thread's, or else any thread's. Valid until this
/// thread asks again.
pub(crate) fn last(comm: Option<String>) -> *const std::ffi::c_char {
    let own = OWN.try_with(|own| own.borrow().clone()).ok();
    let own = || own.filter(|own| !own.is_empty());
    let any = || LAST.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let text = comm.or_else(own).unwrap_or_else(any);
    let text: Vec<u8> = text.into_bytes().into_iter().filter(|&b| b != 0).collect();
    let text = CString::new(text).unwrap_or_default();
    let told = TOLD.try_with(|told| {
        *told.borrow_mut() = text;
        told.borrow().as_ptr()
    });
    told.unwrap_or(c"the thread has ended".as_ptr())
}

/// Runs `act`; a panic becomes an error.
pub(crate) fn guarded<T>(act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned());
        let words = words.unwrap_or_else(|| "no message".to_owned());
        Err(Error::internal(format!(
            "a bug in crossweft, please report it: it panicked with `{words}`"
        )))
    })
}

/// An exported function's result: what `act` returned, and the text of an error where callers find it.
pub(crate) fn status(name: &str, act: impl FnOnce() -> Result<Status, Error>) -> i32 {
    guarded(act)
        .unwrap_or_else(|error| note(name, &error))
        .code()
}

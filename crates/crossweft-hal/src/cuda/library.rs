//! A shared library, loaded at run time.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

/// A loaded library. It stays loaded for good: functions taken from it are valid for ever.
#[derive(Debug)]
pub(super) struct Library(NonNull<c_void>);

// SAFETY: the loader's handle belongs to the process and may be used from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a library by name, which the system's loader looks for, or by path. The error is the
    /// loader's sentence.
    ///
    /// # Safety
    /// The library's constructors run, and must be harmless.
    pub(super) unsafe fn load(path: &Path) -> Result<Self, String> {
        let path = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: a string; the caller vouches for the library.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(|| {
            // SAFETY: the sentence belongs to this thread, and is copied before its next call.
            let sentence = unsafe { libc::dlerror() };
            if sentence.is_null() {
                return "the loader does not say why".to_owned();
            }
            // SAFETY: the loader's sentences are strings.
            unsafe { CStr::from_ptr(sentence) }
                .to_string_lossy()
                .into_owned()
        })
    }

    /// Where a symbol is, if the library has it.
    pub(super) fn symbol(&self, name: &str) -> Option<NonNull<c_void>> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is never closed; a string.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

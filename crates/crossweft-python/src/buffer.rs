//! Python's buffer protocol (PEP 3118): `bytes`, `bytearray`, `array.array`, `memoryview`, numpy.
//!
//! Its functions are part of the stable ABI from Python 3.11 on only, but exported by 3.10 as well, with the
//! same structure; so they are declared here.

use std::ffi::{CStr, c_char, c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi::PyObject;
use pyo3::prelude::*;

/// `Py_buffer`.
#[repr(C)]
struct Raw {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut Raw, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut Raw);
}

/// `PyBUF_C_CONTIGUOUS | PyBUF_FORMAT`.
const CONTIGUOUS_WITH_FORMAT: c_int = 0x3c;

/// A contiguous buffer, held until this is dropped.
pub(crate) struct Buffer(
    // Where it was filled in: it may point into itself.
    Box<Raw>,
);

// SAFETY: it is plain data, which `drop` hands back while attached to the interpreter.
unsafe impl Send for Buffer {}

impl Buffer {
    /// The buffer of `object`; `None` if it exports none.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        // SAFETY: any object may be asked.
        if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
            return Ok(None);
        }
        let mut raw = Box::new(Raw {
            buf: std::ptr::null_mut(),
            obj: std::ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 1,
            ndim: 0,
            format: std::ptr::null_mut(),
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            suboffsets: std::ptr::null_mut(),
            internal: std::ptr::null_mut(),
        });
        // SAFETY: a live object, and a place for the answer that does not move.
        let got =
            unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *raw, CONTIGUOUS_WITH_FORMAT) };
        if got != 0 {
            return Err(PyErr::take(object.py())
                .unwrap_or_else(|| PyBufferError::new_err("no contiguous buffer")));
        }
        Ok(Some(Self(raw)))
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.buf.expose_provenance() as u64
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.len.unsigned_abs() as u64
    }

    pub(crate) fn is_readonly(&self) -> bool {
        self.0.readonly != 0
    }

    /// The items' `struct` format, and their size in bytes.
    pub(crate) fn item(&self) -> (String, u64) {
        let size = self.0.itemsize.unsigned_abs() as u64;
        if self.0.format.is_null() {
            return ("B".to_owned(), size);
        }
        // SAFETY: a filled-in buffer has a terminated string here, for as long as it is held.
        let format = unsafe { CStr::from_ptr(self.0.format) };
        (format.to_string_lossy().into_owned(), size)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        Python::attach(|_| {
            // SAFETY: filled in by `PyObject_GetBuffer`, released once, while attached.
            unsafe { PyBuffer_Release(&raw mut *self.0) };
        });
    }
}

//! Tensors by DLPack 1.x: the C exchange API where the tensor's type offers it, else `__dlpack__`.
//!
//! Layouts are those of `dlpack.h` (github.com/dmlc/dlpack, versions 0.8 and 1.3); the protocol is described at
//! dmlc.github.io/dlpack/latest/python_spec.html.

use std::ffi::{CStr, c_int, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

impl Device {
    pub(crate) const CPU: i32 = 1;
    pub(crate) const CUDA: i32 = 2;
    pub(crate) const CUDA_HOST: i32 = 3;
    pub(crate) const CUDA_MANAGED: i32 = 13;
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Type {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Raw {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: Type,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

impl Raw {
    const EMPTY: Self = Self {
        data: std::ptr::null_mut(),
        device: Device { kind: 0, id: 0 },
        ndim: 0,
        dtype: Type {
            code: 0,
            bits: 0,
            lanes: 0,
        },
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        byte_offset: 0,
    };
}

/// `DLManagedTensor`.
#[repr(C)]
struct Legacy {
    tensor: Raw,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Managed {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Raw,
}

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;
/// The versions whose layout is known.
const MAJOR: u32 = 1;

/// `DLPackExchangeAPI`, with its header.
#[repr(C)]
struct ExchangeApi {
    version: Version,
    previous: *const Self,
    managed_tensor_allocator: *const c_void,
    managed_tensor_from_py_object:
        Option<unsafe extern "C" fn(*mut PyObject, *mut *mut Managed) -> c_int>,
    managed_tensor_to_py_object: *const c_void,
    tensor_from_py_object: Option<unsafe extern "C" fn(*mut PyObject, *mut Raw) -> c_int>,
    current_work_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

const EXCHANGE_API: &CStr = c"dlpack_exchange_api";
const NAMES: [(&CStr, &CStr); 2] = [
    (c"dltensor_versioned", c"used_dltensor_versioned"),
    (c"dltensor", c"used_dltensor"),
];

/// A tensor, held until this is dropped.
pub(crate) struct Tensor {
    raw: Raw,
    readonly: bool,
    /// The stream on which its library works now, where it says so.
    stream: Option<u64>,
    /// How it was asked for.
    pub(crate) protocol: &'static str,
    owner: Owner,
}

enum Owner {
    /// The object that it was asked of is kept by the caller.
    Caller,
    Managed(*mut Managed),
    Legacy(*mut Legacy),
}

// SAFETY: plain data; deleters may be called from any thread that is attached, as `drop` is.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Send for Raw {}

impl Drop for Owner {
    fn drop(&mut self) {
        Python::attach(|_| match *self {
            Self::Caller => {}
            // SAFETY: handed over with the pointer, which is used no more; called once, while attached.
            Self::Managed(managed) => unsafe {
                if let Some(delete) = (*managed).deleter {
                    delete(managed);
                }
            },
            // SAFETY: as above.
            Self::Legacy(managed) => unsafe {
                if let Some(delete) = (*managed).deleter {
                    delete(managed);
                }
            },
        });
    }
}

impl Tensor {
    /// The tensor that `object` is; `None` if it does not speak DLPack. The caller keeps `object`.
    ///
    /// `stream` is the CUDA stream that it will be used on, as `__dlpack__` takes it.
    pub(crate) fn new(object: &Bound<'_, PyAny>, stream: Option<u64>) -> PyResult<Option<Self>> {
        if let Some(tensor) = Self::by_exchange_api(object)? {
            return Ok(Some(tensor));
        }
        if !object.hasattr("__dlpack__")? {
            return Ok(None);
        }
        let arguments = PyDict::new(object.py());
        if let Some(stream) = stream {
            arguments.set_item("stream", stream)?;
        }
        let capsule = {
            let versioned = arguments.copy()?;
            versioned.set_item("max_version", (MAJOR, 0))?;
            match object.call_method("__dlpack__", (), Some(&versioned)) {
                // Older than DLPack 1.0: it does not know the argument.
                Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
                    object.call_method("__dlpack__", (), Some(&arguments))?
                }
                other => other?,
            }
        };
        Self::from_capsule(&capsule).map(Some)
    }

    fn by_exchange_api(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let Ok(capsule) = object.get_type().getattr("__dlpack_c_exchange_api__") else {
            return Ok(None);
        };
        let Ok(capsule) = capsule.cast::<PyCapsule>() else {
            return Ok(None);
        };
        let pointer = capsule.pointer_checked(Some(EXCHANGE_API))?;
        // SAFETY: a capsule of this name holds a pointer to such a structure, which lives as long as the
        // process; its head is the same in all versions.
        let mut api = unsafe { pointer.cast::<ExchangeApi>().as_ref() };
        while api.version.major != MAJOR {
            // SAFETY: the structure says so: null, or another one of an earlier version.
            match unsafe { api.previous.as_ref() } {
                Some(previous) => api = previous,
                None => return Ok(None),
            }
        }
        let failed = || {
            PyErr::take(object.py())
                .unwrap_or_else(|| PyTypeError::new_err("it gives no DLPack tensor"))
        };
        // The managed form is the one that says whether it may be written.
        let (raw, readonly, owner) =
            match (api.managed_tensor_from_py_object, api.tensor_from_py_object) {
                (Some(get), _) => {
                    let mut managed = std::ptr::null_mut();
                    // SAFETY: a live object of the type that offers the function, attached, and a place for
                    // the answer.
                    if unsafe { get(object.as_ptr(), &raw mut managed) } != 0 || managed.is_null() {
                        return Err(failed());
                    }
                    let owner = Owner::Managed(managed);
                    // SAFETY: it was just handed over, and lives until `owner` is dropped.
                    let (raw, flags) = unsafe { ((*managed).tensor, (*managed).flags) };
                    (raw, flags & READ_ONLY != 0, owner)
                }
                (None, Some(get)) => {
                    let mut raw = Raw::EMPTY;
                    // SAFETY: as above.
                    if unsafe { get(object.as_ptr(), &raw mut raw) } != 0 {
                        return Err(failed());
                    }
                    (raw, false, Owner::Caller)
                }
                (None, None) => return Ok(None),
            };
        let mut stream = None;
        if let Some(current) = api.current_work_stream
            && raw.device.kind != Device::CPU
        {
            let mut handle = std::ptr::null_mut();
            // SAFETY: numbers, and a place for the answer.
            if unsafe { current(raw.device.kind, raw.device.id, &raw mut handle) } != 0 {
                return Err(failed());
            }
            stream = Some(handle.expose_provenance() as u64);
        }
        Ok(Some(Self {
            raw,
            readonly,
            stream,
            protocol: "dlpack C exchange API",
            owner,
        }))
    }

    fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let capsule = capsule.cast::<PyCapsule>()?;
        let named = NAMES
            .iter()
            .position(|(name, _)| capsule.is_valid_checked(Some(name)));
        let Some(named) = named else {
            return Err(PyTypeError::new_err(
                "__dlpack__ returned a capsule that is no unused DLPack tensor",
            ));
        };
        let (name, used) = NAMES[named];
        let pointer = capsule.pointer_checked(Some(name))?;
        // SAFETY: a capsule of these names holds such a structure; renaming it says that its deleter is now
        // ours to call. The new name is static.
        let (owner, raw, readonly, major) = unsafe {
            if ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) != 0 {
                return Err(PyErr::fetch(capsule.py()));
            }
            if named == 0 {
                let managed = pointer.cast::<Managed>().as_ptr();
                let owner = Owner::Managed(managed);
                let major = (*managed).version.major;
                // Of another layout, nothing but the head can be read.
                let (raw, flags) = if major == MAJOR {
                    ((*managed).tensor, (*managed).flags)
                } else {
                    (Raw::EMPTY, 0)
                };
                (owner, raw, flags & READ_ONLY != 0, major)
            } else {
                let managed = pointer.cast::<Legacy>().as_ptr();
                (Owner::Legacy(managed), (*managed).tensor, false, MAJOR)
            }
        };
        if major != MAJOR {
            return Err(PyTypeError::new_err(format!(
                "its DLPack version is {major}, of which the layout is not known here"
            )));
        }
        Ok(Self {
            raw,
            readonly,
            stream: None,
            protocol: "dlpack",
            owner,
        })
    }

    pub(crate) fn device(&self) -> Device {
        self.raw.device
    }

    pub(crate) fn dtype(&self) -> Type {
        self.raw.dtype
    }

    pub(crate) fn is_readonly(&self) -> bool {
        self.readonly
    }

    pub(crate) fn stream(&self) -> Option<u64> {
        self.stream
    }

    /// Address of the first element.
    pub(crate) fn address(&self) -> u64 {
        (self.raw.data.expose_provenance() as u64).wrapping_add(self.raw.byte_offset)
    }

    /// Number of elements; `None` if they do not lie one after the other, the last index first.
    pub(crate) fn contiguous_elements(&self) -> Option<u64> {
        let _held = &self.owner;
        let ndim = usize::try_from(self.raw.ndim).ok()?;
        if ndim == 0 {
            return Some(1);
        }
        // SAFETY: a tensor has `ndim` numbers here, for as long as it is held.
        let shape = unsafe { std::slice::from_raw_parts(self.raw.shape, ndim) };
        let strides = if self.raw.strides.is_null() {
            None
        } else {
            // SAFETY: as above.
            Some(unsafe { std::slice::from_raw_parts(self.raw.strides, ndim) })
        };
        let mut elements: u64 = 1;
        let mut compact = true;
        for axis in (0..ndim).rev() {
            let length = u64::try_from(shape[axis]).ok()?;
            if let Some(strides) = strides {
                compact &= length <= 1 || u64::try_from(strides[axis]) == Ok(elements);
            }
            elements = elements.checked_mul(length)?;
        }
        (compact || elements == 0).then_some(elements)
    }
}

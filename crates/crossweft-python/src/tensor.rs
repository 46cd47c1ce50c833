//! Memory of other libraries: what an object of theirs is, in bytes, elements and devices.
//!
//! Asked in this order: the C exchange API of DLPack, the buffer protocol, `__dlpack__`,
//! `__cuda_array_interface__`.

use crossweft_device::DataType;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::Buffer;
use crate::dlpack;
use crate::error::Exception;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Where the host's processors reach it.
    Host,
    /// On a CUDA device, if it is known which.
    Cuda(Option<u32>),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(ordinal)) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What any bytes are, if there are as many.
pub(crate) trait Number: sealed::Number {}
impl<T: sealed::Number> Number for T {}

mod sealed {
    pub(crate) trait Number {}
    impl Number for i32 {}
    impl Number for i64 {}
    impl Number for f32 {}
}

/// A contiguous tensor, held until this is dropped.
pub(crate) struct Tensor {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) dtype: DataType,
    pub(crate) place: Place,
    pub(crate) readonly: bool,
    /// The CUDA stream that its library works on now, or that it is ready on, where known.
    pub(crate) stream: Option<u64>,
    protocol: &'static str,
    _object: Py<PyAny>,
    _owner: Owner,
}

enum Owner {
    Object,
    Buffer(#[expect(dead_code, reason = "held")] Buffer),
    Dlpack(#[expect(dead_code, reason = "held")] dlpack::Tensor),
}

impl Tensor {
    /// What `object` is, called `what` in messages. `dtype` says what its elements are, where its own type
    /// says nothing (bytes) or has no word for it (16-bit integers that are bf16).
    pub(crate) fn new(
        object: &Bound<'_, PyAny>,
        what: &str,
        dtype: Option<DataType>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        let mut tensor = Self::find(object, what, stream)?;
        if let Some(dtype) = dtype {
            let (own, size) = (tensor.dtype, dtype.size());
            let is_plain = own == DataType::U8 || (own.size() == size && !own.is_float());
            if own != dtype && !is_plain {
                return Err(Exception::tensor(format!(
                    "the {what} has elements of {own}, but dtype says {dtype}"
                )));
            }
            if !tensor.bytes.is_multiple_of(size as u64) {
                return Err(Exception::tensor(format!(
                    "the {what} has {} bytes, which are no whole number of {dtype}",
                    tensor.bytes
                )));
            }
            tensor.dtype = dtype;
        }
        let size = tensor.dtype.size() as u64;
        // An empty one may lie anywhere.
        if tensor.bytes > 0 && !tensor.address.is_multiple_of(size) {
            return Err(Exception::tensor(format!(
                "the {what} lies at {:#x}, which is not aligned to its elements of {size} bytes; copy it",
                tensor.address
            )));
        }
        Ok(tensor)
    }

    /// Fails unless it may be written.
    pub(crate) fn writable(self, what: &str) -> PyResult<Self> {
        if self.readonly {
            return Err(Exception::tensor(format!(
                "the {what} is read-only; give one that may be written"
            )));
        }
        Ok(self)
    }

    /// Fails unless it is host memory.
    pub(crate) fn on_host(&self, what: &str) -> PyResult<()> {
        match self.place {
            Place::Host => Ok(()),
            place => Err(Exception::tensor(format!(
                "the {what} is on {place}, but ranks as threads compute on the CPU; copy it to the host, or \
                 use communicators of CUDA devices"
            ))),
        }
    }

    fn find(object: &Bound<'_, PyAny>, what: &str, stream: Option<u64>) -> PyResult<Self> {
        let by_c_api = object.get_type().hasattr("__dlpack_c_exchange_api__")?;
        if !by_c_api {
            match Buffer::new(object) {
                Ok(Some(buffer)) => return Self::from_buffer(object, what, buffer),
                Ok(None) => {}
                // An array of a type that the buffer protocol has no code for may still speak DLPack.
                Err(error) if !object.hasattr("__dlpack__")? => {
                    return Err(Exception::tensor(format!(
                        "the {what} must be contiguous memory: {error}"
                    )));
                }
                Err(_) => {}
            }
        }
        // By its C functions, torch would hand such a view out as what it is not.
        if by_c_api && object.hasattr("is_neg")? && object.call_method0("is_neg")?.is_truthy()? {
            return Err(Exception::tensor(format!(
                "the {what} is a negative view, whose memory has the opposite numbers; give tensor.resolve_neg()"
            )));
        }
        let device_stream = stream.map(legacy_default);
        match dlpack::Tensor::new(object, device_stream) {
            Ok(Some(tensor)) => return Self::from_dlpack(object, what, tensor),
            Ok(None) => {}
            Err(error) => {
                return Err(Exception::tensor(format!(
                    "the {what} gives no DLPack tensor: {error}"
                )));
            }
        }
        if object.hasattr("__cuda_array_interface__")? {
            return Self::from_cuda_array(object, what);
        }
        Err(Exception::tensor(format!(
            "the {what} is a {}, which is no tensor: it has none of DLPack, the buffer protocol and \
             __cuda_array_interface__",
            object.get_type().name()?
        )))
    }

    fn from_buffer(object: &Bound<'_, PyAny>, what: &str, buffer: Buffer) -> PyResult<Self> {
        let (format, size) = buffer.item();
        let dtype = of_format(&format, size).ok_or_else(|| {
            Exception::tensor(format!(
                "the {what} has items of format `{format}`, which is none of the element types"
            ))
        })?;
        Ok(Self {
            address: buffer.address(),
            bytes: buffer.bytes(),
            dtype,
            place: Place::Host,
            readonly: buffer.is_readonly(),
            stream: None,
            protocol: "buffer",
            _object: object.clone().unbind(),
            _owner: Owner::Buffer(buffer),
        })
    }

    fn from_dlpack(
        object: &Bound<'_, PyAny>,
        what: &str,
        tensor: dlpack::Tensor,
    ) -> PyResult<Self> {
        let device = tensor.device();
        let place = match device.kind {
            dlpack::Device::CPU | dlpack::Device::CUDA_HOST | dlpack::Device::CUDA_MANAGED => {
                Place::Host
            }
            dlpack::Device::CUDA => Place::Cuda(u32::try_from(device.id).ok()),
            kind => {
                return Err(Exception::tensor(format!(
                    "the {what} is on a device of DLPack's kind {kind}; those of the CPU and of CUDA \
                     can be used"
                )));
            }
        };
        let kind = tensor.dtype();
        let dtype = of_dlpack(kind).ok_or_else(|| {
            Exception::tensor(format!(
                "the {what} has elements of DLPack's type {} with {} bits and {} lanes, which is none \
                 of the element types",
                kind.code, kind.bits, kind.lanes
            ))
        })?;
        let elements = tensor.contiguous_elements().ok_or_else(|| {
            Exception::tensor(format!(
                "the {what} is not contiguous; make it so, or copy it"
            ))
        })?;
        Ok(Self {
            address: tensor.address(),
            bytes: elements * dtype.size() as u64,
            dtype,
            place,
            readonly: tensor.is_readonly(),
            stream: tensor.stream(),
            protocol: tensor.protocol,
            _object: object.clone().unbind(),
            _owner: Owner::Dlpack(tensor),
        })
    }

    fn from_cuda_array(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let interface = object.getattr("__cuda_array_interface__")?;
        let interface = interface.cast::<PyDict>()?;
        let field = |name: &str| {
            interface.get_item(name)?.ok_or_else(|| {
                Exception::tensor(format!(
                    "the {what} has a __cuda_array_interface__ without `{name}`"
                ))
            })
        };
        let typestr: String = field("typestr")?.extract()?;
        let format = typestr.trim_start_matches(['<', '|', '=']);
        let dtype = of_typestr(format).ok_or_else(|| {
            Exception::tensor(format!(
                "the {what} has elements of type `{typestr}`, which is none of the element types"
            ))
        })?;
        let shape: Vec<u64> = field("shape")?.extract()?;
        let strides: Option<Vec<u64>> = match interface.get_item("strides")? {
            Some(strides) => strides.extract()?,
            None => None,
        };
        let mut bytes = dtype.size() as u64;
        for (axis, &length) in shape.iter().enumerate().rev() {
            let stride = strides.as_ref().and_then(|strides| strides.get(axis));
            if length > 1 && stride.is_some_and(|&stride| stride != bytes) {
                return Err(Exception::tensor(format!("the {what} is not contiguous")));
            }
            bytes = bytes.saturating_mul(length);
        }
        let (address, readonly): (u64, bool) = field("data")?.extract()?;
        let stream: Option<u64> = match interface.get_item("stream")? {
            Some(stream) => stream.extract()?,
            None => None,
        };
        Ok(Self {
            address,
            bytes,
            dtype,
            place: Place::Cuda(None),
            readonly,
            // 1 stands for the legacy default stream, whose handle is 0.
            stream: stream.map(|stream| if stream == 1 { 0 } else { stream }),
            protocol: "cuda array interface",
            _object: object.clone().unbind(),
            _owner: Owner::Object,
        })
    }

    /// The bytes, to be read.
    ///
    /// # Safety
    /// Nobody may write them while the slice lives: part of what a collective call means.
    pub(crate) unsafe fn read(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        let data = std::ptr::with_exposed_provenance(self.address as usize);
        // SAFETY: the owner keeps that many bytes of host memory at this address; the caller's promise.
        unsafe { std::slice::from_raw_parts(data, self.bytes as usize) }
    }

    /// The bytes, to be written.
    ///
    /// # Safety
    /// As for [`read`](Self::read), and nobody may read them either.
    pub(crate) unsafe fn write(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        let data = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: as above; it may be written, which was asked before.
        unsafe { std::slice::from_raw_parts_mut(data, self.bytes as usize) }
    }

    /// The elements, to be written, of a tensor of f32.
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    pub(crate) unsafe fn write_f32(&mut self) -> &mut [f32] {
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.write() };
        // SAFETY: any four bytes are an f32. `new` has checked the alignment, so nothing is left over at the front.
        unsafe { bytes.align_to_mut::<f32>().1 }
    }

    /// The elements, to be read, of a tensor whose elements have that size.
    ///
    /// # Safety
    /// As for [`read`](Self::read).
    pub(crate) unsafe fn read_as<T: Number>(&self) -> &[T] {
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.read() };
        // SAFETY: any bytes are such a number. `new` has checked the alignment, so nothing is left over at the front.
        unsafe { bytes.align_to::<T>().1 }
    }

    /// The elements, to be written, of a tensor whose elements have that size.
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    pub(crate) unsafe fn write_as<T: Number>(&mut self) -> &mut [T] {
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.write() };
        // SAFETY: as above.
        unsafe { bytes.align_to_mut::<T>().1 }
    }

    /// Whether two share bytes.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.place == other.place
            && self.address < other.address + other.bytes
            && other.address < self.address + self.bytes
    }
}

/// A stream's handle as `__dlpack__` takes it: 1 for the legacy default stream.
fn legacy_default(stream: u64) -> u64 {
    stream.max(1)
}

fn of_format(format: &str, size: u64) -> Option<DataType> {
    let code = format.trim_start_matches(['@', '=', '<']);
    let (signed, float) = match code {
        "b" | "h" | "i" | "l" | "q" | "n" => (true, false),
        "B" | "H" | "I" | "L" | "Q" | "N" | "?" | "c" => (false, false),
        "e" | "f" | "d" => (true, true),
        _ => return None,
    };
    Some(match (float, signed, size) {
        (false, true, 1) => DataType::I8,
        (false, false, 1) => DataType::U8,
        (false, true, 2) => DataType::I16,
        (false, false, 2) => DataType::U16,
        (false, true, 4) => DataType::I32,
        (false, false, 4) => DataType::U32,
        (false, true, 8) => DataType::I64,
        (false, false, 8) => DataType::U64,
        (true, _, 2) => DataType::F16,
        (true, _, 4) => DataType::F32,
        (true, _, 8) => DataType::F64,
        _ => return None,
    })
}

fn of_typestr(typestr: &str) -> Option<DataType> {
    Some(match typestr {
        "i1" => DataType::I8,
        "u1" | "b1" => DataType::U8,
        "i2" => DataType::I16,
        "u2" => DataType::U16,
        "i4" => DataType::I32,
        "u4" => DataType::U32,
        "i8" => DataType::I64,
        "u8" => DataType::U64,
        "f2" => DataType::F16,
        "f4" => DataType::F32,
        "f8" => DataType::F64,
        _ => return None,
    })
}

/// `DLDataTypeCode`: 0 signed, 1 unsigned, 2 float, 4 bfloat, 6 bool, 10 float8_e4m3fn, 12 float8_e5m2.
fn of_dlpack(kind: dlpack::Type) -> Option<DataType> {
    if kind.lanes != 1 {
        return None;
    }
    Some(match (kind.code, kind.bits) {
        (0, 8) => DataType::I8,
        (1 | 6, 8) => DataType::U8,
        (0, 16) => DataType::I16,
        (1, 16) => DataType::U16,
        (0, 32) => DataType::I32,
        (1, 32) => DataType::U32,
        (0, 64) => DataType::I64,
        (1, 64) => DataType::U64,
        (2, 16) => DataType::F16,
        (2, 32) => DataType::F32,
        (2, 64) => DataType::F64,
        (4, 16) => DataType::Bf16,
        (10, 8) => DataType::F8E4M3,
        (12, 8) => DataType::F8E5M2,
        _ => return None,
    })
}

/// What an object is as a tensor: `address`, `nbytes`, `dtype`, `device`, `readonly`, `protocol`, `stream`.
#[pyfunction]
pub(crate) fn describe<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    let found = Tensor::new(tensor, "tensor", None, None)?;
    let words = PyDict::new(tensor.py());
    words.set_item("address", found.address)?;
    words.set_item("nbytes", found.bytes)?;
    words.set_item("dtype", found.dtype.name())?;
    words.set_item("device", found.place.to_string())?;
    words.set_item("readonly", found.readonly)?;
    words.set_item("protocol", found.protocol)?;
    words.set_item("stream", found.stream)?;
    Ok(words)
}

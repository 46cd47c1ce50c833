//! Tensors of a call: what they are, and where they lie.

use crossweft_moe::DataType;

use crate::config::Tensor;
use crate::nccl::Communicator;
use crate::pointer::{Address, Buffer, Given, In, Number};
use crate::status::Error;

/// `ncclDataType_t`, as far as it is used here.
pub(crate) const UINT8: i32 = 1;
pub(crate) const INT32: i32 = 2;
pub(crate) const INT64: i32 = 4;
pub(crate) const FLOAT16: i32 = 6;
pub(crate) const FLOAT32: i32 = 7;
pub(crate) const BFLOAT16: i32 = 9;
pub(crate) const FLOAT8E4M3: i32 = 10;

/// Bytes of an element.
const BYTES: [usize; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];
/// More than any tensor here has.
const MOST_DIMENSIONS: u32 = 8;

/// The type of tokens that are not quantised.
pub(crate) fn token_type(code: i32) -> Option<DataType> {
    match code {
        FLOAT16 => Some(DataType::F16),
        FLOAT32 => Some(DataType::F32),
        BFLOAT16 => Some(DataType::Bf16),
        _ => None,
    }
}

/// Whether it is a type at all.
pub(crate) fn is_type(code: i32) -> bool {
    usize::try_from(code).is_ok_and(|code| code < BYTES.len())
}

/// A tensor.
#[derive(Clone, Debug)]
pub(crate) struct Described {
    name: &'static str,
    pub(crate) datatype: i32,
    pub(crate) sizes: Vec<usize>,
    address: u64,
}

impl Described {
    /// None for NULL.
    pub(crate) fn read(
        name: &'static str,
        tensor: &Given<Tensor>,
        comm: &Communicator,
    ) -> Result<Option<Self>, Error> {
        let Some(tensor) = tensor.read()? else {
            return Ok(None);
        };
        let (ndim, datatype) = (tensor.ndim, tensor.datatype);
        if ndim == 0 || ndim > MOST_DIMENSIONS || !is_type(datatype) {
            return Err(Error::argument(format!(
                "{name} has {ndim} dimensions and type {datatype}"
            )));
        }
        let sizes = In::at(tensor.sizes).read(&format!("the sizes of {name}"), ndim as usize)?;
        let address = match (tensor.data, tensor.window) {
            (0, window) if window != 0 => {
                let Address(begin) = comm.window(Address(window))?;
                begin.wrapping_add(tensor.window_offset)
            }
            (data, _) => data,
        };
        Ok(Some(Self {
            name,
            datatype,
            sizes,
            address,
        }))
    }

    /// The same of a structure's field.
    pub(crate) fn field(
        name: &'static str,
        address: u64,
        comm: &Communicator,
    ) -> Result<Option<Self>, Error> {
        Self::read(name, &Given::at(address), comm)
    }

    pub(crate) fn required(
        name: &'static str,
        address: u64,
        comm: &Communicator,
    ) -> Result<Self, Error> {
        Self::field(name, address, comm)?
            .ok_or_else(|| Error::argument(format!("{name} is NULL; it is required here")))
    }

    /// One that must not be there.
    pub(crate) fn absent(name: &str, address: u64, why: &str) -> Result<(), Error> {
        match address {
            0 => Ok(()),
            _ => Err(Error::argument(format!("{name} must be NULL: {why}"))),
        }
    }

    /// It must have these sizes.
    pub(crate) fn expect(&self, sizes: &[usize]) -> Result<(), Error> {
        match self.sizes == sizes {
            true => Ok(()),
            false => Err(Error::argument(format!(
                "{} has sizes {:?}; they must be {sizes:?}",
                self.name, self.sizes
            ))),
        }
    }

    /// It must be a matrix; its rows and columns.
    pub(crate) fn matrix(&self) -> Result<(usize, usize), Error> {
        match self.sizes[..] {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(Error::argument(format!(
                "{} has {} dimensions; it must have 2",
                self.name,
                self.sizes.len()
            ))),
        }
    }

    /// It must have this type.
    pub(crate) fn expect_type(&self, code: i32) -> Result<(), Error> {
        match self.datatype == code {
            true => Ok(()),
            false => Err(Error::argument(format!(
                "{} has type {}; it must be {code}",
                self.name, self.datatype
            ))),
        }
    }

    fn count(&self) -> Result<usize, Error> {
        let count = self
            .sizes
            .iter()
            .try_fold(1_usize, |n, &size| n.checked_mul(size));
        count.ok_or_else(|| {
            Error::argument(format!(
                "{} has sizes {:?}, too many elements",
                self.name, self.sizes
            ))
        })
    }

    /// Its memory.
    pub(crate) fn bytes(&self) -> Result<Buffer<u8>, Error> {
        let each = BYTES.get(self.datatype as usize).copied().unwrap_or(1);
        let bytes = self.count()?.checked_mul(each);
        Buffer::new(self.name, self.address, bytes.unwrap_or(usize::MAX))
    }

    fn numbers<T: Number>(&self) -> Result<Buffer<T>, Error> {
        Buffer::new(self.name, self.address, self.count()?)
    }

    /// Its numbers, which must be f32.
    pub(crate) fn floats(&self) -> Result<Buffer<f32>, Error> {
        self.expect_type(FLOAT32)?;
        self.numbers()
    }

    /// Its numbers, which must be i32 or i64.
    pub(crate) fn integers(&self) -> Result<Integers, Error> {
        match self.datatype {
            INT32 => Ok(Integers::I32(self.numbers()?)),
            INT64 => Ok(Integers::I64(self.numbers()?)),
            other => Err(Error::argument(format!(
                "{} has type {other}; it must be ncclInt32 or ncclInt64",
                self.name
            ))),
        }
    }
}

/// Numbers of either width.
#[derive(Debug)]
pub(crate) enum Integers {
    I32(Buffer<i32>),
    I64(Buffer<i64>),
}

impl Integers {
    /// All of them.
    pub(crate) fn to_vec(&self) -> Vec<i64> {
        match self {
            Self::I32(numbers) => numbers.as_slice().iter().map(|&n| n.into()).collect(),
            Self::I64(numbers) => numbers.as_slice().to_vec(),
        }
    }

    /// Writes them.
    pub(crate) fn set(&mut self, values: impl IntoIterator<Item = u32>) {
        match self {
            Self::I32(numbers) => {
                for (place, value) in numbers.as_slice_mut().iter_mut().zip(values) {
                    *place = value.cast_signed();
                }
            }
            Self::I64(numbers) => {
                for (place, value) in numbers.as_slice_mut().iter_mut().zip(values) {
                    *place = value.into();
                }
            }
        }
    }

    /// Adds to those that are not negative.
    pub(crate) fn shift(&mut self, by: u32) {
        match self {
            Self::I32(numbers) => {
                for number in numbers.as_slice_mut().iter_mut().filter(|n| **n >= 0) {
                    *number += by.cast_signed();
                }
            }
            Self::I64(numbers) => {
                for number in numbers.as_slice_mut().iter_mut().filter(|n| **n >= 0) {
                    *number += i64::from(by);
                }
            }
        }
    }

    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        match self {
            Self::I32(numbers) => numbers.range(),
            Self::I64(numbers) => numbers.range(),
        }
    }
}

//! What C passes: pointers with what their type promises.
//!
//! Values of these types only come from callers of the exported functions. Each of those promises what NCCL EP's
//! interface asks for: a pointer is null, or valid for what it is passed for until the call has ended (buffers of a staged
//! call: until it is completed). That promise is what every `unsafe` block here relies on; nothing else in the crate makes
//! such values, for the fields are private.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::{MaybeUninit, size_of};
use std::ops::Range;

use crate::status::Error;

fn null(name: &str) -> Error {
    Error::argument(format!("{name} is NULL"))
}

/// An address, or a handle, that is only compared and handed on. C passes a pointer, which is passed as a number of
/// its size is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub(crate) struct Address(pub(crate) u64);

impl Address {
    pub(crate) const NULL: Self = Self(0);
}

/// A place for a result.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Refuses a null pointer, before anything else is done.
    pub(crate) fn check(&self, name: &str) -> Result<(), Error> {
        match self.0.is_null() {
            true => Err(null(name)),
            false => Ok(()),
        }
    }

    /// Writes the result.
    pub(crate) fn set(&self, name: &str, value: T) -> Result<(), Error> {
        self.set_all(name, [value])
    }

    /// Writes results one after the other, for which the caller promises room.
    pub(crate) fn set_all(
        &self,
        name: &str,
        values: impl IntoIterator<Item = T>,
    ) -> Result<(), Error> {
        self.check(name)?;
        for (index, value) in values.into_iter().enumerate() {
            // SAFETY: not null, so the caller promises room for so many, aligned as C's rules say.
            unsafe { self.0.add(index).write(value) };
        }
        Ok(())
    }
}

/// An array of numbers.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The first `count` values.
    pub(crate) fn read(&self, name: &str, count: usize) -> Result<Vec<T>, Error> {
        if self.0.is_null() {
            return Err(null(name));
        }
        // SAFETY: not null, so the caller promises `count` values, which are plain numbers.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) }.to_vec())
    }

    /// The same, at an address that a structure has, which the structure's caller promises for.
    pub(crate) fn at(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance(address as usize))
    }
}

/// A structure of C's that begins with its size and a magic number.
///
/// # Safety
/// It is `repr(C)`, any bytes are a value of it, and it has no padding.
pub(crate) unsafe trait Structure: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Bytes of its first version, which every caller's has at least.
    const LEAST: usize;
    /// Its second member.
    const MAGIC: u32;
}

/// A structure that callers pass; those of other versions have more or less of it.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Given<T>(*const T);

impl<T: Structure> Given<T> {
    /// The same, at an address that another structure has, which that one's caller promises for.
    pub(crate) fn at(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance(address as usize))
    }

    /// A copy, in which fields that the caller's version lacks are 0; none for NULL.
    pub(crate) fn read(&self) -> Result<Option<T>, Error> {
        if self.0.is_null() {
            return Ok(None);
        }
        let name = T::NAME;
        let words = self.0.cast::<u32>();
        // SAFETY: not null, so the caller promises a structure that begins with these two.
        let (size, magic) = unsafe { (words.read_unaligned(), words.add(1).read_unaligned()) };
        if magic != T::MAGIC {
            return Err(Error::argument(format!(
                "{name} has magic {magic:#x}, not {:#x}: initialise it with its _INIT macro",
                T::MAGIC
            )));
        }
        if (size as usize) < T::LEAST {
            return Err(Error::argument(format!(
                "{name} says that it has {size} bytes; there are {} at least",
                T::LEAST
            )));
        }
        let mut value = MaybeUninit::<T>::zeroed();
        let count = size_of::<T>().min(size as usize);
        // SAFETY: the caller's structure has `size` bytes, and any bytes are a value.
        Ok(Some(unsafe {
            let to = value.as_mut_ptr().cast::<u8>();
            std::ptr::copy_nonoverlapping(self.0.cast::<u8>(), to, count);
            value.assume_init()
        }))
    }

    /// The same of one that must be there.
    pub(crate) fn required(&self) -> Result<T, Error> {
        self.read()?
            .ok_or_else(|| Error::argument(format!("{} is NULL", T::NAME)))
    }
}

/// Numbers that buffers hold.
///
/// # Safety
/// Any bytes are a value.
pub(crate) unsafe trait Number: Copy {}

// SAFETY: any bytes are one.
unsafe impl Number for u8 {}
// SAFETY: as above.
unsafe impl Number for i32 {}
// SAFETY: as above.
unsafe impl Number for i64 {}
// SAFETY: as above.
unsafe impl Number for f32 {}

/// A caller's buffer of numbers.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    address: u64,
    count: usize,
    kind: PhantomData<T>,
}

impl<T: Number> Buffer<T> {
    /// `count` numbers at an address for which the caller promises.
    pub(crate) fn new(name: &str, address: u64, count: usize) -> Result<Self, Error> {
        let bytes = count.checked_mul(size_of::<T>());
        let bytes = bytes.filter(|bytes| isize::try_from(*bytes).is_ok());
        let end = bytes.and_then(|bytes| address.checked_add(bytes as u64));
        if end.is_none() {
            return Err(Error::argument(format!(
                "{name} has {count} elements, which is more than can be addressed"
            )));
        }
        if address == 0 && count > 0 {
            return Err(Error::argument(format!(
                "{name} has no memory: data is NULL"
            )));
        }
        if !address.is_multiple_of(align_of::<T>() as u64) {
            return Err(Error::argument(format!(
                "{name} is at {address:#x}; it must be a multiple of {}",
                align_of::<T>()
            )));
        }
        Ok(Self {
            address,
            count,
            kind: PhantomData,
        })
    }

    /// Its addresses.
    pub(crate) fn range(&self) -> Range<u64> {
        self.address..self.address + (self.count * size_of::<T>()) as u64
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        if self.count == 0 {
            return &[];
        }
        let address = std::ptr::with_exposed_provenance(self.address as usize);
        // SAFETY: a caller's buffer of so many numbers, aligned, valid until its call is done; calls do not outlive
        // that. Whoever changes it meanwhile gets wrong numbers, as with any collective.
        unsafe { std::slice::from_raw_parts(address, self.count) }
    }

    pub(crate) fn as_slice_mut(&mut self) -> &mut [T] {
        if self.count == 0 {
            return &mut [];
        }
        let address = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: as above; that no other buffer of the call shares bytes with it was checked (`apart`).
        unsafe { std::slice::from_raw_parts_mut(address, self.count) }
    }
}

/// What a call writes must share no bytes with anything else of the call.
pub(crate) fn apart(
    written: &[(&str, Range<u64>)],
    read: &[(&str, Range<u64>)],
) -> Result<(), Error> {
    for (index, (name, range)) in written.iter().enumerate() {
        let others = written[index + 1..].iter().chain(read);
        for (other, theirs) in others {
            let both = range.start.max(theirs.start)..range.end.min(theirs.end);
            if both.start < both.end {
                return Err(Error::argument(format!(
                    "{name} and {other} share memory; give each its own"
                )));
            }
        }
    }
    Ok(())
}

/// A value on the heap that C holds a pointer to, and may change; `make` is told where it will be.
pub(crate) fn give<T>(make: impl FnOnce(Address) -> T) -> Address {
    let place = Box::into_raw(Box::<T>::new_uninit()).cast::<T>();
    let address = Address(place.expose_provenance() as u64);
    // SAFETY: room for a `T`, of which nobody knows yet. If `make` panics it is leaked.
    unsafe { place.write(make(address)) };
    address
}

/// Frees what [`give`] gave.
///
/// # Safety
/// `address` is what [`give`] returned for a `T`, it was not freed before, and nobody uses it any more.
pub(crate) unsafe fn take<T>(address: Address) {
    let pointer: *mut T = std::ptr::with_exposed_provenance_mut(address.0 as usize);
    // SAFETY: the caller vouches for it.
    drop(unsafe { Box::from_raw(pointer) });
}

//! What C passes: pointers with what their type promises.
//!
//! Values of these types only come from callers of the exported functions. Each of those promises
//! what NCCL's interface asks for: a pointer is null, or valid for what it is passed for until the call
//! has ended (buffers: until the communicator is done with the call). That promise is what every
//! `unsafe` block here relies on; nothing else in the crate makes such values, for the fields are private.
#![allow(unsafe_code)]
#![allow(
    clippy::cast_possible_truncation,
    reason = "addresses have 64 bits (checked in crossweft-device)"
)]

use std::ffi::{CStr, c_char, c_void};
use std::mem::size_of;

use crossweft_collective::Scalar;
use crossweft_executor::Region;

use crate::status::Error;

fn null(name: &str) -> Error {
    Error::argument(format!("{name} is NULL"))
}

/// A place for a result.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Refuses a null pointer, before anything else is done.
    pub(crate) fn check(&self, name: &str) -> Result<(), Error> {
        if self.0.is_null() {
            return Err(null(name));
        }
        Ok(())
    }

    /// Writes the result.
    pub(crate) fn set(&self, name: &str, value: T) -> Result<(), Error> {
        self.check(name)?;
        // SAFETY: not null, so the caller promises room for a `T`. It may be unaligned only if the
        // caller breaks C's own rules.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// The `index`-th place from this one on, of an array that the caller promises has so many.
    pub(crate) fn at(&self, index: usize) -> Self {
        Self(self.0.wrapping_add(index))
    }
}

/// An array of values that are copied.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// The first `count` values.
    pub(crate) fn read(&self, name: &str, count: usize) -> Result<Vec<T>, Error> {
        if self.0.is_null() {
            return Err(null(name));
        }
        // SAFETY: not null, so the caller promises `count` values, which are plain numbers or bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) }.to_vec())
    }
}

/// A structure that begins with its size, of which callers of other versions have more or less.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Versioned(*mut c_void);

impl Versioned {
    /// What a caller passes who has none.
    pub(crate) fn null() -> Self {
        Self(std::ptr::null_mut())
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Copies what the caller's structure has over the beginning of `fields`, and returns its size.
    pub(crate) fn read(&self, name: &str, fields: &mut [u8]) -> Result<usize, Error> {
        if self.0.is_null() {
            return Err(null(name));
        }
        // SAFETY: not null, so the caller promises a structure whose first member is its size.
        let size = unsafe { self.0.cast::<usize>().read_unaligned() };
        let copied = size.min(fields.len());
        // SAFETY: the structure has `size` bytes.
        let bytes = unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), copied) };
        fields[..copied].copy_from_slice(bytes);
        Ok(size)
    }

    /// Writes `fields` from byte `from` on, as far as the caller's structure, of `size` bytes as it
    /// said, reaches.
    pub(crate) fn write(&self, size: usize, from: usize, fields: &[u8]) {
        let count = fields.len().min(size.saturating_sub(from));
        if self.0.is_null() || count == 0 {
            return;
        }
        // SAFETY: `read` was given this size, and bytes `from..from + count` lie below it.
        unsafe {
            let to = self.0.cast::<u8>().add(from);
            std::ptr::copy_nonoverlapping(fields.as_ptr(), to, count);
        }
    }
}

/// A C string, or NULL.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// A string whose address a structure has, which the structure's caller promises for.
    pub(crate) fn of_field(bytes: [u8; size_of::<usize>()]) -> Self {
        Self(std::ptr::with_exposed_provenance(usize::from_ne_bytes(
            bytes,
        )))
    }

    /// The text; what is not UTF-8 is replaced. `None` for NULL.
    pub(crate) fn read(self) -> Option<String> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not null, so the caller promises a string with a zero at its end.
        let text = unsafe { CStr::from_ptr(self.0) };
        Some(text.to_string_lossy().into_owned())
    }
}

/// An address, or a handle, that is only compared and handed on. C passes a pointer, which is passed as a
/// number of its size is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Address(u64);

impl Address {
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    pub(crate) fn of(number: u64) -> Self {
        Self(number)
    }
}

/// A buffer to read from, of a length that the call says.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct SendBuffer(*const c_void);

/// A buffer to write to, of a length that the call says.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct RecvBuffer(*mut c_void);

impl SendBuffer {
    pub(crate) fn address(self) -> u64 {
        self.0.expose_provenance() as u64
    }

    /// The same buffer, which the caller also gave to write to: part of it is the output.
    pub(crate) fn as_recv(self) -> RecvBuffer {
        RecvBuffer(self.0.cast_mut())
    }

    pub(crate) fn bytes(self, name: &str, bytes: usize) -> Result<Source, Error> {
        Ok(Source(range(self.address(), name, bytes)?))
    }
}

impl RecvBuffer {
    pub(crate) fn address(self) -> u64 {
        self.0.expose_provenance() as u64
    }

    /// The same buffer, to read from.
    pub(crate) fn as_send(self) -> SendBuffer {
        SendBuffer(self.0)
    }

    pub(crate) fn bytes(self, name: &str, bytes: usize) -> Result<Destination, Error> {
        Ok(Destination(range(self.address(), name, bytes)?))
    }
}

/// A scalar of a type that the call says.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct ScalarPointer(*const c_void);

/// What a rank's input is multiplied by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Factor {
    /// This element, in the low bits.
    Bits(u64),
    /// The element that lies there when a call runs.
    Later(Place),
}

/// An address that the caller keeps valid for as long as calls read it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place(u64);

impl ScalarPointer {
    /// The element of `bytes` bytes that is there now, or (`later`) whatever will be there.
    pub(crate) fn factor(self, bytes: usize, later: bool) -> Result<Factor, Error> {
        if self.0.is_null() {
            return Err(null("scalar"));
        }
        let place = Place(self.0.expose_provenance() as u64);
        Ok(if later {
            Factor::Later(place)
        } else {
            Factor::Bits(place.read(bytes))
        })
    }
}

impl Place {
    fn read(self, bytes: usize) -> u64 {
        let address: *const u8 = std::ptr::with_exposed_provenance(self.0 as usize);
        let mut bits = [0; 8];
        let count = bytes.min(bits.len());
        // SAFETY: the caller promises an element of so many bytes there.
        unsafe { std::ptr::copy_nonoverlapping(address, bits.as_mut_ptr(), count) };
        u64::from_le_bytes(bits)
    }
}

impl Factor {
    /// For calls on a GPU, which itself reads an element that is given later.
    pub(crate) fn scalar_on_device(self) -> Scalar {
        match self {
            Self::Bits(bits) => Scalar::from_bits(bits),
            // SAFETY: the caller promises an element there that the device reaches, for as long as calls read it.
            Self::Later(place) => unsafe { Scalar::at(place.0) },
        }
    }

    /// The bits of an element of `bytes` bytes, in host memory if it is given later.
    pub(crate) fn bits(self, bytes: usize) -> u64 {
        match self {
            Self::Bits(bits) => bits,
            Self::Later(place) => place.read(bytes),
        }
    }
}

fn range(address: u64, name: &str, bytes: usize) -> Result<Range, Error> {
    if bytes == 0 {
        return Ok(Range { address, bytes });
    }
    if address == 0 {
        return Err(null(name));
    }
    if isize::try_from(bytes).is_err() || address.checked_add(bytes as u64).is_none() {
        return Err(Error::argument(format!(
            "{name} has {bytes} bytes, which is more than can be addressed"
        )));
    }
    Ok(Range { address, bytes })
}

#[derive(Clone, Copy, Debug)]
struct Range {
    address: u64,
    bytes: usize,
}

impl Range {
    fn region(self) -> Region {
        // SAFETY: a caller's buffer of so many bytes that the device reaches, and that is the call's until its stream has
        // come to an end of it.
        unsafe { Region::new(self.address, self.bytes as u64) }
    }
}

/// Bytes that a call reads.
#[derive(Debug)]
pub(crate) struct Source(Range);

/// Bytes that a call writes.
#[derive(Debug)]
pub(crate) struct Destination(Range);

impl Source {
    /// No bytes: of a buffer that a rank has no use for.
    pub(crate) fn empty() -> Self {
        let (address, bytes) = (0, 0);
        Self(Range { address, bytes })
    }

    /// Its first byte and the one after its last.
    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        self.0.address..self.0.address + self.0.bytes as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.0.bytes
    }

    /// On a GPU.
    pub(crate) fn region(&self) -> Region {
        self.0.region()
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        if self.0.bytes == 0 {
            return &[];
        }
        let address = std::ptr::with_exposed_provenance(self.0.address as usize);
        // SAFETY: a caller's buffer of so many bytes, valid until its call is done; calls do not
        // outlive that. Whoever changes it meanwhile gets wrong numbers, as with any collective.
        unsafe { std::slice::from_raw_parts(address, self.0.bytes) }
    }
}

impl Destination {
    /// No bytes: of a buffer that a rank has no use for.
    pub(crate) fn empty() -> Self {
        let (address, bytes) = (0, 0);
        Self(Range { address, bytes })
    }

    pub(crate) fn len(&self) -> usize {
        self.0.bytes
    }

    /// On a GPU.
    pub(crate) fn region(&self) -> Region {
        self.0.region()
    }

    pub(crate) fn as_slice_mut(&mut self) -> &mut [u8] {
        if self.0.bytes == 0 {
            return &mut [];
        }
        let address = std::ptr::with_exposed_provenance_mut(self.0.address as usize);
        // SAFETY: as for a source; that it does not overlap one was checked where both were given.
        unsafe { std::slice::from_raw_parts_mut(address, self.0.bytes) }
    }

    /// Its first byte and the one after its last.
    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        self.0.address..self.0.address + self.0.bytes as u64
    }

    /// Whether it shares bytes with `source`.
    pub(crate) fn overlaps(&self, source: &Source) -> bool {
        let (ours, theirs) = (self.range(), source.range());
        !ours.is_empty() && !theirs.is_empty() && ours.start < theirs.end && theirs.start < ours.end
    }
}

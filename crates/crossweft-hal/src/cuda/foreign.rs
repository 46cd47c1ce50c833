//! Memory that others allocated, PyTorch above all: what it is, and how other processes map it.
//!
//! * `cuMemAlloc` (`cudaMalloc`, PyTorch's default): a legacy IPC handle of the whole allocation
//!   and an offset into it.
//! * Mapped ranges (`cuMemCreate`; PyTorch's expandable segments): a handle of each chunk that the
//!   buffer touches, mapped side by side on the other end.
//! * Memory pools (`cudaMallocAsync`), managed and host memory: refused, with what to do instead.

use std::ffi::c_uint;
use std::sync::Arc;

use super::context::Context;
use super::device::Device;
use super::error::CudaError;
use super::memory::{Allocation, Range, ShareHandle};
use super::sys::{self, Opaque64, PointerAttribute};

/// What kind of memory an address is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PointerKind {
    /// A device's.
    Device,
    /// Host memory that the driver pinned.
    Pinned,
    /// Memory that the driver moves between host and device.
    Managed,
    /// Nothing that the driver knows: plain host memory, or no memory at all.
    Unknown,
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PointerInfo {
    /// What kind of memory it is in.
    pub kind: PointerKind,
    /// The device, for a device's memory.
    pub device: Option<u32>,
    /// First address of the allocation, or of the mapped chunk, that it lies in; 0 if unknown.
    pub base: u64,
    /// Bytes of that.
    pub bytes: u64,
    /// Whether it is mapped from an allocation with a handle (virtual memory management).
    pub is_mapped: bool,
    /// Whether it was allocated so that it can be shared by legacy IPC.
    pub legacy_ipc: bool,
    /// Whether it comes from a memory pool.
    pub in_pool: bool,
}

impl Context {
    /// What the driver knows of an address. Any number may be asked about.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn pointer_info(self: &Arc<Self>, address: u64) -> Result<PointerInfo, CudaError> {
        use PointerAttribute as A;
        const ASKED: [PointerAttribute; 7] = [
            A::MemoryType,
            A::Managed,
            A::Device,
            A::LegacyIpc,
            A::RangeStart,
            A::RangeBytes,
            A::Pool,
        ];
        // Answers are 1, 4 or 8 bytes, little-endian as all machines with these devices are.
        let mut answers = [0_u64; ASKED.len()];
        let asked = self.run(|driver| {
            let mut places = answers
                .each_mut()
                .map(|place| std::ptr::from_mut(place).cast());
            // SAFETY: a place for each answer, none of which is longer than 8 bytes.
            unsafe {
                driver.cuPointerGetAttributes(
                    ASKED.len() as c_uint,
                    ASKED.as_ptr(),
                    places.as_mut_ptr(),
                    address,
                )
            }
        });
        match asked {
            Ok(()) => {}
            // Most drivers answer with zeros for memory that is none of theirs; some refuse.
            Err(error)
                if error.is_code(sys::INVALID_VALUE) || error.is_code(sys::INVALID_CONTEXT) =>
            {
                answers = [0; ASKED.len()];
            }
            Err(error) => return Err(error),
        }
        let [memory, managed, device, legacy_ipc, base, bytes, pool] = answers;
        let low = |answer: u64| answer as u32;
        let kind = match low(memory) {
            _ if low(managed) & 0xff != 0 => PointerKind::Managed,
            sys::MEMORY_DEVICE => PointerKind::Device,
            sys::MEMORY_HOST => PointerKind::Pinned,
            _ => PointerKind::Unknown,
        };
        let mut info = PointerInfo {
            kind,
            device: (kind == PointerKind::Device).then_some(low(device)),
            base,
            bytes,
            is_mapped: false,
            legacy_ipc: low(legacy_ipc) & 0xff != 0,
            in_pool: pool != 0,
        };
        if kind == PointerKind::Device {
            info.is_mapped = Allocation::at(self, address, 0).is_ok();
            // The attributes may speak of the whole reserved range; this speaks of one chunk.
            (info.base, info.bytes) = self.chunk(address)?;
        }
        Ok(info)
    }

    /// The allocation, or the mapped chunk, that an address lies in: its start and bytes.
    fn chunk(&self, address: u64) -> Result<(u64, u64), CudaError> {
        let (mut base, mut bytes) = (0, 0);
        self.run(|driver| {
            // SAFETY: valid places for the answers.
            unsafe { driver.cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) }
        })?;
        Ok((base, bytes as u64))
    }
}

/// What another process needs to map a buffer: pieces side by side, and where in them it lies.
#[derive(Debug)]
pub struct ForeignExport {
    /// Handle and bytes of each piece, in the order of their addresses.
    pub pieces: Vec<(ShareHandle, u64)>,
    /// Offset of the buffer from the start of the first piece.
    pub offset: u64,
    /// Bytes of the buffer.
    pub bytes: u64,
}

impl ForeignExport {
    /// Makes somebody else's buffer shareable, all of it. It must stay allocated for as long as
    /// others have it mapped; a legacy IPC handle shares the whole allocation around it.
    ///
    /// # Errors
    /// [`CudaError::NotShareable`] with what to do instead; [`CudaError::Call`].
    pub fn new(context: &Arc<Context>, address: u64, bytes: u64) -> Result<Self, CudaError> {
        let refused = |reason: &str| CudaError::NotShareable {
            address,
            what: "exported",
            reason: reason.to_owned(),
        };
        let end = address.checked_add(bytes).filter(|_| bytes > 0);
        let end = end.ok_or_else(|| refused("it is empty or goes beyond all addresses"))?;
        let info = context.pointer_info(address)?;
        match info.kind {
            PointerKind::Device => {}
            PointerKind::Managed => {
                return Err(refused(
                    "it is managed memory: allocate it with cudaMalloc, or let it be staged",
                ));
            }
            PointerKind::Pinned | PointerKind::Unknown => {
                return Err(refused("it is not a device's memory: let it be staged"));
            }
        }
        if info.is_mapped && !info.legacy_ipc {
            return Self::mapped(context, address, end);
        }
        if info.in_pool {
            return Err(refused(
                "it comes from a memory pool (cudaMallocAsync): use PyTorch's native allocator \
                 (backend:native), or let it be staged",
            ));
        }
        if end > info.base + info.bytes {
            return Err(refused("it goes beyond its allocation"));
        }
        let mut handle = Opaque64([0; 64]);
        context
            .run(|driver| {
                // SAFETY: a valid place for the answer.
                unsafe { driver.cuIpcGetMemHandle(&raw mut handle, info.base) }
            })
            .map_err(|error| match error {
                lost if lost.is_context_lost() => lost,
                other => refused(&format!("the driver gives no IPC handle for it ({other})")),
            })?;
        Ok(Self {
            pieces: vec![(ShareHandle::LegacyIpc(handle.0), info.bytes)],
            offset: address - info.base,
            bytes,
        })
    }

    fn mapped(context: &Arc<Context>, address: u64, end: u64) -> Result<Self, CudaError> {
        let refused = |at: u64, reason: &str| CudaError::NotShareable {
            address: at,
            what: "exported",
            reason: reason.to_owned(),
        };
        let mut pieces = Vec::new();
        let (start, _) = context.chunk(address)?;
        let mut at = start;
        while at < end {
            let (base, length) = context.chunk(at)?;
            if base != at || length == 0 {
                return Err(refused(at, "its chunks do not follow one another"));
            }
            let chunk = Allocation::at(context, at, length)?;
            let kinds = chunk.handle_types()?;
            let handle = if kinds & sys::HANDLE_FD != 0 {
                ShareHandle::Fd(chunk.export_fd()?)
            } else if kinds & sys::HANDLE_FABRIC != 0 {
                ShareHandle::Fabric(chunk.export_fabric()?)
            } else {
                return Err(refused(
                    at,
                    "it was imported, or allocated without asking for a handle: only who allocated \
                     memory can export it, and only as shareable; or let it be staged",
                ));
            };
            pieces.push((handle, length));
            at = base + length;
        }
        Ok(Self {
            pieces,
            offset: address - start,
            bytes: end - address,
        })
    }
}

/// Somebody else's buffer of another process, mapped here. Unmapped when dropped; no kernel or copy
/// may be using it then.
#[derive(Debug)]
pub struct ForeignMemory {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
    mapping: Mapping,
}

#[derive(Debug)]
enum Mapping {
    /// In the order of dropping: unmapped, then released.
    Range {
        _range: Range,
        _pieces: Vec<Allocation>,
    },
    LegacyIpc {
        base: u64,
    },
}

impl ForeignMemory {
    /// Maps what another process [exported](ForeignExport::new). The context's device and, except
    /// for legacy IPC, `peers` reach it. A legacy IPC handle cannot be mapped by the process that
    /// it came from, and by another only once at a time.
    ///
    /// # Errors
    /// [`CudaError::NotShareable`] if the parts do not fit together; [`CudaError::Call`].
    pub fn import(
        context: &Arc<Context>,
        export: ForeignExport,
        peers: &[Device],
    ) -> Result<Self, CudaError> {
        let ForeignExport {
            mut pieces,
            offset,
            bytes,
        } = export;
        let invalid = |reason: &str| CudaError::NotShareable {
            address: 0,
            what: "imported",
            reason: reason.to_owned(),
        };
        let total = pieces
            .iter()
            .try_fold(0_u64, |total, (_, bytes)| total.checked_add(*bytes));
        let end = offset.checked_add(bytes);
        if bytes == 0 || end.is_none() || end > total {
            return Err(invalid("the buffer does not lie in its pieces"));
        }
        let total = total.unwrap_or(0);
        if let [(ShareHandle::LegacyIpc(handle), _)] = pieces[..] {
            let mut base = 0;
            context.run(|driver| {
                let flags = sys::IPC_LAZY_PEER_ACCESS;
                // SAFETY: a valid place for the answer; any 64 bytes are a handle or refused.
                unsafe { driver.cuIpcOpenMemHandle_v2(&raw mut base, Opaque64(handle), flags) }
            })?;
            return Ok(Self {
                context: Arc::clone(context),
                address: base + offset,
                bytes,
                mapping: Mapping::LegacyIpc { base },
            });
        }
        let pieces: Vec<_> = pieces
            .drain(..)
            .map(|(handle, bytes)| Allocation::import(context, handle, bytes))
            .collect::<Result<_, _>>()?;
        let mut range = Range::reserve(context, total)?;
        for piece in &pieces {
            range.map(piece)?;
        }
        range.allow(peers)?;
        Ok(Self {
            context: Arc::clone(context),
            address: range.address + offset,
            bytes,
            mapping: Mapping::Range {
                _range: range,
                _pieces: pieces,
            },
        })
    }

    /// Address of the buffer's first byte, for kernels and copies.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The context that it is mapped for.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        if let Mapping::LegacyIpc { base } = self.mapping {
            self.context.release("memory of another process", |driver| {
                // SAFETY: opened by us, once; owners see to it that nobody uses it.
                unsafe { driver.cuIpcCloseMemHandle(base) }
            });
        }
    }
}

/// Device memory from `cuMemAlloc`, as `cudaMalloc` gives it, which no other process needs. Allocating and freeing it waits for
/// running kernels, those of other ranks too: nothing that ranks do while others may wait for them has any.
#[derive(Debug)]
pub struct PrivateMemory {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
}

impl PrivateMemory {
    /// Allocates `bytes` bytes, which hold anything. May wait for running kernels, so it is part
    /// of preparing.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::Call`].
    pub fn allocate(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let bytes = bytes.max(1);
        let mut address = 0;
        context
            .run(|driver| {
                // SAFETY: a valid place for the answer.
                unsafe { driver.cuMemAlloc_v2(&raw mut address, bytes as usize) }
            })
            .map_err(|error| error.asking_for(bytes))?;
        Ok(Self {
            context: Arc::clone(context),
            address,
            bytes,
        })
    }

    /// Address of the first byte, for kernels and copies; a multiple of 256.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The context that it belongs to; its [`write`](Context::write) and [`read`](Context::read)
    /// reach it.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        self.context.release("memory", |driver| {
            // SAFETY: allocated by us; owners see to it that nobody uses it.
            unsafe { driver.cuMemFree_v2(self.address) }
        });
    }
}

//! Memory that all ranks of a communicator have registered: windows.

use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use crossweft_collective::SymmetricBuffer;
use crossweft_hal::{Device, Memory};

use crate::comm::Comm;
use crate::status::Error;
use crate::{settings, table};

/// Windows begin at multiples of this: `NCCL_WIN_REQUIRED_ALIGNMENT`.
const ALIGNMENT: u64 = 4096;
/// `NCCL_WIN_COLL_SYMMETRIC`: ranks use the same offsets in a call.
const SYMMETRIC: i32 = 1;
/// Flags that there are; those beyond the first two are for hardware that hosts do not have.
const FLAGS: i32 = 0b1111;

/// `bytes` bytes of `ncclMemAlloc`, from the same offset on every rank. On GPUs it may also be other memory, which peers do
/// not reach: then calls in it are as those anywhere.
#[derive(Debug)]
pub(crate) struct Window {
    /// Its handle.
    number: u64,
    /// Where the program's own part begins.
    address: u64,
    bytes: u64,
    symmetric: bool,
    /// The memory of `ncclMemAlloc` that it lies in, while it is that.
    source: Weak<Memory>,
    /// From the beginning of the registered memory to the window.
    offset: u64,
    /// Set once all ranks have registered theirs.
    memory: OnceLock<SymmetricBuffer>,
}

/// Where a call's buffers lie.
#[derive(Debug)]
pub(crate) struct Zone {
    pub(crate) input: Arc<Window>,
    pub(crate) output: Arc<Window>,
    /// Of both, from the beginning of the registered memory.
    pub(crate) offsets: (u64, u64),
}

impl Zone {
    /// The windows' numbers, by which all that was prepared for them is found.
    pub(crate) fn numbers(&self) -> (u64, u64) {
        (self.input.number, self.output.number)
    }
}

impl Window {
    /// One that is still to be registered.
    pub(crate) fn new(address: u64, bytes: u64, flags: i32) -> Result<Arc<Self>, Error> {
        if address == 0 || bytes == 0 {
            return Err(Error::argument(
                "the window is empty: give memory of ncclMemAlloc",
            ));
        }
        if flags & !FLAGS != 0 {
            return Err(Error::argument(format!(
                "winFlags is {flags:#x}; unknown flags are set"
            )));
        }
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(Error::argument(format!(
                "the window begins at {address:#x}, which is no multiple of {ALIGNMENT}"
            )));
        }
        // What all ranks have to agree on; whether there is one shows then.
        let allocation = table::allocation(address, bytes);
        let (source, offset) = match &allocation {
            Some((memory, offset)) => (Arc::downgrade(memory), *offset),
            None => (Weak::new(), u64::MAX),
        };
        Ok(Arc::new(Self {
            number: table::number(),
            address,
            bytes,
            symmetric: flags & SYMMETRIC != 0,
            source,
            offset,
            memory: OnceLock::new(),
        }))
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Where the program's own part begins.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Where the window begins in the registered memory.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// What all ranks have registered.
    pub(crate) fn memory(&self) -> Result<&SymmetricBuffer, Error> {
        let memory = self.memory.get();
        memory.ok_or_else(|| {
            Error::argument(
                "the window is not registered yet, or, on a GPU, does not lie in memory of ncclMemAlloc on every rank",
            )
        })
    }

    /// Where a range of this rank's memory lies in the registered memory, if it lies in the window and
    /// collectives may use that.
    pub(crate) fn place_of(&self, range: &Range<u64>) -> Option<u64> {
        let end = self.address.checked_add(self.bytes)?;
        let inside = self.address <= range.start && range.end <= end;
        // Memory that was freed may have made room for other memory at the same address.
        let same = self.source.strong_count() > 0;
        let usable = inside && same && self.symmetric && self.memory.get().is_some();
        usable.then(|| self.offset + (range.start - self.address))
    }

    /// Whether `bytes` bytes at `offset` lie inside.
    pub(crate) fn check(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::argument(format!(
                "{bytes} bytes at offset {offset} of a window of {} bytes",
                self.bytes
            ))),
        }
    }

    /// Makes it known to all ranks. Collective; blocks.
    pub(crate) fn register(&self, comm: &Comm) -> Result<(), Error> {
        let communicator = comm.communicator()?;
        let endpoint = communicator.endpoint();
        let what = "registering a window";
        let deadline = std::time::Instant::now() + communicator.timeout();
        if comm.is_on_gpu() {
            let reached = [u8::from(self.source.strong_count() > 0)];
            let all = communicator.all_gather_bytes(&reached)?;
            if let Some(rank) = all.iter().position(|said| *said == [0]) {
                settings::inform(|| {
                    format!(
                        "a window of {} bytes is not in memory of ncclMemAlloc on rank {rank}: calls in it are copied through \
                         memory that all ranks reach",
                        self.bytes
                    )
                });
                return Ok(());
            }
        }
        let import = self.import(communicator.device());
        let imported = endpoint.settle(import, what, deadline, Error::from)?;
        let statement = format!("{} bytes at offset {}", self.bytes, self.offset);
        endpoint.agree(&statement, what, deadline)?;
        // It is registered once.
        let _ = self.memory.set(communicator.register_memory(imported)?);
        Ok(())
    }

    /// The memory once more, on the host up to the window's end: the communicator's own mapping of it.
    fn import(&self, device: &Device) -> Result<Memory, Error> {
        let Some(memory) = self.source.upgrade() else {
            return Err(Error::usage(
                "the window does not lie in memory of ncclMemAlloc, which alone other ranks can reach",
            ));
        };
        match (device, &*memory) {
            (Device::Cpu, Memory::Cpu(_)) => {
                let bytes = (self.offset + self.bytes).next_multiple_of(ALIGNMENT);
                Ok(device.import(memory.export()?, bytes)?)
            }
            // A GPU's memory is mapped as a whole.
            (Device::Cuda(context), Memory::Cuda(memory))
                if context.ordinal() == memory.context().ordinal() =>
            {
                // Not by a descriptor: what is imported cannot be exported to the other ranks.
                Ok(Memory::Cuda(memory.again()?))
            }
            _ => Err(Error::argument(
                "the window's memory is not on the communicator's device: call ncclMemAlloc while that is current",
            )),
        }
    }

    /// Where byte `offset` of `rank`'s part lies in this process.
    pub(crate) fn address_of(&self, rank: u32, offset: u64) -> Result<u64, Error> {
        if offset >= self.bytes {
            return Err(Error::argument(format!(
                "offset is {offset}, in a window of {} bytes",
                self.bytes
            )));
        }
        // All ranks are on this host, so only one that does not exist has no address.
        let start = self.memory()?.registered().addr(rank);
        let start = start.map_err(|_| Error::argument(format!("there is no rank {rank}")))?;
        Ok(start + self.offset + offset)
    }
}

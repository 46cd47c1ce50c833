//! The kernel: y = x + factor * (the peer's x), for one thread block's part of the vectors.
//!
//! It sees its machine through [`Block`] and [`Memory`] alone, so it is the same on a CPU and on a
//! GPU: no allocation, no panics, hence no indexing.

use crossweft_device::channel::MemoryChannel;
use crossweft_device::extent::Extent;
use crossweft_device::{Block, Memory, Site, Stopped};

/// What all blocks of a launch are given. Vectors are addresses of `f32`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExchangeAdd {
    /// This rank's vector.
    pub(crate) x: u64,
    /// The result.
    pub(crate) y: u64,
    /// Bytes of a vector.
    pub(crate) bytes: u64,
    /// Where in the memory that the peers write this round's numbers go, in bytes.
    pub(crate) half: u64,
    /// What the peer's numbers are multiplied with.
    pub(crate) factor: f32,
}

/// Bytes of an element.
const SIZE: u64 = size_of::<f32>() as u64;

/// Block: the part of block `index` of `blocks`, over a channel of its own. Element `i` of the peer
/// arrives at element `i` of the channel's local memory, from `half` on.
///
/// # Errors
/// [`Stopped`] when the wait for the peer was ended; the launch must end with it.
///
/// # Safety
/// All addresses must be valid. Nobody may write `x` or access `y` meanwhile, nor that half of the
/// memory but through the two ends of this channel.
#[inline(always)]
pub(crate) unsafe fn exchange_add<B: Block>(
    block: &B,
    channel: &MemoryChannel,
    launch: &ExchangeAdd,
    index: u32,
    blocks: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let ExchangeAdd {
        x,
        y,
        bytes,
        half,
        factor,
    } = *launch;
    let whole = Extent {
        begin: 0,
        end: bytes,
    };
    let part = whole.slice(index, blocks);
    let first = part.begin + u64::from(block.thread()) * SIZE;
    let stride = u64::from(block.threads()) * SIZE;
    // SAFETY: offsets stay in the vectors and in the channel's memory; the peer's numbers are read
    // after the signal that follows them.
    unsafe {
        // Straight into the peer's memory: no scaled copy is made here.
        let mut at = first;
        while at < part.end {
            let value: f32 = memory.read(x + at);
            channel.write(block, (half + at) / SIZE, factor * value);
            at += stride;
        }
        // All threads have written before one of them signals for all.
        block.sync(Ok(()))?;
        let mut mine = Ok(());
        if block.thread() == 0 {
            channel.semaphore.signal(block);
            mine = channel.semaphore.wait(block, Site::NO_OP);
        }
        // And all learn whether the data is there.
        block.sync(mine)?;
        let mut at = first;
        while at < part.end {
            let (own, arrived): (f32, f32) =
                (memory.read(x + at), memory.read(channel.local + half + at));
            memory.write(y + at, own + arrived);
            at += stride;
        }
    }
    Ok(())
}

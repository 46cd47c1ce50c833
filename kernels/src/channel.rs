//! Kernels for tests and measurements of what channels can do that plans do not: bulk copies and lines.

use crossweft_device::Block;
use crossweft_device::channel::MemoryChannel;
use crossweft_device::extent::Extent;
use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::bulk::{self, Stage};
use crossweft_device::gpu::machine::{block_x, blocks_x, thread};
use crossweft_device::gpu::{GpuContext, lines};

use crate::shared::{Here, launched};

type ThisBlock = GpuBlock<Here>;

/// This block's part of `bytes` bytes.
#[inline(always)]
fn share(bytes: u64) -> Extent {
    Extent {
        begin: 0,
        end: bytes,
    }
    .slice(block_x(), blocks_x())
}

/// The shared memory that the launch has asked for, ready.
///
/// # Safety
/// There must be so many bytes of it.
#[inline(always)]
unsafe fn stage(bytes: u64) -> Stage {
    match launched() {
        // SAFETY: the caller's promise; nothing else lies there.
        Some(addr) => unsafe {
            let stage = Stage::new(addr, bytes);
            if thread() == 0 {
                stage.prepare();
            }
            stage
        },
        None => Stage::NONE,
    }
}

/// Copies `bytes` bytes, all blocks together, through `shared` bytes of each block's shared memory, that the launch asks for.
///
/// # Safety
/// As for [`bulk::copy`].
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_bulk_copy(dst: u64, src: u64, bytes: u64, shared: u64) {
    let part = share(bytes);
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&GpuContext::default(), 0);
        let (dst, src) = (dst + part.begin, src + part.begin);
        bulk::copy(&block, stage(shared), dst, src, part.len());
    }
}

/// Puts `bytes` bytes, one block's share each, in the same way, and signals once for each block.
///
/// # Safety
/// As for [`MemoryChannel::put_bulk`].
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_put_bulk(
    channel: MemoryChannel,
    dst_offset: u64,
    src_offset: u64,
    bytes: u64,
    shared: u64,
) {
    let part = share(bytes);
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&GpuContext::default(), 0);
        let (to, from) = (dst_offset + part.begin, src_offset + part.begin);
        channel.put_bulk(&block, stage(shared), to, from, part.len());
        if block.sync(Ok(())).is_ok() && thread() == 0 {
            channel.semaphore.signal(&block);
        }
    }
}

/// Sends `bytes` bytes at the beginning of local memory as lines, each block its share of whole pairs, and unpacks as
/// many from the peer to `dst_offset`.
///
/// # Safety
/// As for [`MemoryChannel::put_lines`] and [`MemoryChannel::unpack_lines`].
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_exchange_lines(
    channel: MemoryChannel,
    dst_offset: u64,
    bytes: u64,
    flag: u32,
    rank: u32,
    context: GpuContext,
) {
    let pairs = share(bytes.div_ceil(lines::PAIR_PAYLOAD));
    let begin = pairs.begin * lines::PAIR_PAYLOAD;
    let end = min(pairs.end * lines::PAIR_PAYLOAD, bytes);
    // SAFETY: the caller's promise. What went wrong is in the host's record.
    unsafe {
        let block = ThisBlock::begin(&context, rank);
        if begin < end {
            let count = end - begin;
            channel.put_lines(&block, begin, begin, count, flag);
            let _ = channel.unpack_lines(&block, dst_offset + begin, begin, count, flag);
        }
    }
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

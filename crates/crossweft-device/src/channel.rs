//! Channels: what a kernel calls to move data to a peer and to tell it so.
//!
//! All are one-sided: the caller names both ends' addresses, the peer only waits. Offsets and sizes
//! are bytes. Methods that say "block" are called by every thread of a block together; the others
//! by one thread. The vocabulary is MSCCL++'s (arXiv 2504.09014).

use crate::block::Block;
use crate::fifo::{Fifo, Trigger, TriggerKind};
use crate::gpu::bulk::Stage;
use crate::gpu::lines;
use crate::memory::Memory;
use crate::packet;
use crate::reduce::{Location, Reducer, Sources};
use crate::semaphore::Semaphore;
use crate::wait::{Site, Stopped, WaitKind};

/// A channel over memory that both ends can address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryChannel {
    /// Signals to and from the peer.
    pub semaphore: Semaphore,
    /// The peer's memory, in this address space.
    pub remote: u64,
    /// This rank's memory.
    pub local: u64,
    /// This rank's memory that receives the peer's packets.
    pub packets: u64,
}

impl MemoryChannel {
    /// Block: copies `bytes` from local memory to the peer's. The peer may look after a signal.
    ///
    /// # Safety
    /// Both ranges must lie in the channel's memories; nobody may write the source or access the
    /// destination meanwhile.
    pub unsafe fn put<B: Block>(&self, block: &B, dst_offset: u64, src_offset: u64, bytes: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            copy(
                block,
                self.remote + dst_offset,
                self.local + src_offset,
                bytes,
            )
        }
    }

    /// Block: copies `bytes` from the peer's memory to local memory.
    ///
    /// # Safety
    /// As for [`put`](Self::put), the other way round.
    pub unsafe fn get<B: Block>(&self, block: &B, dst_offset: u64, src_offset: u64, bytes: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            copy(
                block,
                self.local + dst_offset,
                self.remote + src_offset,
                bytes,
            )
        }
    }

    /// Block: [`put`](Self::put) through `stage`, shared memory of the block, by the copy engine of GPUs that have one
    /// ([`gpu::bulk`](crate::gpu::bulk)): one thread is busy, and few blocks do what takes many otherwise.
    ///
    /// # Safety
    /// As for [`put`](Self::put), and the stage must be the block's.
    pub unsafe fn put_bulk<B: Block>(
        &self,
        block: &B,
        stage: Stage,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
    ) {
        let (dst, src) = (self.remote + dst_offset, self.local + src_offset);
        // SAFETY: the caller's promise.
        unsafe { copy_bulk(block, stage, dst, src, bytes) }
    }

    /// Block: [`get`](Self::get) in the same way.
    ///
    /// # Safety
    /// As for [`put_bulk`](Self::put_bulk).
    pub unsafe fn get_bulk<B: Block>(
        &self,
        block: &B,
        stage: Stage,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
    ) {
        let (dst, src) = (self.local + dst_offset, self.remote + src_offset);
        // SAFETY: the caller's promise.
        unsafe { copy_bulk(block, stage, dst, src, bytes) }
    }

    /// Element `index` of the peer's memory, seen as an array of `T`.
    ///
    /// # Safety
    /// The element must lie in the peer's memory and hold a valid `T` that nobody writes meanwhile.
    pub unsafe fn read<B: Block, T: Copy>(&self, block: &B, index: u64) -> T {
        // SAFETY: the caller's promise.
        unsafe {
            block
                .memory()
                .read(self.remote + index * size_of::<T>() as u64)
        }
    }

    /// Sets element `index` of the peer's memory, seen as an array of `T`.
    ///
    /// # Safety
    /// The element must lie in the peer's memory; nobody may access it meanwhile.
    pub unsafe fn write<B: Block, T: Copy>(&self, block: &B, index: u64, value: T) {
        // SAFETY: the caller's promise.
        unsafe {
            block
                .memory()
                .write(self.remote + index * size_of::<T>() as u64, value)
        }
    }

    /// Block: sends `bytes` from local memory as packets to byte `dst_offset` of the peer's packet
    /// memory (its payload; the packets take twice the room).
    ///
    /// # Safety
    /// As for [`put`](Self::put); `dst_offset` must be a multiple of 4.
    pub unsafe fn put_packets<B: Block>(
        &self,
        block: &B,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
        flag: u32,
    ) {
        let dst = self.remote + dst_offset * (packet::WORD / packet::PAYLOAD);
        // SAFETY: the caller's promise.
        unsafe { packet::copy_to_packets(block, dst, self.local + src_offset, bytes, flag) };
        block.wake(self.semaphore.peer);
    }

    /// Block: waits for the packets of `bytes` bytes at payload byte `src_offset` of this rank's
    /// packet memory and copies them to byte `dst_offset` of local memory.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends a wait.
    ///
    /// # Safety
    /// As for [`put`](Self::put); `src_offset` must be a multiple of 4.
    pub unsafe fn unpack_packets<B: Block>(
        &self,
        block: &B,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
        flag: u32,
    ) -> Result<(), Stopped> {
        let src = self.packets + src_offset * (packet::WORD / packet::PAYLOAD);
        let site = self.packet_site();
        // SAFETY: the caller's promise.
        let mine = unsafe {
            packet::copy_from_packets(block, site, self.local + dst_offset, src, bytes, flag)
        };
        block.sync(mine)
    }

    /// Block: sends `bytes` from local memory as lines ([`gpu::lines`](crate::gpu::lines)) to byte `dst_offset` of the
    /// peer's packet memory: of its payload, of which [`PAIR_PAYLOAD`](lines::PAIR_PAYLOAD) bytes take
    /// [`PAIR`](lines::PAIR). Where packets carry half, lines carry fifteen sixteenths; but only some machines keep
    /// them whole: ask `crossweft_channel::Endpoint::keeps_lines` on the host first.
    ///
    /// # Safety
    /// As for [`put_packets`](Self::put_packets), with whole warps; `dst_offset` must be a multiple of the payload of a
    /// pair, and the peer's memory aligned to a line ([`LINE`](lines::LINE)). That memory must never hold packets.
    pub unsafe fn put_lines<B: Block>(
        &self,
        block: &B,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
        flag: u32,
    ) {
        let dst = self.remote + dst_offset / lines::PAIR_PAYLOAD * lines::PAIR;
        // SAFETY: the caller's promise.
        unsafe { lines::copy_to_lines(block, dst, self.local + src_offset, bytes, flag) };
        block.wake(self.semaphore.peer);
    }

    /// Block: waits for the lines of `bytes` bytes at payload byte `src_offset` of this rank's
    /// packet memory and copies them to byte `dst_offset` of local memory.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends a wait.
    ///
    /// # Safety
    /// As for [`put_lines`](Self::put_lines), the other way round.
    pub unsafe fn unpack_lines<B: Block>(
        &self,
        block: &B,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
        flag: u32,
    ) -> Result<(), Stopped> {
        let src = self.packets + src_offset / lines::PAIR_PAYLOAD * lines::PAIR;
        let (dst, site) = (self.local + dst_offset, self.packet_site());
        // SAFETY: the caller's promise.
        let mine = unsafe { lines::copy_from_lines(block, site, dst, src, bytes, flag) };
        block.sync(mine)
    }

    const fn packet_site(&self) -> Site {
        Site {
            kind: WaitKind::Packet,
            peer: self.semaphore.peer,
            channel: self.semaphore.channel,
            op: Site::NO_OP,
        }
    }
}

/// Block: copies `bytes` from `src` to `dst`.
///
/// # Safety
/// As for [`Memory::copy`].
#[inline(always)]
pub unsafe fn copy<B: Block>(block: &B, dst: u64, src: u64, bytes: u64) {
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    // SAFETY: the caller's promise.
    unsafe {
        crate::gpu::copy::copy(block, dst, src, bytes)
    }
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    // SAFETY: the caller's promise.
    unsafe {
        copy_by(block, (block.thread(), block.threads()), dst, src, bytes)
    }
}

/// The part of a copy that is `thread`'s of `threads` threads, which copy together.
///
/// # Safety
/// As for [`copy`], all of them together.
#[inline(always)]
pub(crate) unsafe fn copy_by<B: Block>(
    block: &B,
    (thread, threads): (u32, u32),
    dst: u64,
    src: u64,
    bytes: u64,
) {
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    // SAFETY: the caller's promise.
    unsafe {
        let _ = block;
        crate::gpu::copy::copy_by(thread, threads, dst, src, bytes)
    }
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    {
        let (begin, end) = (0, bytes);
        let share = crate::extent::Extent { begin, end }.slice(thread, threads);
        // SAFETY: the caller's promise; the slices do not overlap.
        unsafe {
            let memory = block.memory();
            memory.copy(dst + share.begin, src + share.begin, share.len())
        }
    }
}

/// Block: [`copy`] through `stage`, where a GPU has an engine for that; the host has none.
///
/// # Safety
/// As for [`copy`], and the stage must be the block's.
#[inline(always)]
unsafe fn copy_bulk<B: Block>(block: &B, stage: Stage, dst: u64, src: u64, bytes: u64) {
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    // SAFETY: the caller's promise.
    unsafe {
        crate::gpu::bulk::copy(block, stage, dst, src, bytes)
    }
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    {
        let _ = stage;
        // SAFETY: the caller's promise.
        unsafe { copy(block, dst, src, bytes) }
    }
}

/// A channel whose transfers a proxy thread does: copy engines, NICs, sockets. All methods are
/// called by one thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PortChannel {
    /// Signals from the peer; `outbound` is unused, the proxy signals.
    pub semaphore: Semaphore,
    /// Where requests go.
    pub fifo: Fifo,
    /// The channel's id at the proxy.
    pub channel: u32,
    /// The peer's registered memory's id at the proxy.
    pub dst_memory: u32,
    /// This rank's registered memory's id at the proxy.
    pub src_memory: u32,
}

impl PortChannel {
    #[inline(always)]
    fn trigger(&self, kind: TriggerKind, dst_offset: u64, src_offset: u64, size: u64) -> Trigger {
        Trigger {
            kind,
            channel: self.channel,
            dst_memory: self.dst_memory,
            src_memory: self.src_memory,
            dst_offset,
            src_offset,
            size,
        }
    }

    /// Asks for a copy of `bytes` bytes to the peer and returns at once. The source must stay as it
    /// is until a later flush, or until the peer answered a later signal.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends the wait for fifo space.
    ///
    /// # Safety
    /// The handle's addresses must be valid.
    pub unsafe fn put<B: Block>(
        &self,
        block: &B,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
    ) -> Result<(), Stopped> {
        let trigger = self.trigger(TriggerKind::PUT, dst_offset, src_offset, bytes);
        // SAFETY: the caller's promise.
        unsafe { self.fifo.push(block, Site::NO_OP, &trigger) }.map(drop)
    }

    /// Asks for a signal to the peer, after the puts before it.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    ///
    /// # Safety
    /// As for [`put`](Self::put).
    pub unsafe fn signal<B: Block>(&self, block: &B) -> Result<(), Stopped> {
        let trigger = self.trigger(TriggerKind::SIGNAL, 0, 0, 0);
        // SAFETY: the caller's promise.
        unsafe { self.fifo.push(block, Site::NO_OP, &trigger) }.map(drop)
    }

    /// [`put`](Self::put), then [`signal`](Self::signal), in one request.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    ///
    /// # Safety
    /// As for [`put`](Self::put).
    pub unsafe fn put_with_signal<B: Block>(
        &self,
        block: &B,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
    ) -> Result<(), Stopped> {
        let kind = TriggerKind::PUT.with(TriggerKind::SIGNAL);
        let trigger = self.trigger(kind, dst_offset, src_offset, bytes);
        // SAFETY: the caller's promise.
        unsafe { self.fifo.push(block, Site::NO_OP, &trigger) }.map(drop)
    }

    /// [`put_with_signal`](Self::put_with_signal), then waits as [`flush`](Self::flush) does.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends a wait.
    ///
    /// # Safety
    /// As for [`put`](Self::put).
    pub unsafe fn put_with_signal_and_flush<B: Block>(
        &self,
        block: &B,
        dst_offset: u64,
        src_offset: u64,
        bytes: u64,
    ) -> Result<(), Stopped> {
        let kind = TriggerKind::PUT
            .with(TriggerKind::SIGNAL)
            .with(TriggerKind::FLUSH);
        let trigger = self.trigger(kind, dst_offset, src_offset, bytes);
        // SAFETY: the caller's promise.
        unsafe {
            let position = self.fifo.push(block, Site::NO_OP, &trigger)?;
            self.fifo.wait_handled(block, Site::NO_OP, position)
        }
    }

    /// Waits until everything asked for before has arrived at the peer.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends a wait.
    ///
    /// # Safety
    /// As for [`put`](Self::put).
    pub unsafe fn flush<B: Block>(&self, block: &B) -> Result<(), Stopped> {
        let trigger = self.trigger(TriggerKind::FLUSH, 0, 0, 0);
        // SAFETY: the caller's promise.
        unsafe {
            let position = self.fifo.push(block, Site::NO_OP, &trigger)?;
            self.fifo.wait_handled(block, Site::NO_OP, position)
        }
    }

    /// Takes one signal of the peer's if it has arrived; does not block.
    ///
    /// # Safety
    /// As for [`Semaphore::poll`].
    pub unsafe fn poll<B: Block>(&self, block: &B) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.semaphore.poll(block) }
    }

    /// Waits for one signal of the peer's, and for the puts before it.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends the wait.
    ///
    /// # Safety
    /// As for [`Semaphore::wait`].
    pub unsafe fn wait<B: Block>(&self, block: &B) -> Result<(), Stopped> {
        // SAFETY: the caller's promise.
        unsafe { self.semaphore.wait(block, Site::NO_OP) }
    }
}

/// A channel to a whole group at once: reduce from all members' memory, broadcast to all of it.
/// Emulated over mapped peer memory; a multicast address would replace the loops below.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SwitchChannel {
    /// Address of the members' base addresses (`u64` each), in member order.
    pub members: u64,
    /// Address of this member's semaphores (`Semaphore` each) with every member, in member order;
    /// its own entry is unused.
    pub semaphores: u64,
    /// Members.
    pub count: u32,
    /// This member's index.
    pub index: u32,
}

impl SwitchChannel {
    /// # Safety
    /// `member` must be below `count` and the handle's addresses valid.
    unsafe fn base<B: Block>(&self, block: &B, member: u32) -> u64 {
        // SAFETY: the caller's promise; the table never changes.
        unsafe { block.memory().read(self.members + u64::from(member) * 8) }
    }

    /// # Safety
    /// As for [`base`](Self::base).
    unsafe fn semaphore<B: Block>(&self, block: &B, member: u32) -> Semaphore {
        let size = size_of::<Semaphore>() as u64;
        // SAFETY: the caller's promise; handles never change.
        unsafe {
            block
                .memory()
                .read(self.semaphores + u64::from(member) * size)
        }
    }

    /// Block: reduces `elements` elements at byte `offset` of every member's memory, in member
    /// order, into `dst` (an address of this rank's).
    ///
    /// # Errors
    /// [`Stopped`] when the job ended meanwhile.
    ///
    /// # Safety
    /// The ranges must be valid; nobody may write the members' memory meanwhile ([`barrier`]
    /// before and after, or signals, see to that).
    ///
    /// [`barrier`]: Self::barrier
    pub unsafe fn reduce<B: Block, R: Reducer>(
        &self,
        block: &B,
        reducer: &R,
        dst: u64,
        offset: u64,
        elements: u64,
    ) -> Result<(), Stopped> {
        let sources = Sources {
            count: self.count,
            // SAFETY: `at` stays below `count`.
            at: |member| Location::raw(unsafe { self.base(block, member) } + offset),
        };
        let destinations = Sources {
            count: 1,
            at: |_| Location::raw(dst),
        };
        // SAFETY: the caller's promise.
        unsafe { reducer.reduce(block, &sources, &destinations, elements, self.count, 0) }
    }

    /// Block: copies `bytes` bytes from `src` (an address of this rank's) to byte `offset` of every
    /// member's memory.
    ///
    /// # Safety
    /// The ranges must be valid; nobody may access the destinations meanwhile.
    pub unsafe fn broadcast<B: Block>(&self, block: &B, offset: u64, src: u64, bytes: u64) {
        let mut k = 0;
        while k < self.count {
            // Each member starts with itself, so that they do not all write to the same one.
            let member = (self.index + k) % self.count;
            // SAFETY: the caller's promise; `member` is below `count`.
            unsafe { copy(block, self.base(block, member) + offset, src, bytes) };
            k += 1;
        }
    }

    /// One thread: waits until every member is here, and makes what they wrote before visible.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends a wait.
    ///
    /// # Safety
    /// The handle's addresses must be valid.
    pub unsafe fn barrier<B: Block>(&self, block: &B) -> Result<(), Stopped> {
        let mut k = 1;
        while k < self.count {
            // SAFETY: the caller's promise.
            unsafe {
                self.semaphore(block, (self.index + k) % self.count)
                    .signal(block)
            };
            k += 1;
        }
        let mut k = 1;
        while k < self.count {
            let member = (self.index + k) % self.count;
            // SAFETY: the caller's promise.
            unsafe { self.semaphore(block, member).wait(block, Site::NO_OP)? };
            k += 1;
        }
        Ok(())
    }
}

//! The transfers of an exchange: without a reduction for any data type, and with one for each. And signals between ranks.

use crossweft_device::Block;
use crossweft_device::Raw;
#[cfg(module = "exchange")]
use crossweft_device::Site;
use crossweft_device::Stopped;
use crossweft_device::exchange::{Desk, Transfer, abandon, is_abandoned, run_block};
#[cfg(module = "exchange")]
use crossweft_device::exchange::{Direction, Envelope, Transfers, run_single};
use crossweft_device::gpu::ExchangeLaunch;
#[cfg(not(module = "exchange"))]
use crossweft_device::gpu::GpuReducer;
use crossweft_device::gpu::block::GpuBlock;
#[cfg(module = "exchange")]
use crossweft_device::gpu::machine::blocks_x;
use crossweft_device::gpu::machine::{block_x, thread, threads};
#[cfg(module = "exchange")]
use crossweft_device::gpu::{Message, MessagesLaunch, SignalLaunch};
use crossweft_device::reduce::Reducer;
#[cfg(module = "exchange")]
use crossweft_device::reduce::{Location, Sources};

use crate::shared::{self, Here};
#[cfg(module = "exchange")]
use core::mem::offset_of;

/// Bytes that a thread brings at a time.
const PIECE: u64 = 16;

/// Does this block's share of the transfers. What is read again and again, and what changes, is brought into shared memory
/// first: the tables lie in the host's, and a launch that was recorded must find them as they were.
///
/// # Safety
/// As for [`run_block`], with a share of at most [`MAX_CHAINS`](crossweft_device::gpu::MAX_CHAINS) chains.
#[inline(always)]
unsafe fn run(launch: ExchangeLaunch, reducer: &impl Reducer) {
    let index = block_x();
    // SAFETY: the caller's promise; nobody writes the tables meanwhile.
    unsafe {
        let here = shared::launch() as *mut ExchangeLaunch;
        if thread() == 0 {
            here.write(launch);
        }
        let block = GpuBlock::<Here>::begin(&launch.context, launch.exchange.rank);
        let launch = &*here;
        let (exchange, transfers) = (&launch.exchange, &launch.transfers);
        let (begin, count) = transfers.share(index);
        let size = size_of::<Transfer>() as u64;
        let (near, far) = (shared::chains(), transfers.chains + u64::from(begin) * size);
        let bytes = u64::from(count) * size;
        let mut at = u64::from(thread()) * PIECE;
        while at < bytes {
            let piece = ((far + at) as *const [u64; 2]).read();
            ((near + at) as *mut [u64; 2]).write(piece);
            at += u64::from(threads()) * PIECE;
        }
        // One answer for all threads of the block.
        let mine = match thread() == 0 && is_abandoned(&Raw, exchange) {
            true => Err(Stopped::Aborted),
            false => Ok(()),
        };
        if block.sync(mine).is_err() {
            return;
        }
        let desk = Desk {
            chains: near,
            board: shared::board(),
        };
        let result = run_block(&block, reducer, exchange, transfers, index, desk);
        // The record in the host's memory says what went wrong.
        if let (0, Err(stopped)) = (thread(), result) {
            abandon(&Raw, exchange, stopped);
        }
    }
}

/// For launches that reduce nothing.
#[cfg(module = "exchange")]
struct Nothing;

#[cfg(module = "exchange")]
impl Reducer for Nothing {
    #[inline(always)]
    unsafe fn reduce<B: Block, S: Fn(u32) -> Location, D: Fn(u32) -> Location>(
        &self,
        _: &B,
        _: &Sources<S>,
        _: &Sources<D>,
        _: u64,
        _: u32,
        _: u32,
    ) -> Result<(), Stopped> {
        // A host that launches a reduction here has made a mistake, which must not look like a sum.
        Err(Stopped::Mismatch)
    }
}

/// Sends, receives and copies, a thread block for each of the table's.
///
/// # Safety
/// As for [`run_block`], with no reduction among the transfers.
#[cfg(module = "exchange")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_exchange(launch: ExchangeLaunch) {
    // SAFETY: the caller's promise.
    unsafe { run(launch, &Nothing) }
}

/// Sends, receives and copies, a thread block for each lane of each message.
///
/// # Safety
/// As for [`run_single`].
#[cfg(module = "exchange")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_messages(launch: MessagesLaunch) {
    // SAFETY: the caller's promise; what is read of the parameter lies in it.
    unsafe {
        let word = word_of!(crossweft_messages, launch);
        let index = block_x();
        let size = size_of::<Message>() as u64;
        // Two fields of 32 bits of a message, a word: one alone would be read from where no word begins.
        let pair = |at: u64, field: usize| {
            let both = word(at + field as u64);
            (both as u32, (both >> 32) as u32)
        };
        // The last message that begins at this block or before.
        let (mut at, mut left) = (offset_of!(MessagesLaunch, messages) as u64, launch.count);
        while left > 1 && pair(at + size, offset_of!(Message, memory)).1 <= index {
            (at, left) = (at + size, left - 1);
        }
        let (peer, direction) = pair(at, offset_of!(Message, peer));
        let (memory, first) = pair(at, offset_of!(Message, memory));
        let (lanes, op) = pair(at, offset_of!(Message, lanes));
        let message = Message {
            address: word(at + offset_of!(Message, address) as u64),
            place: word(at + offset_of!(Message, place) as u64),
            envelope: Envelope {
                bytes: word(at + offset_of!(Message, envelope.bytes) as u64),
                kind: word(at + offset_of!(Message, envelope.kind) as u64),
            },
            peer,
            direction: core::mem::transmute::<u32, Direction>(direction),
            memory,
            first,
            lanes,
            op,
        };
        let here = shared::launch() as *mut ExchangeLaunch;
        if thread() == 0 {
            (&raw mut (*here).exchange).write(launch.exchange);
            let transfers = Transfers {
                chains: 0,
                followers: 0,
                count: blocks_x(),
                blocks: blocks_x(),
                launch: launch.launch,
                reserved: 0,
            };
            (&raw mut (*here).transfers).write(transfers);
        }
        let block = GpuBlock::<Here>::begin(&launch.context, launch.exchange.rank);
        let (exchange, transfers) = (&(*here).exchange, &(*here).transfers);
        let transfer = message.transfer(index - message.first);
        let result = run_single(
            &block,
            exchange,
            transfers,
            index,
            &transfer,
            shared::board(),
        );
        // The record in the host's memory says what went wrong.
        if let (0, Err(stopped)) = (thread(), result) {
            abandon(&Raw, exchange, stopped);
        }
    }
}

/// Waits for signals of a peer, then signals it: one thread block.
///
/// # Safety
/// The parameter must be as its fields say, and nobody else wait for the semaphore meanwhile.
#[cfg(module = "exchange")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_signal(launch: SignalLaunch) {
    // SAFETY: the caller's promise.
    unsafe {
        let block = GpuBlock::<Here>::begin(&launch.context, launch.rank);
        if thread() != 0 {
            return;
        }
        let mut waits = launch.waits;
        while waits > 0 {
            // The record in the host's memory says what went wrong.
            if launch.semaphore.wait(&block, Site::NO_OP).is_err() {
                return;
            }
            waits -= 1;
        }
        let mut signals = launch.signals;
        while signals > 0 {
            launch.semaphore.signal(&block);
            signals -= 1;
        }
    }
}

macro_rules! reducing {
    ($($module:literal, $element:ty, $entry:ident;)*) => { $(
        /// The same with reductions.
        ///
        /// # Safety
        /// As for [`run_block`].
        #[cfg(module = $module)]
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(launch: ExchangeLaunch) {
            // SAFETY: the caller's promise; the table is used for nothing else.
            unsafe {
                let reducer = GpuReducer::<$element, _>::new(launch.op, shared::table());
                run(launch, &reducer);
            }
        }
    )* };
}

#[allow(unused_imports)]
use crossweft_device::element::{Bf16, F8E4M3, F8E5M2, F16};

reducing! {
    "exchange_i8", i8, crossweft_exchange_i8;
    "exchange_u8", u8, crossweft_exchange_u8;
    "exchange_i16", i16, crossweft_exchange_i16;
    "exchange_u16", u16, crossweft_exchange_u16;
    "exchange_i32", i32, crossweft_exchange_i32;
    "exchange_u32", u32, crossweft_exchange_u32;
    "exchange_i64", i64, crossweft_exchange_i64;
    "exchange_u64", u64, crossweft_exchange_u64;
    "exchange_f16", F16, crossweft_exchange_f16;
    "exchange_bf16", Bf16, crossweft_exchange_bf16;
    "exchange_f32", f32, crossweft_exchange_f32;
    "exchange_f64", f64, crossweft_exchange_f64;
    "exchange_f8e4m3", F8E4M3, crossweft_exchange_f8e4m3;
    "exchange_f8e5m2", F8E5M2, crossweft_exchange_f8e5m2;
}

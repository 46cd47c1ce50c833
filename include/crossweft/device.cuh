// crossweft for CUDA C++: put, signal and wait from inside your own kernels.
//
// The handles below are the ones that the host side of crossweft makes (`MemoryChannel::handle()`
// and so on, in Rust). Pass them to a kernel by value. Both ends of a channel may be written in
// different languages: this header and the Rust kernels speak the same protocol, byte by byte.
//
//   #include <crossweft/device.cuh>
//
//   extern "C" __global__ void send(crossweft::MemoryChannel channel, crossweft::u64 bytes) {
//     channel.put(0, 0, bytes, threadIdx.x, blockDim.x);
//     __syncthreads();
//     if (threadIdx.x == 0) channel.signal();
//   }
//
//   extern "C" __global__ void receive(crossweft::MemoryChannel channel,
//                                      crossweft::GpuContext context) {
//     crossweft::Block block(context, 1);
//     auto mine = crossweft::Status::Ok;
//     if (threadIdx.x == 0) mine = channel.wait(block);
//     if (block.sync(mine) != crossweft::Status::Ok) return;
//     // The data is here.
//   }
//
// Needs C++17 and a compute capability of 8.0 or later; nvcc or NVRTC, and no other header.
//
// Units. Offsets and sizes are bytes, `index` counts elements, times are nanoseconds.
//
// Who calls. "Threads": `threads` threads together, each with its number `thread` (a whole block:
// threadIdx.x, blockDim.x; a part of one works as well). "One thread": exactly one thread at a
// time, after `__syncthreads()` where it is to vouch for what others of its block did.
//
// Memory order. What is not in this table is plain memory access.
//
//   call                         order                 covers
//   signal                       release, system       what this thread did or saw before
//   wait, poll (if true)         acquire, system       what the signal's sender did before it
//   relaxedSignal, relaxedWait   none                  execution order only
//   putPackets, unpackPackets    none is needed        data and flag are one 8-byte word
//   putLines, unpackLines        none is needed        data and flag are one line of 128 bytes
//   Fifo::push, PortChannel's    release, system       what this thread did before, for the proxy
//   sync, flush                  acquire, system       what the proxy did before
//   Block::sync                  the block's barrier   what all threads of the block did before
//
// putBulk and getBulk are plain memory access, too: what crosses between them and the copy engine's
// own way to memory is fenced inside.
//
// A signal covers the other threads of its block too if a block barrier stands between, and a wait
// covers them likewise if they go on behind a barrier after it.
//
// How waits end. Every wait ends by success, when the host sets the abort word, or when the time
// in `GpuContext` is over. It returns a `Status` and never traps, so the CUDA context survives.
// The first wait of a launch that ends badly describes itself in a `StatusRecord`, from which the
// host makes an error that names rank, peer, channel, and the expected and seen value. A status
// that is not `Ok` must end the kernel: data that was waited for is not there.
//
// Memory that a peer writes must not be read by `__ldg` or through a `const __restrict__` pointer:
// those loads may return what was there before.
#pragma once

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__) && !defined(CROSSWEFT_HOST_TEST)
#error "crossweft/device.cuh is device code: compile it with nvcc or NVRTC"
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "crossweft needs compute capability 8.0 or later: compile for sm_80 and up"
#endif

#define CROSSWEFT_DEVICE __device__ __forceinline__

namespace crossweft {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(void*) == 8, "handles carry 64-bit addresses");

// Single accesses to global memory: this GPU's, a peer's, or the host's. Addresses are aligned to
// the access. All are compiler barriers too.
namespace ptx {

#if !defined(CROSSWEFT_HOST_TEST)  // which brings its own machine

// Relaxed, at system scope.
CROSSWEFT_DEVICE u64 load(u64 address) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

CROSSWEFT_DEVICE void store(u64 address, u64 value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

CROSSWEFT_DEVICE void add(u64 address, u64 value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Two words side by side, 16-byte aligned. Each is whole; the two need not belong together.
CROSSWEFT_DEVICE void loadPair(u64 address, u64& a, u64& b) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(a), "=l"(b)
               : "l"(address)
               : "memory");
}

CROSSWEFT_DEVICE void storePair(u64 address, u64 a, u64 b) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(a), "l"(b)
               : "memory");
}

// With order, at system scope.
CROSSWEFT_DEVICE u64 loadAcquire(u64 address) {
  u64 value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

CROSSWEFT_DEVICE void storeRelease(u64 address, u64 value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

CROSSWEFT_DEVICE void addRelease(u64 address, u64 value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Acquire and release; returns the value before.
CROSSWEFT_DEVICE u64 fetchAdd(u64 address, u64 value) {
  u64 before;
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(value)
               : "memory");
  return before;
}

// Nanoseconds since some moment; advances in steps of up to a microsecond.
CROSSWEFT_DEVICE u64 timeNs() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Block barrier; returns whether any thread brought `mine`. Not the aligned form, which a warp
// must reach as one: threads come here from waits that end at different times.
CROSSWEFT_DEVICE bool barrierOr(bool mine) {
  u32 any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.red.or.pred any, 0, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<u32>(mine))
      : "memory");
  return any != 0;
}

// Whether any thread of a warp brings `mine`; all of its threads call it, and go on side by side.
CROSSWEFT_DEVICE bool anyInWarp(bool mine) { return __any_sync(0xffffffffu, mine) != 0; }

// Plain accesses. Written out, because the compiler may take what it knows of a pointer's type or
// origin for a promise that nobody else writes.
struct alignas(16) Piece {
  u32 a, b, c, d;
};

CROSSWEFT_DEVICE void get(u64 address, Piece& value) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.a), "=r"(value.b), "=r"(value.c), "=r"(value.d)
               : "l"(address)
               : "memory");
}

CROSSWEFT_DEVICE void set(u64 address, const Piece& value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.a),
               "r"(value.b), "r"(value.c), "r"(value.d)
               : "memory");
}

CROSSWEFT_DEVICE void get(u64 address, u64& value) {
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
}

CROSSWEFT_DEVICE void set(u64 address, u64 value) {
  asm volatile("st.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

CROSSWEFT_DEVICE void get(u64 address, u32& value) {
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
}

CROSSWEFT_DEVICE void set(u64 address, u32 value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

CROSSWEFT_DEVICE void get(u64 address, u16& value) {
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
}

CROSSWEFT_DEVICE void set(u64 address, u16 value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(address), "h"(value) : "memory");
}

CROSSWEFT_DEVICE void get(u64 address, u8& value) {
  u32 wide;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(wide) : "l"(address) : "memory");
  value = static_cast<u8>(wide);
}

CROSSWEFT_DEVICE void set(u64 address, u8 value) {
  const u32 wide = value;
  asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(wide) : "memory");
}

// The copy engine of a multiprocessor (TMA). Shared memory is named by its own addresses.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Orders what this thread reached by loads and stores, or saw by an acquire, and what the engine
// reaches: it has a way of its own to memory, the async proxy.
CROSSWEFT_DEVICE void fenceProxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Orders what the engine has stored and what this thread does next.
CROSSWEFT_DEVICE void fenceStored() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

CROSSWEFT_DEVICE void initBarrier(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Asks for `bytes` bytes at `src` to come to shared memory at `to`; `barrier` completes a turn then.
CROSSWEFT_DEVICE void bulkLoad(u32 to, u64 src, u32 bytes, u32 barrier) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

// Whether `turn`, 0 or 1, is complete; waits for some time itself, for memory and for nobody else.
CROSSWEFT_DEVICE bool isComplete(u32 barrier, u32 turn) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(turn)
      : "memory");
  return done != 0;
}

// Asks for `bytes` bytes of shared memory at `from` to go to `dst`.
CROSSWEFT_DEVICE void bulkStore(u64 dst, u32 from, u32 bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(dst),
      "r"(from), "r"(bytes)
      : "memory");
}

// Waits until all but the last `Count` of these have been read, or, of all, are where they belong.
template <u32 Count>
CROSSWEFT_DEVICE void bulkKeep() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Count) : "memory");
}

CROSSWEFT_DEVICE void bulkStored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

#endif  // __CUDA_ARCH__ >= 900

#endif  // !defined(CROSSWEFT_HOST_TEST)

// The integer (or piece) of so many bytes.
template <u32 Bytes>
struct Integer;
template <>
struct Integer<1> {
  using Type = u8;
};
template <>
struct Integer<2> {
  using Type = u16;
};
template <>
struct Integer<4> {
  using Type = u32;
};
template <>
struct Integer<8> {
  using Type = u64;
};
template <>
struct Integer<16> {
  using Type = Piece;
};

// A value of 1, 2, 4, 8 or 16 bytes, in one access.
template <class T>
CROSSWEFT_DEVICE T read(u64 address) {
  static_assert(__is_trivially_copyable(T), "only plain data can be moved between ranks");
  typename Integer<sizeof(T)>::Type bits;
  get(address, bits);
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
CROSSWEFT_DEVICE void write(u64 address, const T& value) {
  static_assert(__is_trivially_copyable(T), "only plain data can be moved between ranks");
  typename Integer<sizeof(T)>::Type bits;
  memcpy(&bits, &value, sizeof(T));
  set(address, bits);
}

}  // namespace ptx

// ------------------------------------------------------------------------------------------------
// Waiting

// How a wait, or a block's agreement on several, ended.
enum class Status : u32 {
  // What was waited for is there.
  Ok = 0,
  // The host has set the abort word: the job failed or a peer died.
  Aborted = 1,
  // The time that the launch was given is over.
  Deadline = 2,
  // A peer makes a call of another size (packets whose flags come from `flagOf`).
  Mismatch = 3,
};

// What is waited for.
enum class WaitKind : u32 {
  Semaphore = 0,
  Packet = 1,
  FifoSpace = 2,
  FifoDone = 3,
  Barrier = 4,
  Acquire = 5,
  Size = 6,
  Message = 7,
  Taken = 8,
  Envelope = 9,
  Failed = 10,
};

// `op` of a wait that has no number of its own.
constexpr u32 NO_OP = 0xffffffffu;

// Where a wait stands, for the host's error message.
struct Site {
  WaitKind kind;
  // The rank that must act.
  u32 peer;
  // Number of the channel or fifo.
  u32 channel;
  // A number of the caller's choice.
  u32 op;
};

// A wait in progress.
struct Waiting {
  Site site;
  // How often the condition was looked at before.
  u32 spins;
  // The value that would end the wait (for counters: the least one).
  u64 expected;
  // The value last seen.
  u64 seen;
};

// How a kernel's waits end; made by the host, passed by value. Addresses are 0 if there is none.
struct GpuContext {
  // How long the kernel may take, in nanoseconds from its start; 0 for no limit. Relative, so
  // that a captured launch can be replayed at any time.
  u64 limitNs;
  // A word in pinned host memory: 0 while all is well.
  u64 abort;
  // A `StatusRecord` in pinned host memory.
  u64 status;
};

// The first wait that ended without its condition. All zero before the launch.
struct StatusRecord {
  // How many threads had to stop: whoever finds 0 here writes the rest.
  u64 claims;
  // Not 0 when the rest is complete: a `Status`.
  u64 stopped;
  u32 rank;
  u32 block;
  u32 thread;
  u32 reserved;
  Waiting waiting;
};

// Low bits of a packet flag that tell epochs apart; the others tell calls of different sizes apart.
constexpr u32 EPOCH_BITS = 20;

// The packet flag of an epoch (epochs start at 1) and a message of `bytes` bytes: never 0, of the
// epoch's parity, and different for the 2^20 - 3 epochs that follow. Use it, or a counter below
// 2^20 that starts at 1.
__host__ __device__ constexpr u32 flagOf(u64 epoch, u64 bytes) {
  const u64 epochs = (1ull << EPOCH_BITS) - 2;
  const u64 signature = bytes * 0x9e3779b97f4a7c15ull >> (32 + EPOCH_BITS);
  return static_cast<u32>((epoch - 1) % epochs + 1) | static_cast<u32>(signature) << EPOCH_BITS;
}

// Whether a packet that carries `seen` instead of `expected` is of the same epoch of a call of
// another size.
__host__ __device__ constexpr bool isOfOtherSize(u32 expected, u32 seen) {
  return expected != seen && (expected ^ seen) << (32 - EPOCH_BITS) == 0;
}

// Whether a counter that only grows has reached `target`; right across the wrap of 64 bits.
__host__ __device__ constexpr bool reached(u64 counter, u64 target) {
  return counter - target <= ~0ull / 2;
}

// What a thread knows of its launch: how its waits end, and whose they are.
class Block {
 public:
  // The time that `context` allows begins now; `rank` is for error messages. Every thread that
  // waits makes one, at the start of the kernel. No barrier.
  CROSSWEFT_DEVICE Block(const GpuContext& context, u32 rank)
      : end_(~0ull), abort_(context.abort), status_(context.status), rank_(rank) {
    const u64 now = ptx::timeNs();
    if (context.limitNs != 0 && context.limitNs < ~0ull - now) end_ = now + context.limitNs;
  }

  // All threads of the block: barrier that agrees on the outcome, so that all go on or none does.
  // `Ok` if every thread brought that, else the largest that one brought.
  [[nodiscard]] CROSSWEFT_DEVICE Status sync(Status mine = Status::Ok) const {
    // Two more barriers only when something went wrong; all threads take the branch or none.
    if (!ptx::barrierOr(mine != Status::Ok)) return Status::Ok;
    const bool deadline = ptx::barrierOr(mine == Status::Deadline);
    const bool mismatch = ptx::barrierOr(mine == Status::Mismatch);
    return mismatch ? Status::Mismatch : deadline ? Status::Deadline : Status::Aborted;
  }

  // Warp: as `waitFor`, until `done` holds on all threads of a warp, which look together; all of
  // them call it. Who has nothing to wait for has a `done` that holds.
  template <class Load, class Done>
  [[nodiscard]] CROSSWEFT_DEVICE Status waitForWarp(const Site& site, u64 expected, Load load,
                                                    Done done) const {
    for (u32 spins = 0;;) {
      const u64 seen = load();
      const bool late = !done(seen);
      if (!ptx::anyInWarp(late)) return Status::Ok;
      if (spins % PATIENCE == PATIENCE - 1) {
        const Status stopped = late ? look(site.kind, expected, seen) : Status::Ok;
        if (stopped != Status::Ok) report(stopped, Waiting{site, spins, expected, seen});
        if (ptx::anyInWarp(stopped != Status::Ok)) {
          return stopped != Status::Ok ? stopped : Status::Aborted;
        }
      }
      spins += spins != ~0u;
    }
  }

  // Any thread: looks at `load()` until `done` of it holds, or the wait must end. For waits of
  // your own; `expected` is for the error message. Returns at once if it holds already.
  template <class Load, class Done>
  [[nodiscard]] CROSSWEFT_DEVICE Status waitFor(const Site& site, u64 expected, Load load,
                                                Done done) const {
    for (u32 spins = 0;;) {
      const u64 seen = load();
      if (done(seen)) return Status::Ok;
      // The clock is slow, and the abort word lies across the bus: every 0.5 to 1 ms will do.
      if (spins % PATIENCE == PATIENCE - 1) {
        const Status stopped = look(site.kind, expected, seen);
        if (stopped != Status::Ok) {
          report(stopped, Waiting{site, spins, expected, seen});
          return stopped;
        }
      }
      spins += spins != ~0u;
    }
  }

 private:
  static constexpr u32 PATIENCE = 1024;

  // Whether a wait must end, and why. Not a function of its own in the machine code: a call would
  // cost every kernel a stack.
  CROSSWEFT_DEVICE Status look(WaitKind kind, u64 expected, u64 seen) const {
    const bool ofOtherSize = isOfOtherSize(static_cast<u32>(expected), static_cast<u32>(seen));
    if (kind == WaitKind::Packet && ofOtherSize) return Status::Mismatch;
    if (abort_ != 0 && ptx::load(abort_) != 0) return Status::Aborted;
    return ptx::timeNs() >= end_ ? Status::Deadline : Status::Ok;
  }

  // Describes a wait that ended badly, if it is the first. Whoever claims the record writes it.
  CROSSWEFT_DEVICE void report(Status stopped, const Waiting& waiting) const {
    if (status_ == 0 || ptx::fetchAdd(status_, 1) != 0) return;
    auto record = reinterpret_cast<StatusRecord*>(status_);
    record->rank = rank_;
    record->block = blockIdx.x;
    record->thread = threadIdx.x;
    record->waiting = waiting;
    ptx::storeRelease(reinterpret_cast<u64>(&record->stopped), static_cast<u64>(stopped));
  }

  u64 end_;
  u64 abort_;
  u64 status_;
  u32 rank_;
};

// ------------------------------------------------------------------------------------------------
// Copying

namespace detail {

template <class T>
CROSSWEFT_DEVICE void copyWhole(u64 dst, u64 src, u64 count, u32 thread, u32 threads) {
  const u64 stride = static_cast<u64>(threads) * sizeof(T);
  const u64 end = dst + count * sizeof(T);
  u64 to = dst + thread * sizeof(T);
  u64 from = src + thread * sizeof(T);
  // Four in flight.
  for (; to + 3 * stride < end; to += 4 * stride, from += 4 * stride) {
    T a, b, c, d;
    ptx::get(from, a);
    ptx::get(from + stride, b);
    ptx::get(from + 2 * stride, c);
    ptx::get(from + 3 * stride, d);
    ptx::set(to, a);
    ptx::set(to + stride, b);
    ptx::set(to + 2 * stride, c);
    ptx::set(to + 3 * stride, d);
  }
  for (; to < end; to += stride, from += stride) {
    T value;
    ptx::get(from, value);
    ptx::set(to, value);
  }
}

}  // namespace detail

// Threads: copies `bytes` bytes between ranges of any alignment that do not overlap, or are the
// same; by the widest access that both addresses allow.
CROSSWEFT_DEVICE void copy(u64 dst, u64 src, u64 bytes, u32 thread, u32 threads) {
  if (dst == src) return;
  // Whole accesses begin where `dst` is aligned; `src` is then as well.
  const u64 apart = (dst ^ src) | 16;
  const u64 width = apart & (~apart + 1);
  const u64 before = (~dst + 1) & (width - 1);
  const u64 head = before < bytes ? before : bytes;
  const u64 count = (bytes - head) / width;
  const u64 tail = head + count * width;
  const u64 to = dst + head;
  const u64 from = src + head;
  switch (width) {
    case 16:
      detail::copyWhole<ptx::Piece>(to, from, count, thread, threads);
      break;
    case 8:
      detail::copyWhole<u64>(to, from, count, thread, threads);
      break;
    case 4:
      detail::copyWhole<u32>(to, from, count, thread, threads);
      break;
    case 2:
      detail::copyWhole<u16>(to, from, count, thread, threads);
      break;
    default:
      detail::copyWhole<u8>(to, from, count, thread, threads);
  }
  // Less than an access at either end.
  for (u64 i = thread; i < head + (bytes - tail); i += threads) {
    const u64 at = i < head ? i : tail + (i - head);
    u8 value;
    ptx::get(src + at, value);
    ptx::set(dst + at, value);
  }
}

// ------------------------------------------------------------------------------------------------
// Bulk copies: one thread asks for kilobytes at a time, which the multiprocessor's own copy engine
// (TMA, from compute capability 9.0 on) brings into shared memory and takes out again.

// Buffers that a stage is divided into, and what it, and they, are aligned to.
constexpr u32 BULK_BUFFERS = 8;
constexpr u32 BULK_ALIGNMENT = 128;

// Shared memory of a block that bulk copies go through. Every thread of the block makes one, once in
// a launch; from then on nobody uses the memory otherwise.
struct Stage {
  // `memory` is aligned to BULK_ALIGNMENT; it takes some tens of KiB to keep memory busy, of which
  // the first BULK_ALIGNMENT bytes are for the stage's own use.
  CROSSWEFT_DEVICE Stage(void* memory, u32 bytes) : memory(memory), bytes(bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0 && bufferBytes() != 0) {
      for (u32 k = 0; k < BULK_BUFFERS; k++) ptx::initBarrier(barrier(k));
      *turns() = 0;
    }
#endif
  }

  CROSSWEFT_DEVICE u32 bufferBytes() const {
    const u32 whole = bytes < BULK_ALIGNMENT ? 0 : bytes - BULK_ALIGNMENT;
    return whole / BULK_BUFFERS / BULK_ALIGNMENT * BULK_ALIGNMENT;
  }

#if defined(__CUDA_ARCH__)
  // Where buffer `k` says that it is full; the first is where the stage begins in shared memory.
  CROSSWEFT_DEVICE u32 barrier(u32 k) const {
    return static_cast<u32>(__cvta_generic_to_shared(memory)) + k * 8;
  }

  // The turns that the buffers are in, a bit each: barriers last for a launch, copy after copy.
  CROSSWEFT_DEVICE u32* turns() const { return static_cast<u32*>(memory) + 2 * BULK_BUFFERS; }
#endif

  void* memory;
  u32 bytes;
};

namespace detail {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// One thread: copies through all buffers, round and round. Addresses and `bytes`, which is not 0,
// are multiples of 16.
CROSSWEFT_DEVICE void pump(const Stage& stage, u64 dst, u64 src, u64 bytes) {
  constexpr u32 KEPT = 2;
  constexpr u64 LEAST = 2048;
  // All buffers have something to do.
  const u64 share = (bytes + BULK_BUFFERS - 1) / BULK_BUFFERS;
  const u64 even = (share + BULK_ALIGNMENT - 1) / BULK_ALIGNMENT * BULK_ALIGNMENT;
  const u64 wanted = even < LEAST ? LEAST : even;
  const u32 most = stage.bufferBytes();
  const u32 size = wanted < most ? static_cast<u32>(wanted) : most;
  const auto barrier = [&](u32 k) { return stage.barrier(k); };
  const auto buffer = [&](u32 k) { return stage.barrier(0) + BULK_ALIGNMENT + k * size; };
  u64 from = 0;
  u32 next = 0;
  const auto ask = [&] {
    const u32 part = bytes - from < size ? static_cast<u32>(bytes - from) : size;
    ptx::bulkLoad(buffer(next), src + from, part, barrier(next));
    from += part;
    next = next + 1 == BULK_BUFFERS ? 0 : next + 1;
  };
  for (u32 k = 0; k < BULK_BUFFERS - KEPT && from < bytes; k++) ask();
  u32 current = 0, turns = *stage.turns();
  for (u64 to = 0; to < bytes;) {
    while (!ptx::isComplete(barrier(current), turns >> current & 1)) {
    }
    turns ^= 1u << current;
    const u32 part = bytes - to < size ? static_cast<u32>(bytes - to) : size;
    ptx::bulkStore(dst + to, buffer(current), part);
    to += part;
    current = current + 1 == BULK_BUFFERS ? 0 : current + 1;
    if (from < bytes) {
      // What is asked for next takes the place of what was stored before the last ones.
      ptx::bulkKeep<KEPT>();
      ask();
    }
  }
  ptx::bulkStored();
  ptx::fenceStored();
  *stage.turns() = turns;
}

#endif

}  // namespace detail

// Threads, all of the block: `copy`, through `stage`, which all give alike. Begins with a block
// barrier, and ends, as `copy`, with none. Before compute capability 9.0, or where the addresses are
// not alike to 16 bytes, it is `copy`.
CROSSWEFT_DEVICE void copyBulk(const Stage& stage, u64 dst, u64 src, u64 bytes, u32 thread,
                               u32 threads) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const u64 before = (~dst + 1) & 15;
  const u64 head = before < bytes ? before : bytes;
  const u64 whole = (bytes - head) / 16 * 16;
  if (whole != 0 && stage.bufferBytes() != 0 && ((dst ^ src) & 15) == 0) {
    if (dst == src) return;
    // What any thread wrote, or saw, before is there for the engine.
    ptx::fenceProxies();
    ptx::barrierOr(false);
    for (u64 i = thread; i < bytes - whole; i += threads) {
      const u64 at = i < head ? i : i + whole;
      u8 value;
      ptx::get(src + at, value);
      ptx::set(dst + at, value);
    }
    if (thread == 0) detail::pump(stage, dst + head, src + head, whole);
    return;
  }
#else
  (void)stage;
#endif
  copy(dst, src, bytes, thread, threads);
}

// ------------------------------------------------------------------------------------------------
// Packets: data and flag in one store, so that a receiver needs no other synchronisation.

// Payload bytes of a packet word, and its own bytes.
constexpr u64 PACKET_PAYLOAD = 4;
constexpr u64 PACKET_WORD = 8;

// 4 bytes of data and a 4-byte flag in one 8-byte access. Lies in device memory, 8-byte aligned.
struct alignas(8) LL8Packet {
  using Payload = u32;

  u32 data;
  u32 flag;

  CROSSWEFT_DEVICE void write(u32 value, u32 with) {
    ptx::store(reinterpret_cast<u64>(this), value | static_cast<u64>(with) << 32);
  }

  // Returns true while the packet has NOT come yet; else sets `value`.
  CROSSWEFT_DEVICE bool readOnce(u32 with, u32& value) const {
    const u64 word = ptx::load(reinterpret_cast<u64>(this));
    value = static_cast<u32>(word);
    return word >> 32 != with;
  }

  // Waits for the packet; `site` is for the error message.
  [[nodiscard]] CROSSWEFT_DEVICE Status read(const Block& block, const Site& site, u32 with,
                                             u32& value) const {
    const u64 address = reinterpret_cast<u64>(this);
    // Flag in the low half: that is what the message shows as the value seen.
    return block.waitFor(
        site, with,
        [&] {
          const u64 word = ptx::load(address);
          value = static_cast<u32>(word);
          return word >> 32 | word << 32;
        },
        [&](u64 seen) { return static_cast<u32>(seen) == with; });
  }

  // Makes it a packet of no epoch.
  CROSSWEFT_DEVICE void clear() { ptx::store(reinterpret_cast<u64>(this), 0); }
};

// Two LL8 packets in one 16-byte access: the same bytes in memory. 16-byte aligned.
struct alignas(16) LL16Packet {
  using Payload = uint2;

  u32 data1;
  u32 flag1;
  u32 data2;
  u32 flag2;

  CROSSWEFT_DEVICE void write(uint2 value, u32 with) { write(value.x, value.y, with); }

  CROSSWEFT_DEVICE void write(u32 value1, u32 value2, u32 with) {
    const u64 high = static_cast<u64>(with) << 32;
    ptx::storePair(reinterpret_cast<u64>(this), value1 | high, value2 | high);
  }

  // Returns true while the packet has NOT come yet, as a whole; else sets `value`.
  CROSSWEFT_DEVICE bool readOnce(u32 with, uint2& value) const {
    u64 a, b;
    ptx::loadPair(reinterpret_cast<u64>(this), a, b);
    value.x = static_cast<u32>(a);
    value.y = static_cast<u32>(b);
    return a >> 32 != with || b >> 32 != with;
  }

  // Waits for the packet; `site` is for the error message.
  [[nodiscard]] CROSSWEFT_DEVICE Status read(const Block& block, const Site& site, u32 with,
                                             uint2& value) const {
    const u64 address = reinterpret_cast<u64>(this);
    return block.waitFor(
        site, with,
        [&] {
          u64 a, b;
          ptx::loadPair(address, a, b);
          value.x = static_cast<u32>(a);
          value.y = static_cast<u32>(b);
          const u64 late = a >> 32 == with ? b : a;
          return late >> 32 | late << 32;
        },
        [&](u64 seen) { return static_cast<u32>(seen) == with; });
  }

  // Makes it a packet of no epoch.
  CROSSWEFT_DEVICE void clear() { ptx::storePair(reinterpret_cast<u64>(this), 0, 0); }
};

namespace detail {

// Up to four bytes, at any alignment, the rest of the word zero.
CROSSWEFT_DEVICE u32 loadBytes(u64 address, u64 count) {
  u32 data = 0;
  for (u64 k = 0; k < 4; k++) {
    u8 byte = 0;
    if (k < count) ptx::get(address + k, byte);
    data |= static_cast<u32>(byte) << (8 * k);
  }
  return data;
}

CROSSWEFT_DEVICE void storeBytes(u64 address, u32 data, u64 count) {
  for (u64 k = 0; k < 4; k++) {
    if (k < count) ptx::set(address + k, static_cast<u8>(data >> (8 * k)));
  }
}

CROSSWEFT_DEVICE u32 loadPayload(u64 address) {
  if (address % 4 != 0) return loadBytes(address, 4);
  u32 data;
  ptx::get(address, data);
  return data;
}

CROSSWEFT_DEVICE void storePayload(u64 address, u32 data) {
  if (address % 4 != 0) {
    storeBytes(address, data, 4);
  } else {
    ptx::set(address, data);
  }
}

CROSSWEFT_DEVICE uint2 loadPayloads(u64 address) {
  if (address % 8 != 0) return uint2{loadPayload(address), loadPayload(address + 4)};
  u64 both;
  ptx::get(address, both);
  return uint2{static_cast<u32>(both), static_cast<u32>(both >> 32)};
}

CROSSWEFT_DEVICE void storePayloads(u64 address, uint2 data) {
  if (address % 8 != 0) {
    storePayload(address, data.x);
    storePayload(address + 4, data.y);
  } else {
    ptx::set(address, data.x | static_cast<u64>(data.y) << 32);
  }
}

}  // namespace detail

// Threads: sends `bytes` bytes from `src`, of any alignment, as packets to `packets`, which is
// 8-byte aligned. Both packet types leave the same bytes; LL16 stores two at a time where they are
// 16-byte aligned.
template <class Packet = LL16Packet>
CROSSWEFT_DEVICE void copyToPackets(u64 packets, u64 src, u64 bytes, u32 thread, u32 threads,
                                    u32 flag) {
  const bool inPairs = sizeof(Packet) == sizeof(LL16Packet) && packets % sizeof(LL16Packet) == 0;
  const u64 share = inPairs ? 2 * PACKET_PAYLOAD : PACKET_PAYLOAD;
  for (u64 at = thread * share; at < bytes; at += threads * share) {
    const u64 to = packets + at * (PACKET_WORD / PACKET_PAYLOAD);
    const u64 rest = bytes - at;
    auto first = reinterpret_cast<LL8Packet*>(to);
    if (inPairs && rest >= share) {
      reinterpret_cast<LL16Packet*>(to)->write(detail::loadPayloads(src + at), flag);
    } else if (rest >= PACKET_PAYLOAD) {
      first->write(detail::loadPayload(src + at), flag);
      if (inPairs && rest > PACKET_PAYLOAD) {
        const u64 second = src + at + PACKET_PAYLOAD;
        first[1].write(detail::loadBytes(second, rest - PACKET_PAYLOAD), flag);
      }
    } else {
      first->write(detail::loadBytes(src + at, rest), flag);
    }
  }
}

// Threads: waits for the packets of `bytes` bytes at `packets`, 8-byte aligned, and copies them to
// `dst`, of any alignment. Each thread learns of its own share only: agree by `Block::sync` before
// others' data is used. After a bad status `dst` is partly written.
template <class Packet = LL16Packet>
[[nodiscard]] CROSSWEFT_DEVICE Status copyFromPackets(const Block& block, const Site& site,
                                                      u64 dst, u64 packets, u64 bytes, u32 thread,
                                                      u32 threads, u32 flag) {
  const bool inPairs = sizeof(Packet) == sizeof(LL16Packet) && packets % sizeof(LL16Packet) == 0;
  const u64 share = inPairs ? 2 * PACKET_PAYLOAD : PACKET_PAYLOAD;
  for (u64 at = thread * share; at < bytes; at += threads * share) {
    const u64 from = packets + at * (PACKET_WORD / PACKET_PAYLOAD);
    const u64 rest = bytes - at;
    uint2 data{0, 0};
    Status status;
    if (inPairs && rest > PACKET_PAYLOAD) {
      status = reinterpret_cast<const LL16Packet*>(from)->read(block, site, flag, data);
    } else {
      status = reinterpret_cast<const LL8Packet*>(from)->read(block, site, flag, data.x);
    }
    if (status != Status::Ok) return status;
    if (inPairs && rest >= share) {
      detail::storePayloads(dst + at, data);
    } else if (rest >= PACKET_PAYLOAD) {
      detail::storePayload(dst + at, data.x);
      if (inPairs) detail::storeBytes(dst + at + PACKET_PAYLOAD, data.y, rest - PACKET_PAYLOAD);
    } else {
      detail::storeBytes(dst + at, data.x, rest);
    }
  }
  return Status::Ok;
}

// ------------------------------------------------------------------------------------------------
// Lines: packets of 128 bytes, of which 120 are payload, that lanes of a warp write and read
// together. They come in pairs: 240 bytes of payload in 256. Only where the machine keeps what one
// instruction of a warp stores in a line together, which the host knows (`Endpoint::keeps_lines` in
// Rust): GPUs of one kind, one and the same or joined by NVLink. Memory for lines is zero at first
// and never holds packets.

// Bytes of a line and of a pair of lines, the payload of a pair, and the lanes that have one.
constexpr u64 LINE = 128;
constexpr u64 LINE_PAIR = 256;
constexpr u64 LINE_PAIR_PAYLOAD = 240;
constexpr u32 LINE_LANES = 8;

namespace detail {

// Sixteen bytes, the first in the lowest bits of `low`.
struct Words {
  u64 low, high;
};

// The first `count` bytes of sixteen at any address, the rest zero.
CROSSWEFT_DEVICE Words loadPiece(u64 address, u64 count) {
  Words words{0, 0};
  if (count == 16 && address % 16 == 0) {
    ptx::Piece piece;
    ptx::get(address, piece);
    return {piece.a | static_cast<u64>(piece.b) << 32, piece.c | static_cast<u64>(piece.d) << 32};
  }
  // From the last to the first, each moving up those that were there.
  for (u64 k = count; k > 0; k--) {
    u8 byte;
    ptx::get(address + k - 1, byte);
    words.high = words.high << 8 | words.low >> 56;
    words.low = words.low << 8 | byte;
  }
  return words;
}

CROSSWEFT_DEVICE void storePiece(u64 address, Words words, u64 count) {
  if (count == 16 && address % 16 == 0) {
    const auto half = [](u64 word, u32 k) { return static_cast<u32>(word >> (32 * k)); };
    ptx::set(address, ptx::Piece{half(words.low, 0), half(words.low, 1), half(words.high, 0),
                                 half(words.high, 1)});
    return;
  }
  for (u64 k = 0; k < count; k++) {
    ptx::set(address + k, static_cast<u8>(words.low));
    words.low = words.low >> 8 | words.high << 56;
    words.high >>= 8;
  }
}

// A lane's part of pair `pair` of a message of `bytes` bytes: two pieces, at `near` and at `far`,
// of which so many bytes are there. The last lane has a flag where the others have the far one.
struct LinePart {
  u64 near, nearBytes, far, farBytes;

  CROSSWEFT_DEVICE LinePart(u64 pair, u32 lane, u64 bytes)
      : near(pair * LINE_PAIR_PAYLOAD + lane * 16),
        nearBytes(part(near, bytes)),
        far(near + LINE_LANES * 16),
        farBytes(lane == LINE_LANES - 1 ? 0 : part(far, bytes)) {}

 private:
  static CROSSWEFT_DEVICE u64 part(u64 at, u64 bytes) {
    const u64 left = bytes > at ? bytes - at : 0;
    return left < 16 ? left : 16;
  }
};

}  // namespace detail

// Threads, whole warps: sends `bytes` bytes from `src`, of any alignment, as lines to `lines`, which
// is aligned to LINE. `flag` is not 0.
CROSSWEFT_DEVICE void copyToLines(u64 lines, u64 src, u64 bytes, u32 thread, u32 threads,
                                  u32 flag) {
  const u32 lane = thread % LINE_LANES;
  const bool isLast = lane == LINE_LANES - 1;
  const u64 flags = flag | static_cast<u64>(~flag) << 32;
  for (u64 first = thread / 32 * (32 / LINE_LANES); first * LINE_PAIR_PAYLOAD < bytes;
       first += threads / LINE_LANES) {
    const u64 pair = first + thread % 32 / LINE_LANES;
    const detail::LinePart part(pair, lane, bytes);
    const detail::Words near = detail::loadPiece(src + part.near, part.nearBytes);
    const detail::Words far = detail::loadPiece(src + part.far, part.farBytes);
    const u64 at = lines + pair * LINE_PAIR + lane * 16;
    // Lanes choose values, not instructions, and come here together: a line is stored by one.
    ptx::anyInWarp(false);
    if (pair * LINE_PAIR_PAYLOAD < bytes) {
      ptx::storePair(at, near.low, isLast ? flags : near.high);
      ptx::storePair(at + LINE, isLast ? near.high : far.low, isLast ? flags : far.high);
    }
  }
}

// Threads, whole warps: waits for the lines of `bytes` bytes at `lines`, aligned to LINE, and copies
// them to `dst`, of any alignment. Each thread learns of its own warp's share only: agree by
// `Block::sync` before others' data is used. After a bad status `dst` is partly written.
[[nodiscard]] CROSSWEFT_DEVICE Status copyFromLines(const Block& block, const Site& site, u64 dst,
                                                    u64 lines, u64 bytes, u32 thread, u32 threads,
                                                    u32 flag) {
  const u32 lane = thread % LINE_LANES;
  const bool isLast = lane == LINE_LANES - 1;
  const u64 flags = flag | static_cast<u64>(~flag) << 32;
  for (u64 first = thread / 32 * (32 / LINE_LANES); first * LINE_PAIR_PAYLOAD < bytes;
       first += threads / LINE_LANES) {
    const u64 pair = first + thread % 32 / LINE_LANES;
    const detail::LinePart part(pair, lane, bytes);
    const bool isActive = pair * LINE_PAIR_PAYLOAD < bytes;
    const u64 at = lines + pair * LINE_PAIR + lane * 16;
    u64 a0 = 0, a1 = 0, b0 = 0, b1 = 0;
    // Only the last lane sees flags; the others' data is of the same load.
    const auto load = [&]() -> u64 {
      ptx::anyInWarp(false);
      if (isActive) {
        ptx::loadPair(at, a0, a1);
        ptx::loadPair(at + LINE, b0, b1);
      }
      if (!isActive || !isLast) return flag;
      const u64 late = a1 == flags ? b1 : a1;
      if (late == flags) return flag;
      // Not the flag, even if half of it is.
      return static_cast<u32>(late) == flag ? ~0ull : static_cast<u32>(late);
    };
    const auto done = [=](u64 seen) { return seen == flag; };
    const Status status = block.waitForWarp(site, flag, load, done);
    if (status != Status::Ok) return status;
    detail::storePiece(dst + part.near, {a0, isLast ? b0 : a1}, part.nearBytes);
    detail::storePiece(dst + part.far, {b0, b1}, part.farBytes);
  }
  return Status::Ok;
}

// ------------------------------------------------------------------------------------------------
// Semaphores

// One rank's end of a pair: a counter that the peer adds to and this rank waits on.
struct Semaphore {
  // Address of the counter that the peer adds to.
  u64 inbound;
  // Address of the peer's `inbound`, as mapped here; 0 if a proxy signals instead.
  u64 outbound;
  // Address of the count of waits done here. Only the waiting side touches it.
  u64 expected;
  // The peer's rank.
  u32 peer;
  // The channel's number, for messages.
  u32 channel;

  // One thread: one signal to the peer, after everything this thread did or saw before. Release.
  CROSSWEFT_DEVICE void signal() const { ptx::addRelease(outbound, 1); }

  // One thread: one signal to the peer; orders execution, not memory.
  CROSSWEFT_DEVICE void relaxedSignal() const { ptx::add(outbound, 1); }

  // One thread: takes one signal if it has come; does not block. Acquire, if true.
  CROSSWEFT_DEVICE bool poll() const {
    const u64 target = ptx::load(expected) + 1;
    if (!reached(ptx::loadAcquire(inbound), target)) return false;
    ptx::store(expected, target);
    return true;
  }

  // One thread: waits for one signal, and for what its sender did before it. Acquire. A signal
  // that did not come in time is not taken. `op` is a number of yours for the error message.
  [[nodiscard]] CROSSWEFT_DEVICE Status wait(const Block& block, u32 op = NO_OP) const {
    return waitWith(block, op, [this] { return ptx::loadAcquire(inbound); });
  }

  // One thread: waits for one signal; orders execution, not memory.
  [[nodiscard]] CROSSWEFT_DEVICE Status relaxedWait(const Block& block, u32 op = NO_OP) const {
    return waitWith(block, op, [this] { return ptx::load(inbound); });
  }

 private:
  template <class Load>
  CROSSWEFT_DEVICE Status waitWith(const Block& block, u32 op, Load load) const {
    const u64 target = ptx::load(expected) + 1;
    const Status status = block.waitFor(Site{WaitKind::Semaphore, peer, channel, op}, target, load,
                                        [=](u64 seen) { return reached(seen, target); });
    if (status == Status::Ok) ptx::store(expected, target);
    return status;
  }
};

// ------------------------------------------------------------------------------------------------
// Channels

// A channel over memory that both ends can address. The peer only waits; it takes part in nothing.
struct MemoryChannel {
  Semaphore semaphore;
  // The peer's memory, as mapped here.
  u64 remote;
  // This rank's memory.
  u64 local;
  // This rank's memory that receives the peer's packets.
  u64 packets;

  // Threads: copies `bytes` bytes from local to remote memory. The peer may look after a signal.
  CROSSWEFT_DEVICE void put(u64 dstOffset, u64 srcOffset, u64 bytes, u32 thread,
                            u32 threads) const {
    copy(remote + dstOffset, local + srcOffset, bytes, thread, threads);
  }

  // Threads: the same offset on both sides.
  CROSSWEFT_DEVICE void put(u64 offset, u64 bytes, u32 thread, u32 threads) const {
    put(offset, offset, bytes, thread, threads);
  }

  // Threads: copies `bytes` bytes from remote memory at `srcOffset` to local memory at
  // `dstOffset`. What the peer wrote before a signal that was waited for is what arrives.
  CROSSWEFT_DEVICE void get(u64 dstOffset, u64 srcOffset, u64 bytes, u32 thread,
                            u32 threads) const {
    copy(local + dstOffset, remote + srcOffset, bytes, thread, threads);
  }

  // Threads: the same offset on both sides.
  CROSSWEFT_DEVICE void get(u64 offset, u64 bytes, u32 thread, u32 threads) const {
    get(offset, offset, bytes, thread, threads);
  }

  // Threads, all of the block: `put` and `get` through `stage`, shared memory of the block, by the
  // copy engine of GPUs that have one. See `copyBulk`.
  CROSSWEFT_DEVICE void putBulk(const Stage& stage, u64 dstOffset, u64 srcOffset, u64 bytes,
                                u32 thread, u32 threads) const {
    copyBulk(stage, remote + dstOffset, local + srcOffset, bytes, thread, threads);
  }

  CROSSWEFT_DEVICE void getBulk(const Stage& stage, u64 dstOffset, u64 srcOffset, u64 bytes,
                                u32 thread, u32 threads) const {
    copyBulk(stage, local + dstOffset, remote + srcOffset, bytes, thread, threads);
  }

  // Any thread: element `index` of remote memory as an array of `T` of 1, 2, 4, 8 or 16 bytes.
  template <class T>
  CROSSWEFT_DEVICE T read(u64 index) const {
    return ptx::read<T>(remote + index * sizeof(T));
  }

  // Any thread: sets element `index` of remote memory. What a fused kernel does instead of `put`.
  template <class T>
  CROSSWEFT_DEVICE void write(u64 index, const T& value) const {
    ptx::write(remote + index * sizeof(T), value);
  }

  // Threads: sends `bytes` bytes of local memory as packets. `dstOffset` counts payload bytes and
  // is a multiple of 4: the packets themselves lie at twice that in the peer's packet memory, and
  // take twice the room.
  template <class Packet = LL16Packet>
  CROSSWEFT_DEVICE void putPackets(u64 dstOffset, u64 srcOffset, u64 bytes, u32 thread,
                                   u32 threads, u32 flag) const {
    const u64 to = remote + dstOffset * (PACKET_WORD / PACKET_PAYLOAD);
    copyToPackets<Packet>(to, local + srcOffset, bytes, thread, threads, flag);
  }

  // Threads: waits for the packets of `bytes` bytes at payload byte `srcOffset`, a multiple of 4,
  // of this rank's packet memory and copies them to local memory. Follow it by `Block::sync`.
  template <class Packet = LL16Packet>
  [[nodiscard]] CROSSWEFT_DEVICE Status unpackPackets(const Block& block, u64 dstOffset,
                                                      u64 srcOffset, u64 bytes, u32 thread,
                                                      u32 threads, u32 flag) const {
    const u64 from = packets + srcOffset * (PACKET_WORD / PACKET_PAYLOAD);
    return copyFromPackets<Packet>(block, packetSite(), local + dstOffset, from, bytes, thread,
                                   threads, flag);
  }

  // Any thread: waits for packet `index` of this rank's packet memory; sets `value`. `Packet` is
  // LL8Packet (4 bytes of payload) or LL16Packet (8; the memory must be 16-byte aligned).
  template <class Packet>
  [[nodiscard]] CROSSWEFT_DEVICE Status unpackPacket(const Block& block, u64 index, u32 flag,
                                                     typename Packet::Payload& value) const {
    const u64 from = packets + index * sizeof(Packet);
    return reinterpret_cast<const Packet*>(from)->read(block, packetSite(), flag, value);
  }

  // Threads, whole warps: sends `bytes` bytes of local memory as lines, where the machine keeps
  // them whole. `dstOffset` counts payload bytes and is a multiple of LINE_PAIR_PAYLOAD, which take
  // LINE_PAIR bytes of the peer's packet memory; that is aligned to LINE.
  CROSSWEFT_DEVICE void putLines(u64 dstOffset, u64 srcOffset, u64 bytes, u32 thread, u32 threads,
                                 u32 flag) const {
    const u64 to = remote + dstOffset / LINE_PAIR_PAYLOAD * LINE_PAIR;
    copyToLines(to, local + srcOffset, bytes, thread, threads, flag);
  }

  // Threads, whole warps: waits for the lines of `bytes` bytes at payload byte `srcOffset`, such a
  // multiple, of this rank's packet memory and copies them to local memory. Follow it by
  // `Block::sync`.
  [[nodiscard]] CROSSWEFT_DEVICE Status unpackLines(const Block& block, u64 dstOffset,
                                                    u64 srcOffset, u64 bytes, u32 thread,
                                                    u32 threads, u32 flag) const {
    const u64 from = packets + srcOffset / LINE_PAIR_PAYLOAD * LINE_PAIR;
    return copyFromLines(block, packetSite(), local + dstOffset, from, bytes, thread, threads,
                         flag);
  }

  // As Semaphore's, which see.
  CROSSWEFT_DEVICE void signal() const { semaphore.signal(); }
  CROSSWEFT_DEVICE void relaxedSignal() const { semaphore.relaxedSignal(); }
  CROSSWEFT_DEVICE bool poll() const { return semaphore.poll(); }
  [[nodiscard]] CROSSWEFT_DEVICE Status wait(const Block& block, u32 op = NO_OP) const {
    return semaphore.wait(block, op);
  }
  [[nodiscard]] CROSSWEFT_DEVICE Status relaxedWait(const Block& block, u32 op = NO_OP) const {
    return semaphore.relaxedWait(block, op);
  }

 private:
  CROSSWEFT_DEVICE Site packetSite() const {
    return Site{WaitKind::Packet, semaphore.peer, semaphore.channel, NO_OP};
  }
};

// What a trigger asks a proxy for. Kinds combine as bits.
constexpr u32 TRIGGER_PUT = 1;
constexpr u32 TRIGGER_SIGNAL = 2;
constexpr u32 TRIGGER_FLUSH = 4;

// Channel and memory ids are below this.
constexpr u32 MAX_ID = 1u << 20;

// One request to a proxy.
struct Trigger {
  // Of TRIGGER_PUT, TRIGGER_SIGNAL and TRIGGER_FLUSH; done in this order.
  u32 kind;
  // Ids at the proxy.
  u32 channel;
  u32 dstMemory;
  u32 srcMemory;
  u64 dstOffset;
  u64 srcOffset;
  u64 size;

  // The word that is stored last. Its top bit alternates from lap to lap around the ring.
  __host__ __device__ constexpr u64 headWord(u64 lap) const {
    const u64 mask = MAX_ID - 1;
    return (lap & 1) << 63 | (kind & 7ull) << 60 | (channel & mask) << 40 |
           (dstMemory & mask) << 20 | (srcMemory & mask);
  }
};

// Bytes of a trigger in the ring.
constexpr u64 TRIGGER_BYTES = 32;

// Requests of a kernel to a proxy thread. Any thread pushes; the proxy handles them in order.
struct Fifo {
  // The ring: `capacity` triggers.
  u64 ring;
  // Triggers pushed so far.
  u64 head;
  // Triggers handled so far; written by the proxy.
  u64 tail;
  // Slots; a power of two.
  u32 capacity;
  // The fifo's number, for messages.
  u32 id;

  // One thread: pushes a trigger; sets `position`, for `poll` and `sync`. Waits while the fifo is
  // full. What this thread wrote before is visible to the proxy when it handles the trigger.
  // Release. After a bad status the fifo is of no further use.
  [[nodiscard]] CROSSWEFT_DEVICE Status push(const Block& block, const Trigger& trigger,
                                             u64& position, u32 op = NO_OP) const {
    position = ptx::fetchAdd(head, 1);
    const u64 needed = position + 1 > capacity ? position + 1 - capacity : 0;
    const Status status = waitTail(block, WaitKind::FifoSpace, needed, op);
    if (status != Status::Ok) return status;
    const u64 slot = ring + (position & (capacity - 1)) * TRIGGER_BYTES;
    ptx::store(slot + 8, trigger.dstOffset);
    ptx::store(slot + 16, trigger.srcOffset);
    ptx::store(slot + 24, trigger.size);
    // Odd on the first lap, so that zeroed memory reads as empty.
    const u64 lap = (position & capacity) == 0;
    ptx::storeRelease(slot, trigger.headWord(lap));
    return Status::Ok;
  }

  [[nodiscard]] CROSSWEFT_DEVICE Status push(const Block& block, const Trigger& trigger) const {
    u64 position;
    return push(block, trigger, position);
  }

  // Any thread: whether the trigger at `position` has been handled; does not block. Acquire, if
  // true.
  CROSSWEFT_DEVICE bool poll(u64 position) const {
    return reached(ptx::loadAcquire(tail), position + 1);
  }

  // Any thread: waits until the trigger at `position` has been handled. Acquire.
  [[nodiscard]] CROSSWEFT_DEVICE Status sync(const Block& block, u64 position,
                                             u32 op = NO_OP) const {
    return waitTail(block, WaitKind::FifoDone, position + 1, op);
  }

 private:
  CROSSWEFT_DEVICE Status waitTail(const Block& block, WaitKind kind, u64 needed, u32 op) const {
    return block.waitFor(
        Site{kind, 0xffffffffu, id, op}, needed, [this] { return ptx::loadAcquire(tail); },
        [=](u64 seen) { return reached(seen, needed); });
  }
};

// A channel whose transfers a proxy thread does: copy engines, network cards, sockets. All calls
// are one thread's. They wait only for space in the fifo, but for flush and wait.
struct PortChannel {
  // Signals from the peer; `outbound` is unused, the proxy signals.
  Semaphore semaphore;
  // Where requests go.
  Fifo fifo;
  // The channel's id at the proxy.
  u32 channel;
  // Ids of the peer's and of this rank's memory at the proxy.
  u32 dstMemory;
  u32 srcMemory;

  // Asks for a copy of `bytes` bytes to the peer. The source must stay as it is until a later
  // flush, or until the peer answered a later signal.
  [[nodiscard]] CROSSWEFT_DEVICE Status put(const Block& block, u64 dstOffset, u64 srcOffset,
                                            u64 bytes) const {
    return fifo.push(block, trigger(TRIGGER_PUT, dstOffset, srcOffset, bytes));
  }

  // The same offset on both sides.
  [[nodiscard]] CROSSWEFT_DEVICE Status put(const Block& block, u64 offset, u64 bytes) const {
    return put(block, offset, offset, bytes);
  }

  // Asks for a signal to the peer, after the puts before it.
  [[nodiscard]] CROSSWEFT_DEVICE Status signal(const Block& block) const {
    return fifo.push(block, trigger(TRIGGER_SIGNAL, 0, 0, 0));
  }

  // `put`, then `signal`, in one request.
  [[nodiscard]] CROSSWEFT_DEVICE Status putWithSignal(const Block& block, u64 dstOffset,
                                                      u64 srcOffset, u64 bytes) const {
    return fifo.push(block, trigger(TRIGGER_PUT | TRIGGER_SIGNAL, dstOffset, srcOffset, bytes));
  }

  // The same offset on both sides.
  [[nodiscard]] CROSSWEFT_DEVICE Status putWithSignal(const Block& block, u64 offset,
                                                      u64 bytes) const {
    return putWithSignal(block, offset, offset, bytes);
  }

  // `putWithSignal`, then waits as `flush` does, in one request.
  [[nodiscard]] CROSSWEFT_DEVICE Status putWithSignalAndFlush(const Block& block, u64 dstOffset,
                                                              u64 srcOffset, u64 bytes) const {
    const u32 kind = TRIGGER_PUT | TRIGGER_SIGNAL | TRIGGER_FLUSH;
    return pushAndSync(block, trigger(kind, dstOffset, srcOffset, bytes));
  }

  // The same offset on both sides.
  [[nodiscard]] CROSSWEFT_DEVICE Status putWithSignalAndFlush(const Block& block, u64 offset,
                                                              u64 bytes) const {
    return putWithSignalAndFlush(block, offset, offset, bytes);
  }

  // Waits until everything asked for before has arrived at the peer: sources may be reused.
  [[nodiscard]] CROSSWEFT_DEVICE Status flush(const Block& block) const {
    return pushAndSync(block, trigger(TRIGGER_FLUSH, 0, 0, 0));
  }

  // As Semaphore's, which see. A signal comes after the puts that were asked for before it.
  CROSSWEFT_DEVICE bool poll() const { return semaphore.poll(); }
  [[nodiscard]] CROSSWEFT_DEVICE Status wait(const Block& block, u32 op = NO_OP) const {
    return semaphore.wait(block, op);
  }

 private:
  CROSSWEFT_DEVICE Trigger trigger(u32 kind, u64 dstOffset, u64 srcOffset, u64 size) const {
    return Trigger{kind, channel, dstMemory, srcMemory, dstOffset, srcOffset, size};
  }

  CROSSWEFT_DEVICE Status pushAndSync(const Block& block, const Trigger& request) const {
    u64 position;
    const Status status = fifo.push(block, request, position);
    return status == Status::Ok ? fifo.sync(block, position) : status;
  }
};

// A channel to a group at once, this rank included, over the members' mapped memory: reduce from
// all of it, broadcast to all of it. No multicast hardware is used.
struct SwitchChannel {
  // Address of the members' base addresses, in member order.
  u64 members;
  // Address of this member's semaphores with every member, in member order.
  u64 semaphores;
  // Members.
  u32 count;
  // This member's index.
  u32 index;

  // Any thread: element `at` of every member's memory as an array of `T` of 1, 2, 4, 8 or 16
  // bytes, combined by `op(T, T)` in member order: the same bits on every member.
  template <class T, class Op>
  CROSSWEFT_DEVICE T reduce(u64 at, Op op) const {
    T sum = ptx::read<T>(base(0) + at * sizeof(T));
    for (u32 member = 1; member < count; member++) {
      sum = op(sum, ptx::read<T>(base(member) + at * sizeof(T)));
    }
    return sum;
  }

  // Any thread: the sum, in the arithmetic of `T`.
  template <class T>
  CROSSWEFT_DEVICE T reduce(u64 at) const {
    return reduce<T>(at, [](const T& a, const T& b) { return static_cast<T>(a + b); });
  }

  // Any thread: sets element `at` of every member's memory.
  template <class T>
  CROSSWEFT_DEVICE void broadcast(u64 at, const T& value) const {
    forAll([&](u32 member) { ptx::write(base(member) + at * sizeof(T), value); });
  }

  // Threads: copies `bytes` bytes from `src`, an address of this rank's, to byte `offset` of every
  // member's memory.
  CROSSWEFT_DEVICE void broadcast(u64 offset, u64 src, u64 bytes, u32 thread, u32 threads) const {
    forAll([&](u32 member) { copy(base(member) + offset, src, bytes, thread, threads); });
  }

  // One thread: one signal to every other member. Release.
  CROSSWEFT_DEVICE void signal() const {
    forAll([&](u32 member) {
      if (member != index) semaphore(member).signal();
    });
  }

  // One thread: as `signal`; orders execution, not memory.
  CROSSWEFT_DEVICE void relaxedSignal() const {
    forAll([&](u32 member) {
      if (member != index) semaphore(member).relaxedSignal();
    });
  }

  // One thread: waits for one signal of every other member. Acquire.
  [[nodiscard]] CROSSWEFT_DEVICE Status wait(const Block& block, u32 op = NO_OP) const {
    for (u32 k = 1; k < count; k++) {
      const Status status = semaphore((index + k) % count).wait(block, op);
      if (status != Status::Ok) return status;
    }
    return Status::Ok;
  }

  // One thread: as `wait`; orders execution, not memory.
  [[nodiscard]] CROSSWEFT_DEVICE Status relaxedWait(const Block& block, u32 op = NO_OP) const {
    for (u32 k = 1; k < count; k++) {
      const Status status = semaphore((index + k) % count).relaxedWait(block, op);
      if (status != Status::Ok) return status;
    }
    return Status::Ok;
  }

  // One thread: waits until every member is here, and makes what they wrote before visible.
  [[nodiscard]] CROSSWEFT_DEVICE Status barrier(const Block& block, u32 op = NO_OP) const {
    signal();
    return wait(block, op);
  }

 private:
  // The tables never change.
  CROSSWEFT_DEVICE u64 base(u32 member) const {
    return reinterpret_cast<const u64*>(members)[member];
  }

  CROSSWEFT_DEVICE Semaphore semaphore(u32 member) const {
    return reinterpret_cast<const Semaphore*>(semaphores)[member];
  }

  // Each member begins with itself, so that they do not all write to the same one.
  template <class Body>
  CROSSWEFT_DEVICE void forAll(Body body) const {
    for (u32 k = 0; k < count; k++) body((index + k) % count);
  }
};

// ------------------------------------------------------------------------------------------------
// The host writes what kernels read, and the other way round. These lines are compared with the
// Rust definitions by `crates/crossweft-device/tests/header.rs`: one for each field, in order.

// NVRTC has no offsetof.
#if defined(__CUDACC_RTC__)
#define CROSSWEFT_OFFSET(type, field) __INTADDR__(&(static_cast<type*>(nullptr)->field))
#else
#define CROSSWEFT_OFFSET(type, field) __builtin_offsetof(type, field)
#endif

static_assert(sizeof(Site) == 16 && alignof(Site) == 4);
static_assert(CROSSWEFT_OFFSET(Site, kind) == 0);
static_assert(CROSSWEFT_OFFSET(Site, peer) == 4);
static_assert(CROSSWEFT_OFFSET(Site, channel) == 8);
static_assert(CROSSWEFT_OFFSET(Site, op) == 12);
static_assert(sizeof(Waiting) == 40 && alignof(Waiting) == 8);
static_assert(CROSSWEFT_OFFSET(Waiting, site) == 0);
static_assert(CROSSWEFT_OFFSET(Waiting, spins) == 16);
static_assert(CROSSWEFT_OFFSET(Waiting, expected) == 24);
static_assert(CROSSWEFT_OFFSET(Waiting, seen) == 32);
static_assert(sizeof(GpuContext) == 24 && alignof(GpuContext) == 8);
static_assert(CROSSWEFT_OFFSET(GpuContext, limitNs) == 0);
static_assert(CROSSWEFT_OFFSET(GpuContext, abort) == 8);
static_assert(CROSSWEFT_OFFSET(GpuContext, status) == 16);
static_assert(sizeof(StatusRecord) == 72 && alignof(StatusRecord) == 8);
static_assert(CROSSWEFT_OFFSET(StatusRecord, claims) == 0);
static_assert(CROSSWEFT_OFFSET(StatusRecord, stopped) == 8);
static_assert(CROSSWEFT_OFFSET(StatusRecord, rank) == 16);
static_assert(CROSSWEFT_OFFSET(StatusRecord, block) == 20);
static_assert(CROSSWEFT_OFFSET(StatusRecord, thread) == 24);
static_assert(CROSSWEFT_OFFSET(StatusRecord, reserved) == 28);
static_assert(CROSSWEFT_OFFSET(StatusRecord, waiting) == 32);
static_assert(sizeof(Semaphore) == 32 && alignof(Semaphore) == 8);
static_assert(CROSSWEFT_OFFSET(Semaphore, inbound) == 0);
static_assert(CROSSWEFT_OFFSET(Semaphore, outbound) == 8);
static_assert(CROSSWEFT_OFFSET(Semaphore, expected) == 16);
static_assert(CROSSWEFT_OFFSET(Semaphore, peer) == 24);
static_assert(CROSSWEFT_OFFSET(Semaphore, channel) == 28);
static_assert(sizeof(MemoryChannel) == 56 && alignof(MemoryChannel) == 8);
static_assert(CROSSWEFT_OFFSET(MemoryChannel, semaphore) == 0);
static_assert(CROSSWEFT_OFFSET(MemoryChannel, remote) == 32);
static_assert(CROSSWEFT_OFFSET(MemoryChannel, local) == 40);
static_assert(CROSSWEFT_OFFSET(MemoryChannel, packets) == 48);
static_assert(sizeof(Fifo) == 32 && alignof(Fifo) == 8);
static_assert(CROSSWEFT_OFFSET(Fifo, ring) == 0);
static_assert(CROSSWEFT_OFFSET(Fifo, head) == 8);
static_assert(CROSSWEFT_OFFSET(Fifo, tail) == 16);
static_assert(CROSSWEFT_OFFSET(Fifo, capacity) == 24);
static_assert(CROSSWEFT_OFFSET(Fifo, id) == 28);
static_assert(sizeof(PortChannel) == 80 && alignof(PortChannel) == 8);
static_assert(CROSSWEFT_OFFSET(PortChannel, semaphore) == 0);
static_assert(CROSSWEFT_OFFSET(PortChannel, fifo) == 32);
static_assert(CROSSWEFT_OFFSET(PortChannel, channel) == 64);
static_assert(CROSSWEFT_OFFSET(PortChannel, dstMemory) == 68);
static_assert(CROSSWEFT_OFFSET(PortChannel, srcMemory) == 72);
static_assert(sizeof(SwitchChannel) == 24 && alignof(SwitchChannel) == 8);
static_assert(CROSSWEFT_OFFSET(SwitchChannel, members) == 0);
static_assert(CROSSWEFT_OFFSET(SwitchChannel, semaphores) == 8);
static_assert(CROSSWEFT_OFFSET(SwitchChannel, count) == 16);
static_assert(CROSSWEFT_OFFSET(SwitchChannel, index) == 20);

// So are these numbers.
static_assert(static_cast<u32>(Status::Aborted) == 1);
static_assert(static_cast<u32>(Status::Deadline) == 2);
static_assert(static_cast<u32>(Status::Mismatch) == 3);
static_assert(static_cast<u32>(WaitKind::Semaphore) == 0);
static_assert(static_cast<u32>(WaitKind::Packet) == 1);
static_assert(static_cast<u32>(WaitKind::FifoSpace) == 2);
static_assert(static_cast<u32>(WaitKind::FifoDone) == 3);
static_assert(static_cast<u32>(WaitKind::Barrier) == 4);
static_assert(static_cast<u32>(WaitKind::Acquire) == 5);
static_assert(static_cast<u32>(WaitKind::Size) == 6);
static_assert(static_cast<u32>(WaitKind::Message) == 7);
static_assert(static_cast<u32>(WaitKind::Taken) == 8);
static_assert(static_cast<u32>(WaitKind::Envelope) == 9);
static_assert(static_cast<u32>(WaitKind::Failed) == 10);
static_assert(NO_OP == 4294967295);
static_assert(PACKET_PAYLOAD == 4);
static_assert(PACKET_WORD == 8);
static_assert(MAX_ID == 1048576);
static_assert(TRIGGER_BYTES == 32);
static_assert(LINE == 128);
static_assert(LINE_PAIR == 256);
static_assert(LINE_PAIR_PAYLOAD == 240);
static_assert(LINE_LANES == 8);
static_assert(flagOf(1, 0) == 1u);
static_assert(flagOf(1, 8) == 4054843393u);
static_assert(flagOf(7, 4096) == 2005925895u);
static_assert(flagOf(1048575, 1048576) == 2609905665u);
static_assert(Trigger{7, 5, 4, 3, 0, 0, 0}.headWord(1) == 17293828066665037827ull);
static_assert(Trigger{1, 1048575, 9, 2, 0, 0, 0}.headWord(2) == 2305841909711503362ull);

#undef CROSSWEFT_OFFSET
#undef CROSSWEFT_DEVICE

}  // namespace crossweft

// Runs the functions of crossweft/device.cuh on the host: every alignment and odd size of copies
// and packets, waits that end, and blocks of many threads that synchronise. What differs from a
// GPU is this file's machine: single accesses, barrier and clock.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define CROSSWEFT_HOST_TEST
#define __host__
#define __device__
#define __forceinline__ inline

struct Index {
  unsigned x;
};
thread_local Index threadIdx, blockIdx, blockDim;

struct uint2 {
  unsigned x, y;
};

#define CHECK(condition)                                                \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::printf("host.cpp:%d: not so: %s\n", __LINE__, #condition);   \
      std::exit(1);                                                     \
    }                                                                   \
  } while (0)

// What the threads of a block share.
struct Cta {
  std::barrier<> barrier;
  std::atomic<bool> any[3] = {};
  explicit Cta(unsigned threads) : barrier(threads) {}
};
thread_local Cta* cta;

void syncThreads() { cta->barrier.arrive_and_wait(); }

namespace crossweft::ptx {

using u64 = unsigned long long;

inline u64* word(u64 address) {
  CHECK(address % 8 == 0);
  return reinterpret_cast<u64*>(address);
}

inline u64 load(u64 at) { return __atomic_load_n(word(at), __ATOMIC_RELAXED); }
inline u64 loadAcquire(u64 at) { return __atomic_load_n(word(at), __ATOMIC_ACQUIRE); }
inline void store(u64 at, u64 value) { __atomic_store_n(word(at), value, __ATOMIC_RELAXED); }
inline void storeRelease(u64 at, u64 value) { __atomic_store_n(word(at), value, __ATOMIC_RELEASE); }
inline void add(u64 at, u64 value) { __atomic_fetch_add(word(at), value, __ATOMIC_RELAXED); }
inline void addRelease(u64 at, u64 value) { __atomic_fetch_add(word(at), value, __ATOMIC_RELEASE); }
inline u64 fetchAdd(u64 at, u64 value) {
  return __atomic_fetch_add(word(at), value, __ATOMIC_ACQ_REL);
}

inline void loadPair(u64 at, u64& a, u64& b) {
  CHECK(at % 16 == 0);
  a = load(at);
  b = load(at + 8);
}

inline void storePair(u64 at, u64 a, u64 b) {
  CHECK(at % 16 == 0);
  store(at, a);
  store(at + 8, b);
}

inline u64 timeNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

inline bool barrierOr(bool mine) {
  // Three in turn: one is read, the next may be written, the one before is cleared.
  thread_local unsigned turn = 0;
  auto& now = cta->any[turn % 3];
  if (mine) now = true;
  syncThreads();
  const bool any = now;
  cta->any[(turn + 2) % 3] = false;
  turn++;
  syncThreads();
  return any;
}

// Threads of a host do not write a line together: lines are not run here.
bool anyInWarp(bool mine);

struct alignas(16) Piece {
  unsigned a, b, c, d;
};

template <class T>
void get(u64 at, T& value) {
  CHECK(at % sizeof(T) == 0);
  std::memcpy(&value, reinterpret_cast<void*>(at), sizeof(T));
}

template <class T>
void set(u64 at, const T& value) {
  CHECK(at % sizeof(T) == 0);
  std::memcpy(reinterpret_cast<void*>(at), &value, sizeof(T));
}

}  // namespace crossweft::ptx

#include <crossweft/device.cuh>

using namespace crossweft;

namespace {

using Threads = std::vector<std::thread>;

// Starts `blocks` blocks of `threads` threads that run `kernel`.
void launch(Threads& all, unsigned blocks, unsigned threads, std::function<void()> kernel) {
  for (unsigned block = 0; block < blocks; block++) {
    const auto shared = std::make_shared<Cta>(threads);
    for (unsigned thread = 0; thread < threads; thread++) {
      all.emplace_back([=] {
        cta = shared.get();
        threadIdx = {thread};
        blockIdx = {block};
        blockDim = {threads};
        kernel();
        cta->barrier.arrive_and_drop();
      });
    }
  }
}

void join(Threads& all) {
  for (auto& thread : all) thread.join();
  all.clear();
}

// Nothing here takes nearly as long, unless it hangs.
const GpuContext SOON{20000000000, 0, 0};

u64 addressOf(const void* pointer) { return reinterpret_cast<u64>(pointer); }

constexpr u8 GUARD = 0xa5;
constexpr size_t ROOM = 2048;
constexpr size_t BEGIN = 64;

// Bytes with nothing else than guards in them, or such that differ from their neighbours.
struct alignas(64) Bytes {
  u8 bytes[ROOM];

  void guard() { std::memset(bytes, GUARD, ROOM); }
  void fill(u32 seed) {
    for (u32 i = 0; i < ROOM; i++) bytes[i] = static_cast<u8>((seed + i) * 40503u >> 5);
  }
  u64 at(size_t offset) const { return addressOf(bytes + BEGIN + offset); }
  // Whether there are guards everywhere but in `size` bytes from `offset` on, which are `same`.
  bool has(size_t offset, const u8* same, size_t size) const {
    for (size_t i = 0; i < ROOM; i++) {
      const bool in = i >= BEGIN + offset && i < BEGIN + offset + size;
      if (bytes[i] != (in ? same[i - BEGIN - offset] : GUARD)) return false;
    }
    return true;
  }
};

const size_t SIZES[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 64, 100, 501};

void copies() {
  static Bytes dst, src;
  for (const u32 threads : {1u, 3u, 8u}) {
    for (size_t to = 0; to < 17; to++) {
      for (size_t from = 0; from < 17; from++) {
        for (const size_t size : SIZES) {
          dst.guard();
          src.fill(static_cast<u32>(size));
          for (u32 thread = 0; thread < threads; thread++) {
            copy(dst.at(to), src.at(from), size, thread, threads);
          }
          CHECK(dst.has(to, src.bytes + BEGIN + from, size));
        }
      }
    }
  }
}

template <class Sender, class Receiver>
void packets() {
  static Bytes dst, src, between;
  const Block block(SOON, 0);
  for (const u32 threads : {1u, 3u}) {
    for (const size_t aligned : {0, 8}) {
      for (size_t to = 0; to < 9; to++) {
        for (size_t from = 0; from < 9; from++) {
          for (const size_t size : SIZES) {
            const u32 flag = flagOf(7, size);
            dst.guard();
            between.guard();
            src.fill(static_cast<u32>(size));
            const u8* data = src.bytes + BEGIN + from;
            for (u32 thread = 0; thread < threads; thread++) {
              copyToPackets<Sender>(between.at(aligned), src.at(from), size, thread, threads, flag);
            }
            // As the Rust side reads it.
            std::vector<u64> words((size + 3) / 4);
            for (size_t i = 0; i < 4 * words.size(); i++) {
              const u64 byte = i < size ? data[i] : 0;
              words[i / 4] |= byte << (8 * (i % 4)) | static_cast<u64>(flag) << 32;
            }
            const auto expected = reinterpret_cast<const u8*>(words.data());
            CHECK(between.has(aligned, expected, 8 * words.size()));
            for (u32 thread = 0; thread < threads; thread++) {
              const Site site{WaitKind::Packet, 0, 0, NO_OP};
              CHECK(copyFromPackets<Receiver>(block, site, dst.at(to), between.at(aligned), size,
                                              thread, threads, flag) == Status::Ok);
            }
            CHECK(dst.has(to, data, size));
          }
        }
      }
    }
  }
}

void waits() {
  alignas(64) u64 words[24] = {};
  u64& inbound = words[0];
  u64& peers = words[8];
  u64& expected = words[16];
  const Semaphore semaphore{addressOf(&inbound), addressOf(&peers), addressOf(&expected), 1, 9};
  StatusRecord record{};
  u64 abort = 0;
  const Block block(GpuContext{20000000, addressOf(&abort), addressOf(&record)}, 4);
  CHECK(semaphore.wait(block, 77) == Status::Deadline);
  CHECK(record.claims == 1 && record.stopped == 2 && record.rank == 4);
  const Waiting& waiting = record.waiting;
  CHECK(waiting.site.kind == WaitKind::Semaphore && waiting.site.peer == 1);
  CHECK(waiting.site.channel == 9 && waiting.site.op == 77);
  CHECK(waiting.spins > 0 && waiting.expected == 1 && waiting.seen == 0);

  // The wait took nothing; a signal ends a wait even after the deadline.
  inbound = 1;
  CHECK(semaphore.wait(block) == Status::Ok && expected == 1);
  CHECK(!semaphore.poll());
  inbound = 2;
  CHECK(semaphore.poll() && expected == 2);
  semaphore.signal();
  semaphore.relaxedSignal();
  CHECK(peers == 2);
  // Across the wrap.
  expected = ~0ull;
  inbound = 0;
  CHECK(semaphore.relaxedWait(block) == Status::Ok && expected == 0);

  abort = 1;
  const Block unlimited(GpuContext{0, addressOf(&abort), addressOf(&record)}, 4);
  CHECK(semaphore.wait(unlimited) == Status::Aborted);
  CHECK(record.claims == 2 && record.stopped == 2);

  LL8Packet packet{};
  u32 value = 0;
  packet.write(5, flagOf(3, 64));
  const Block other(GpuContext{0, 0, 0}, 1);
  const Site site{WaitKind::Packet, 0, 0, NO_OP};
  CHECK(packet.read(other, site, flagOf(3, 128), value) == Status::Mismatch);
  CHECK(packet.readOnce(flagOf(4, 64), value));
  CHECK(!packet.readOnce(flagOf(3, 64), value) && value == 5);
  packet.clear();
  CHECK(packet.readOnce(flagOf(3, 64), value));
}

void agreement() {
  Threads all;
  launch(all, 2, 5, [] {
    const Block block(SOON, 0);
    for (u32 round = 0; round < 200; round++) {
      const auto worst = static_cast<Status>(round % 4);
      const u32 mine = (threadIdx.x + round) % 5;
      Status status = mine == 0 ? worst : Status::Ok;
      if (mine == 1 && worst == Status::Mismatch) status = Status::Deadline;
      CHECK(block.sync(status) == worst);
    }
  });
  join(all);
}

void triggers() {
  constexpr u32 capacity = 4, pushers = 3, count = 1000;
  alignas(64) static u64 ring[4 * capacity], head[8], tail[8];
  const Fifo fifo{addressOf(ring), addressOf(head), addressOf(tail), capacity, 0};
  Threads all;
  launch(all, pushers, 1, [=] {
    const Block block(SOON, 0);
    for (u32 i = 0; i < count; i++) {
      u64 position;
      const Trigger trigger{TRIGGER_PUT, blockIdx.x, 1, 2, i, i * 3ull, i * 5ull};
      CHECK(fifo.push(block, trigger, position) == Status::Ok);
      if (i % 8 != 0) continue;
      CHECK(fifo.sync(block, position) == Status::Ok);
      CHECK(fifo.poll(position));
    }
  });
  const u64 end = ptx::timeNs() + SOON.limitNs;
  u64 next[pushers] = {};
  for (u64 position = 0; position < pushers * count; position++) {
    const u64* slot = ring + 4 * (position % capacity);
    const u64 lap = (position / capacity + 1) & 1;
    u64 word;
    while ((word = ptx::loadAcquire(addressOf(slot))) >> 63 != lap) {
      CHECK(ptx::timeNs() < end);
      std::this_thread::yield();
    }
    const u32 channel = word >> 40 & (MAX_ID - 1);
    CHECK(channel < pushers);
    const u64 i = next[channel]++;
    CHECK(word == (Trigger{TRIGGER_PUT, channel, 1, 2, 0, 0, 0}.headWord(lap)));
    CHECK(slot[1] == i && slot[2] == i * 3 && slot[3] == i * 5);
    ptx::storeRelease(fifo.tail, position + 1);
  }
  join(all);
}

void groups() {
  constexpr u32 members = 3, count = 31;
  static int memory[members][2 * count];
  alignas(64) static u64 counters[members][members][8], done[members][members][8];
  static Semaphore semaphores[members][members];
  static u64 bases[members];
  Threads all;
  for (u32 member = 0; member < members; member++) {
    bases[member] = addressOf(memory[member]);
    for (u32 i = 0; i < count; i++) memory[member][i] = static_cast<int>((member + 1) * i);
    for (u32 peer = 0; peer < members; peer++) {
      semaphores[member][peer] = {addressOf(counters[member][peer]),
                                  addressOf(counters[peer][member]),
                                  addressOf(done[member][peer]), peer, peer};
    }
  }
  for (u32 member = 0; member < members; member++) {
    const SwitchChannel channel{addressOf(bases), addressOf(semaphores[member]), members, member};
    launch(all, 1, 4, [=] {
      const Block block(SOON, channel.index);
      for (u32 round = 0; round < 50; round++) {
        if (threadIdx.x == 0) CHECK(channel.barrier(block) == Status::Ok);
        CHECK(block.sync() == Status::Ok);
        const u64 first = channel.index + channel.count * threadIdx.x;
        for (u64 i = first; i < count; i += channel.count * blockDim.x) {
          channel.broadcast(count + i, channel.reduce<int>(i));
        }
        syncThreads();
      }
      if (threadIdx.x == 0) CHECK(channel.barrier(block) == Status::Ok);
    });
  }
  join(all);
  for (u32 member = 0; member < members; member++) {
    for (u32 i = 0; i < count; i++) CHECK(memory[member][count + i] == static_cast<int>(6 * i));
  }
}

}  // namespace

int main() {
  copies();
  packets<LL8Packet, LL8Packet>();
  packets<LL8Packet, LL16Packet>();
  packets<LL16Packet, LL8Packet>();
  packets<LL16Packet, LL16Packet>();
  waits();
  agreement();
  triggers();
  groups();
}

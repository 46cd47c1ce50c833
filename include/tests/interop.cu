// The C++ side of crates/crossweft-channel/tests/interop_cuda.rs: each kernel talks to one that is
// written in Rust (kernels/src/bench.rs), to the proxy, or to itself on another rank.
#include <crossweft/device.cuh>

using namespace crossweft;

namespace {

// What word `i` of a pattern holds.
__device__ u64 pattern(u64 seed, u64 i) { return (seed ^ i) * 0x9e3779b97f4a7c15ull; }

}  // namespace

// As `crossweft_ping_pong`: two sides signal each other `rounds` times.
extern "C" __global__ void __launch_bounds__(256)
    interop_ping_pong(const Semaphore* semaphores, u32 firstSide, u32 rounds, u64* out,
                      GpuContext context) {
  const u32 side = firstSide + blockIdx.x;
  Block block(context, side);
  if (threadIdx.x != 0) return;
  const Semaphore semaphore = semaphores[side];
  const u64 start = ptx::timeNs();
  for (u32 round = 0; round < rounds; round++) {
    if (side == 0) semaphore.signal();
    if (semaphore.wait(block, round) != Status::Ok) return;
    if (side != 0) semaphore.signal();
  }
  out[side] = ptx::timeNs() - start;
}

// As `crossweft_packet_echo`: side 0 sends a number, side 1 sends it back, one more.
extern "C" __global__ void __launch_bounds__(256)
    interop_packet_echo(LL8Packet* packets, u32 firstSide, u32 rounds, u64* out,
                        GpuContext context) {
  const u32 side = firstSide + blockIdx.x;
  Block block(context, side);
  if (threadIdx.x != 0) return;
  LL8Packet& inbox = packets[side];
  LL8Packet& outbox = packets[side ^ 1];
  const Site site{WaitKind::Packet, side ^ 1, 0, NO_OP};
  const u64 start = ptx::timeNs();
  u32 number = 0;
  for (u32 round = 1; round <= rounds; round++) {
    if (side == 0) outbox.write(number, round);
    if (inbox.read(block, site, round, number) != Status::Ok) return;
    if (side != 0) outbox.write(number + 1, round);
  }
  out[2 * side] = ptx::timeNs() - start;
  out[2 * side + 1] = number;
}

// As `crossweft_fifo_push`, with channels from `firstChannel` on: every block pushes `count`
// triggers and waits until the last has been handled.
extern "C" __global__ void __launch_bounds__(256)
    interop_fifo_push(const Fifo* handle, u32 firstChannel, u32 count, u64* out,
                      GpuContext context) {
  Block block(context, 0);
  if (threadIdx.x != 0) return;
  const Fifo fifo = *handle;
  const u64 start = ptx::timeNs();
  u64 last = 0;
  for (u32 i = 0; i < count; i++) {
    const Trigger trigger{TRIGGER_PUT | TRIGGER_FLUSH, firstChannel + blockIdx.x, 1, 2, i, i * 3ull,
                          i * 5ull};
    if (fifo.push(block, trigger, last, i) != Status::Ok) return;
  }
  const u64 pushed = ptx::timeNs();
  if (count > 0 && fifo.sync(block, last, count) != Status::Ok) return;
  out[2 * blockIdx.x] = pushed - start;
  out[2 * blockIdx.x + 1] = ptx::timeNs() - start;
}

// Puts `bytes` bytes, one block's share each, and signals once for each block. What was put is
// looked at by `crossweft_pattern_check`.
extern "C" __global__ void __launch_bounds__(256)
    interop_put(MemoryChannel channel, u64 dstOffset, u64 srcOffset, u64 bytes) {
  const u64 share = (bytes + gridDim.x - 1) / gridDim.x;
  const u64 begin = share * blockIdx.x < bytes ? share * blockIdx.x : bytes;
  const u64 size = bytes - begin < share ? bytes - begin : share;
  channel.put(dstOffset + begin, srcOffset + begin, size, threadIdx.x, blockDim.x);
  __syncthreads();
  if (threadIdx.x == 0) channel.signal();
}

// The receiver of `crossweft_pattern_write`: waits for `signals` signals, then adds the number of
// words that are wrong to result[0], and one to result[1]. One block. If `get` is not 0, the words
// are taken from the peer's memory first.
extern "C" __global__ void __launch_bounds__(256)
    interop_check(MemoryChannel channel, u64 words, u64 seed, u64 signals, u64* result, u64 get,
                  GpuContext context) {
  Block block(context, 1);
  Status mine = Status::Ok;
  if (threadIdx.x == 0) {
    for (u32 k = 0; k < signals && mine == Status::Ok; k++) mine = channel.wait(block, k);
  }
  if (block.sync(mine) != Status::Ok) return;
  if (get != 0) channel.get(0, words * sizeof(u64), threadIdx.x, blockDim.x);
  __syncthreads();
  const auto local = reinterpret_cast<const u64*>(channel.local);
  for (u64 i = threadIdx.x; i < words; i += blockDim.x) {
    if (local[i] != pattern(seed, i)) atomicAdd_system(result, 1ull);
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd_system(result + 1, 1ull);
}

// Sends `bytes` bytes at the beginning of local memory as packets and unpacks as many from the
// peer to `dstOffset`. The peer runs `crossweft_one_shot_bf16`.
extern "C" __global__ void __launch_bounds__(256)
    interop_packets(MemoryChannel channel, u64 dstOffset, u64 bytes, u32 flag, u32 small,
                    GpuContext context) {
  Block block(context, 1);
  const u32 thread = threadIdx.x, threads = blockDim.x;
  Status mine;
  if (small != 0) {
    channel.putPackets<LL8Packet>(0, 0, bytes, thread, threads, flag);
    mine = channel.unpackPackets<LL8Packet>(block, dstOffset, 0, bytes, thread, threads, flag);
  } else {
    channel.putPackets(0, 0, bytes, thread, threads, flag);
    mine = channel.unpackPackets(block, dstOffset, 0, bytes, thread, threads, flag);
  }
  if (block.sync(mine) != Status::Ok) return;
}

// As `interop_put`, in bulk.
extern "C" __global__ void __launch_bounds__(256)
    interop_put_bulk(MemoryChannel channel, u64 dstOffset, u64 srcOffset, u64 bytes) {
  __shared__ alignas(BULK_ALIGNMENT) u8 memory[BULK_ALIGNMENT + BULK_BUFFERS * 4096];
  const u64 share = (bytes + gridDim.x - 1) / gridDim.x;
  const u64 begin = share * blockIdx.x < bytes ? share * blockIdx.x : bytes;
  const u64 size = bytes - begin < share ? bytes - begin : share;
  channel.putBulk(Stage(memory, sizeof(memory)), dstOffset + begin, srcOffset + begin, size,
                  threadIdx.x, blockDim.x);
  __syncthreads();
  if (threadIdx.x == 0) channel.signal();
}

// As `crossweft_exchange_lines`, with one block: sends `bytes` bytes at the beginning of local memory
// as lines, and unpacks as many from the peer to `dstOffset`.
extern "C" __global__ void __launch_bounds__(256)
    interop_lines(MemoryChannel channel, u64 dstOffset, u64 bytes, u32 flag, u32 rank,
                  GpuContext context) {
  Block block(context, rank);
  const u32 thread = threadIdx.x, threads = blockDim.x;
  channel.putLines(0, 0, bytes, thread, threads, flag);
  const Status mine = channel.unpackLines(block, dstOffset, 0, bytes, thread, threads, flag);
  if (block.sync(mine) != Status::Ok) return;
}

// Sends `count` pieces of `bytes` bytes through the proxy, with a signal each, and flushes; then
// waits for as many from the peer.
extern "C" __global__ void __launch_bounds__(32)
    interop_port(PortChannel channel, u64 dstOffset, u64 srcOffset, u64 bytes, u32 count, u32 rank,
                 GpuContext context) {
  Block block(context, rank);
  if (threadIdx.x != 0) return;
  for (u32 k = 0; k < count; k++) {
    const u64 dst = dstOffset + k * bytes, src = srcOffset + k * bytes;
    Status status;
    switch (k % 3) {
      case 0:
        status = channel.putWithSignal(block, dst, src, bytes);
        break;
      case 1:
        status = channel.putWithSignalAndFlush(block, dst, src, bytes);
        break;
      default:
        status = channel.put(block, dst, src, bytes);
        if (status == Status::Ok) status = channel.signal(block);
    }
    if (status != Status::Ok) return;
  }
  if (channel.flush(block) != Status::Ok) return;
  for (u32 k = 0; k < count; k++) {
    if (channel.wait(block, k) != Status::Ok) return;
  }
}

// All-reduce of `count` integers at `from` to `to`, both in elements: every member reduces its
// share and broadcasts it.
extern "C" __global__ void __launch_bounds__(256)
    interop_switch(SwitchChannel channel, u64 from, u64 to, u64 count, u32 rank,
                   GpuContext context) {
  Block block(context, rank);
  Status mine = Status::Ok;
  if (threadIdx.x == 0) mine = channel.barrier(block, 0);
  if (block.sync(mine) != Status::Ok) return;
  for (u64 i = channel.index + channel.count * threadIdx.x; i < count;
       i += channel.count * blockDim.x) {
    channel.broadcast(to + i, channel.reduce<int>(from + i));
  }
  __syncthreads();
  if (threadIdx.x == 0) mine = channel.barrier(block, 1);
  if (block.sync(mine) != Status::Ok) return;
}

// Compiles every function of crossweft/device.cuh once; what is not called is not looked at.
#include <crossweft/device.cuh>

using namespace crossweft;

struct alignas(16) Four {
  float x, y, z, w;
};

struct Half {
  u16 bits;
};

extern "C" __global__ void __launch_bounds__(256)
    memory_channel(MemoryChannel channel, GpuContext context, u64 bytes, u32 flag, float* out) {
  Block block(context, 0);
  const u32 thread = threadIdx.x, threads = blockDim.x;
  channel.put(0, 16, bytes, thread, threads);
  channel.put(16, bytes, thread, threads);
  channel.get(0, 16, bytes, thread, threads);
  channel.get(16, bytes, thread, threads);
  channel.write<Four>(thread, Four{1, 2, 3, 4});
  channel.write<u8>(thread, channel.read<u8>(thread));
  channel.write<Half>(thread, channel.read<Half>(thread));
  channel.write<double>(thread, channel.read<double>(thread));
  out[thread] = channel.read<float>(thread) + channel.read<Four>(thread).w;
  channel.putPackets(0, 0, bytes, thread, threads, flag);
  channel.putPackets<LL8Packet>(0, 0, bytes, thread, threads, flag);
  Status mine = channel.unpackPackets(block, 0, 0, bytes, thread, threads, flag);
  if (block.sync(mine) != Status::Ok) return;
  mine = channel.unpackPackets<LL8Packet>(block, 0, 0, bytes, thread, threads, flagOf(flag, bytes));
  if (block.sync(mine) != Status::Ok) return;
  u32 one = 0;
  uint2 two{0, 0};
  mine = channel.unpackPacket<LL8Packet>(block, thread, flag, one);
  if (block.sync(mine) != Status::Ok) return;
  mine = channel.unpackPacket<LL16Packet>(block, thread, flag, two);
  if (block.sync(mine) != Status::Ok) return;
  out[thread] += static_cast<float>(one + two.x + two.y);
  if (thread != 0) return;
  channel.signal();
  channel.relaxedSignal();
  while (!channel.poll()) {
  }
  if (channel.wait(block) != Status::Ok) return;
  if (channel.relaxedWait(block, 1) != Status::Ok) return;
}

extern "C" __global__ void __launch_bounds__(256)
    lines(MemoryChannel channel, GpuContext context, u64 bytes, u32 flag) {
  Block block(context, 0);
  const u32 thread = threadIdx.x, threads = blockDim.x;
  channel.putLines(LINE_PAIR_PAYLOAD, 3, bytes, thread, threads, flag);
  const Status mine = channel.unpackLines(block, 5, 0, bytes, thread, threads, flag);
  if (block.sync(mine) != Status::Ok) return;
}

extern "C" __global__ void __launch_bounds__(256) bulk(MemoryChannel channel, u64 bytes) {
  __shared__ alignas(BULK_ALIGNMENT) u8 memory[BULK_ALIGNMENT + BULK_BUFFERS * 2048];
  const Stage stage(memory, sizeof(memory));
  channel.putBulk(stage, 0, 16, bytes, threadIdx.x, blockDim.x);
  __syncthreads();
  channel.getBulk(stage, 16, 0, bytes, threadIdx.x, blockDim.x);
}

extern "C" __global__ void __launch_bounds__(256) packets(LL8Packet* small, LL16Packet* large) {
  u32 one;
  uint2 two;
  while (small->readOnce(1, one)) {
  }
  while (large->readOnce(1, two)) {
  }
  small->write(one, 2);
  large->write(two, 2);
  large->write(one, one, 3);
  small->clear();
  large->clear();
}

extern "C" __global__ void __launch_bounds__(32)
    port_channel(PortChannel channel, GpuContext context) {
  Block block(context, 0);
  if (threadIdx.x != 0) return;
  const Status all[] = {
      channel.put(block, 0, 8, 16),
      channel.put(block, 0, 16),
      channel.signal(block),
      channel.putWithSignal(block, 0, 8, 16),
      channel.putWithSignal(block, 0, 16),
      channel.putWithSignalAndFlush(block, 0, 8, 16),
      channel.putWithSignalAndFlush(block, 0, 16),
      channel.flush(block),
      channel.wait(block),
      channel.poll() ? Status::Ok : Status::Aborted,
  };
  for (const Status status : all) {
    if (status != Status::Ok) return;
  }
  u64 position;
  const Trigger trigger{TRIGGER_FLUSH, 1, 2, 3, 4, 5, 6};
  if (channel.fifo.push(block, trigger, position) != Status::Ok) return;
  while (!channel.fifo.poll(position)) {
  }
  if (channel.fifo.sync(block, position) != Status::Ok) return;
}

extern "C" __global__ void __launch_bounds__(256)
    switch_channel(SwitchChannel channel, GpuContext context, u64 src, u64 bytes) {
  Block block(context, 0);
  const u32 thread = threadIdx.x;
  Status mine = Status::Ok;
  if (thread == 0) mine = channel.barrier(block);
  if (block.sync(mine) != Status::Ok) return;
  const float sum = channel.reduce<float>(thread);
  const int most = channel.reduce<int>(thread, [](int a, int b) { return a > b ? a : b; });
  channel.broadcast(thread, sum + static_cast<float>(most));
  channel.broadcast(0, src, bytes, thread, blockDim.x);
  __syncthreads();
  if (thread != 0) return;
  channel.signal();
  channel.relaxedSignal();
  if (channel.wait(block) != Status::Ok) return;
  if (channel.relaxedWait(block) != Status::Ok) return;
}

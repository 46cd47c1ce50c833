// Each of two ranks scales its numbers on their way into the other's memory, and adds what comes
// from there to its own: y = x + factor * (the peer's x), in one kernel.
#include <crossweft/device.cuh>

using namespace crossweft;

// One channel for each block, so that a block waits for nobody but its counterpart.
struct Channels {
  MemoryChannel of[8];
};

extern "C" __global__ void __launch_bounds__(256)
    exchange_add(const __grid_constant__ Channels channels, GpuContext context, u32 rank,
                 const float* x, float* y, float factor, u64 count, u64 half) {
  const MemoryChannel& channel = channels.of[blockIdx.x];
  Block block(context, rank);
  const u64 first = u64{blockIdx.x} * blockDim.x + threadIdx.x;
  const u64 stride = u64{gridDim.x} * blockDim.x;
  // Straight from registers to the peer: no scaled copy is made here.
  for (u64 i = first; i < count; i += stride) channel.write(half + i, factor * x[i]);
  __syncthreads();
  Status mine = Status::Ok;
  if (threadIdx.x == 0) {
    channel.signal();
    mine = channel.wait(block);
  }
  if (block.sync(mine) != Status::Ok) return;
  const auto arrived = reinterpret_cast<const float*>(channel.local) + half;
  for (u64 i = first; i < count; i += stride) y[i] = x[i] + arrived[i];
}

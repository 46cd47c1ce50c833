// The copy, the addition and the one-shot of `crossweft_kernels::bench`, written for nvcc, to compare with:
//   nvcc -ptx -arch=compute_90 -O3 -o rivals.ptx benches/gpu/rivals.cu
//   CROSSWEFT_RIVALS_PTX=rivals.ptx cargo test --release -p crossweft-collective --test cuda_speed
#include <cuda_bf16.h>

extern "C" __global__ void __launch_bounds__(384)
rival_copy(uint4 *dst, const uint4 *src, unsigned long long bytes) {
    unsigned long long n = bytes / 16, step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
        dst[i] = a, dst[i + step] = b, dst[i + 2 * step] = c, dst[i + 3 * step] = d;
    }
    for (; i < n; i += step) dst[i] = src[i];
}

// As `rival_copy`, but each block its own contiguous share, as the operations of a plan have theirs.
extern "C" __global__ void __launch_bounds__(384)
rival_sliced_copy(uint4 *dst, const uint4 *src, unsigned long long bytes) {
    unsigned long long n = bytes / 16, share = (n + gridDim.x - 1) / gridDim.x, step = blockDim.x;
    unsigned long long i = share * blockIdx.x + threadIdx.x, end = min(share * blockIdx.x + share, n);
    for (; i + 3 * step < end; i += 4 * step) {
        uint4 a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
        dst[i] = a, dst[i + step] = b, dst[i + 2 * step] = c, dst[i + 3 * step] = d;
    }
    for (; i < end; i += step) dst[i] = src[i];
}

static __device__ unsigned add2(unsigned x, unsigned y) {
    __nv_bfloat162 a = *reinterpret_cast<__nv_bfloat162 *>(&x);
    __nv_bfloat162 b = *reinterpret_cast<__nv_bfloat162 *>(&y);
    float2 p = __bfloat1622float2(a), q = __bfloat1622float2(b);
    __nv_bfloat162 sum = __floats2bfloat162_rn(p.x + q.x, p.y + q.y);
    return *reinterpret_cast<unsigned *>(&sum);
}

static __device__ uint4 add8(uint4 x, uint4 y) {
    return make_uint4(add2(x.x, y.x), add2(x.y, y.y), add2(x.z, y.z), add2(x.w, y.w));
}

extern "C" __global__ void __launch_bounds__(384)
rival_add_bf16(uint4 *dst, const uint4 *a, const uint4 *b, unsigned long long elements) {
    unsigned long long n = elements / 8, step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + step < n; i += 2 * step) {
        uint4 x = a[i], y = b[i], z = a[i + step], w = b[i + step];
        dst[i] = add8(x, y), dst[i + step] = add8(z, w);
    }
    for (; i < n; i += step) dst[i] = add8(a[i], b[i]);
}

// As `rival_add_bf16`, in contiguous shares.
extern "C" __global__ void __launch_bounds__(384)
rival_sliced_add_bf16(uint4 *dst, const uint4 *a, const uint4 *b, unsigned long long elements) {
    unsigned long long n = elements / 8, share = (n + gridDim.x - 1) / gridDim.x, step = blockDim.x;
    unsigned long long i = share * blockIdx.x + threadIdx.x, end = min(share * blockIdx.x + share, n);
    for (; i + 3 * step < end; i += 4 * step) {
        uint4 x[4], y[4];
        for (int k = 0; k < 4; k++) x[k] = a[i + k * step], y[k] = b[i + k * step];
        for (int k = 0; k < 4; k++) dst[i + k * step] = add8(x[k], y[k]);
    }
    for (; i < end; i += step) dst[i] = add8(a[i], b[i]);
}

// `crossweft_kernels::FusedLaunch`.
struct Launch {
    unsigned long long input, output, bytes, step, epoch, packets, packets_half, blocks;
    unsigned long long limit_ns, abort, status;
    unsigned op, divisor, targets, sources, op_index, rank;
    unsigned long long target[16], source[16];
    unsigned peer[16];
};

static __device__ void send(unsigned long long to, unsigned a, unsigned b, unsigned flag) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(a), "r"(flag), "r"(b));
}

static __device__ uint4 receive(unsigned long long from) {
    uint4 words;
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}

// A one-shot all-reduce of two or more ranks in packets, as crossweft's in one piece, without what ends its
// waits.
extern "C" __global__ void __launch_bounds__(384) rival_one_shot(const __grid_constant__ Launch launch) {
    unsigned long long epoch;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(epoch) : "l"(launch.epoch));
    unsigned flag = unsigned(epoch % 0xfffffffe) + 1;
    unsigned long long half = (epoch & 1) * launch.packets_half;
    unsigned long long begin = min(launch.step * blockIdx.x, launch.bytes);
    unsigned long long end = min(begin + launch.step, launch.bytes);
    for (unsigned long long at = begin + 16 * threadIdx.x; at < end; at += 16 * blockDim.x) {
        uint4 own = *reinterpret_cast<const uint4 *>(launch.input + at);
        for (unsigned k = 0; k < launch.targets; k++) {
            unsigned long long to = launch.target[k] + half + 2 * at;
            send(to, own.x, own.y, flag), send(to + 16, own.z, own.w, flag);
        }
    }
    for (unsigned long long at = begin + 16 * threadIdx.x; at < end; at += 16 * blockDim.x) {
        uint4 sum;
        for (unsigned k = 0; k < launch.sources; k++) {
            uint4 piece;
            if (launch.source[k] == 0) {
                piece = *reinterpret_cast<const uint4 *>(launch.input + at);
            } else {
                unsigned long long from = launch.source[k] + half + 2 * at;
                uint4 low, high;
                do {
                    low = receive(from), high = receive(from + 16);
                } while (low.y != flag || low.w != flag || high.y != flag || high.w != flag);
                piece = make_uint4(low.x, low.z, high.x, high.z);
            }
            sum = k == 0 ? piece : add8(sum, piece);
        }
        *reinterpret_cast<uint4 *>(launch.output + at) = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long *left = reinterpret_cast<unsigned long long *>(launch.epoch + 64);
        if (launch.blocks == 1 || atomicAdd(left, 1ull) + 1 == launch.blocks) {
            *left = 0;
            *reinterpret_cast<volatile unsigned long long *>(launch.epoch) = epoch + 1;
        }
    }
}

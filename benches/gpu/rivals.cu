// The copy and the addition of `crossweft_kernels::bench`, written for nvcc, to compare with:
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

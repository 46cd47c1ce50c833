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

// `crossweft_kernels::OneShot`.
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

// `crossweft_kernels::GpuContext`.
struct Context {
    unsigned long long limit_ns, abort, status;
};

static __device__ unsigned long long time_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// What the threads of a block share about how waits end.
static __shared__ Context limits;
static __shared__ unsigned long long deadline;

static __device__ void open(const Context &context) {
    if (threadIdx.x == 0) limits = context, deadline = 0;
}

// What ends a wait: the host's word, or the time. Looked at now and then, out of the way.
static __device__ __noinline__ bool ended() {
    unsigned long long now = time_ns();
    unsigned long long end = atomicCAS(&deadline, 0ull, now + limits.limit_ns);
    bool aborted = *reinterpret_cast<volatile unsigned long long *>(limits.abort) != 0;
    if (!aborted && (end == 0 || now < end)) return false;
    atomicAdd_system(reinterpret_cast<unsigned long long *>(limits.status), 1ull);
    return true;
}

static __device__ void advance(unsigned long long at, unsigned long long epoch) {
    *reinterpret_cast<volatile unsigned long long *>(at + 64) = 0;
    *reinterpret_cast<volatile unsigned long long *>(at) = epoch + 1;
}

static __device__ bool counted(unsigned long long at, unsigned long long blocks) {
    return threadIdx.x == 0 &&
           (blocks == 1 || atomicAdd(reinterpret_cast<unsigned long long *>(at + 64), 1ull) + 1 == blocks);
}

// `rival_one_shot` with all that crossweft's does: waits end, a block whose predecessor was stopped does nothing, an
// operation that is known at run time.
extern "C" __global__ void __launch_bounds__(384) rival_one_shot_bounded(const __grid_constant__ Launch launch) {
    open(Context{launch.limit_ns, launch.abort, launch.status});
    unsigned long long epoch;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(epoch) : "l"(launch.epoch));
    unsigned long long begin = min(launch.step * blockIdx.x, launch.bytes);
    unsigned long long end = min(begin + launch.step, launch.bytes);
    unsigned long long first = begin + 16 * threadIdx.x, stride = 16 * blockDim.x;
    uint4 next = make_uint4(0, 0, 0, 0);
    if (first < end) next = *reinterpret_cast<const uint4 *>(launch.input + first);
    bool stopped = epoch == ~0ull;
    unsigned flag = unsigned(epoch % 0xfffffffe) + 1;
    unsigned long long half = (epoch & 1) * launch.packets_half;
    for (unsigned long long at = first; at < end && !stopped; at += stride) {
        uint4 own = next;
        if (at + stride < end) next = *reinterpret_cast<const uint4 *>(launch.input + at + stride);
        for (unsigned k = 0; k < launch.targets; k++) {
            unsigned long long to = launch.target[k] + half + 2 * at;
            send(to, own.x, own.y, flag), send(to + 16, own.z, own.w, flag);
        }
    }
    if (__syncthreads_or(stopped)) return;
    bool last = counted(launch.epoch, launch.blocks);
    for (unsigned long long at = first; at < end; at += stride) {
        uint4 sum;
        for (unsigned k = 0; k < launch.sources; k++) {
            uint4 piece;
            if (launch.source[k] == 0) {
                piece = *reinterpret_cast<const uint4 *>(launch.input + at);
            } else {
                unsigned long long from = launch.source[k] + half + 2 * at;
                uint4 low, high;
                for (unsigned spins = 1;; spins++) {
                    low = receive(from), high = receive(from + 16);
                    if (low.y == flag && low.w == flag && high.y == flag && high.w == flag) break;
                    if (spins % 1024 == 0 && ended()) return;
                }
                piece = make_uint4(low.x, low.z, high.x, high.z);
            }
            sum = k == 0 ? piece : add8(sum, piece);
        }
        *reinterpret_cast<uint4 *>(launch.output + at) = sum;
    }
    if (last) advance(launch.epoch, epoch);
}

// `crossweft_device::semaphore::Semaphore` and `crossweft_kernels::TwoShot`.
struct Semaphore {
    unsigned long long inbound, outbound, expected;
    unsigned peer, channel;
};
struct Shares {
    unsigned long long begin, end, step, bytes, epoch, packets, packets_half, blocks;
    unsigned long long limit_ns, abort, status, semaphores;
    unsigned op, divisor, sources, targets, peers, rank, first_wait, second_wait;
    unsigned long long target[16], source[16];
};

static __device__ void signal(const Semaphore &semaphore) {
    asm volatile("red.release.sys.global.add.u64 [%0], 1;" ::"l"(semaphore.outbound) : "memory");
}

// What call it is: said once, behind the counter, and compared once.
static __device__ void say(const Semaphore &semaphore, unsigned long long epoch, unsigned long long bytes) {
    volatile unsigned long long *tags = reinterpret_cast<volatile unsigned long long *>(semaphore.outbound + 8);
    tags[epoch & 1] = epoch << 48 | bytes;
}

static __device__ bool same_call(const Semaphore &semaphore, unsigned long long epoch, unsigned long long bytes) {
    volatile unsigned long long *tags = reinterpret_cast<volatile unsigned long long *>(semaphore.inbound + 8);
    return tags[epoch & 1] == (epoch << 48 | bytes);
}

static __device__ bool wait(const Semaphore &semaphore, unsigned long long target) {
    unsigned long long seen;
    for (unsigned spins = 1;; spins++) {
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(semaphore.inbound) : "memory");
        if (seen >= target) break;
        if (spins % 1024 == 0 && ended()) return false;
    }
    *reinterpret_cast<volatile unsigned long long *>(semaphore.expected) = target;
    return true;
}

// A two-shot all-reduce, as crossweft's in one piece: meet, reduce this rank's chunk of all inputs into all outputs, meet.
extern "C" __global__ void __launch_bounds__(384) rival_two_shot(const __grid_constant__ Shares launch) {
    open(Context{launch.limit_ns, launch.abort, launch.status});
    unsigned long long epoch, taken = 0;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(epoch) : "l"(launch.epoch));
    Semaphore semaphore{};
    bool meets = threadIdx.x < launch.peers, well = epoch != ~0ull;
    if (meets) {
        semaphore = reinterpret_cast<const Semaphore *>(launch.semaphores)[blockIdx.x * launch.peers + threadIdx.x];
        taken = *reinterpret_cast<volatile unsigned long long *>(semaphore.expected);
        if (well) say(semaphore, epoch, launch.bytes), signal(semaphore);
    }
    if (__syncthreads_or(!well)) return;
    bool last = counted(launch.epoch, launch.blocks);
    if (meets) well = wait(semaphore, taken + 1) && same_call(semaphore, epoch, launch.bytes);
    if (__syncthreads_or(!well)) return;
    unsigned long long begin = min(launch.begin + launch.step * blockIdx.x, launch.end);
    unsigned long long end = min(begin + launch.step, launch.end), stride = 16 * blockDim.x;
    unsigned long long at = begin + 16 * threadIdx.x;
    for (; at + 3 * stride + 16 <= end; at += 4 * stride) {
        uint4 sum[4], next[4];
        for (int i = 0; i < 4; i++) next[i] = *reinterpret_cast<const uint4 *>(launch.source[0] + at + i * stride);
        for (unsigned k = 0; k < launch.sources; k++) {
            uint4 now[4] = {next[0], next[1], next[2], next[3]};
            if (k + 1 < launch.sources)
                for (int i = 0; i < 4; i++)
                    next[i] = *reinterpret_cast<const uint4 *>(launch.source[k + 1] + at + i * stride);
            for (int i = 0; i < 4; i++) sum[i] = k == 0 ? now[i] : add8(sum[i], now[i]);
        }
        for (unsigned k = 0; k < launch.targets; k++)
            for (int i = 0; i < 4; i++) *reinterpret_cast<uint4 *>(launch.target[k] + at + i * stride) = sum[i];
    }
    for (; at < end; at += stride) {
        uint4 sum = *reinterpret_cast<const uint4 *>(launch.source[0] + at);
        for (unsigned k = 1; k < launch.sources; k++)
            sum = add8(sum, *reinterpret_cast<const uint4 *>(launch.source[k] + at));
        for (unsigned k = 0; k < launch.targets; k++) *reinterpret_cast<uint4 *>(launch.target[k] + at) = sum;
    }
    __syncthreads();
    if (meets) {
        signal(semaphore);
        if (!wait(semaphore, taken + 2)) return;
    }
    if (last) advance(launch.epoch, epoch);
}

// What the machine itself takes. One thread follows a pointer to itself; nanoseconds of `steps` loads.
extern "C" __global__ void probe_loads(unsigned long long at, unsigned steps, unsigned long long *out) {
    unsigned long long start = time_ns();
    for (unsigned i = 0; i < steps; i++)
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(at) : "l"(at) : "memory");
    out[0] = time_ns() - start + (at == 1);
}

// Two kernels throw a number to and fro; nanoseconds of `rounds` rounds. With `releases`, by release and acquire.
extern "C" __global__ void probe_flags(unsigned long long mine, unsigned long long theirs, unsigned rounds, unsigned first,
                                       unsigned releases, unsigned long long *out) {
    unsigned long long start = 0, limit = time_ns() + 2000000000ull;
    for (unsigned long long i = 1; i <= rounds; i++) {
        if (i == 2) start = time_ns();
        for (unsigned turn = 0; turn < 2; turn++) {
            if ((turn == 0) == (first != 0)) {
                if (releases)
                    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(theirs), "l"(i) : "memory");
                else
                    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(theirs), "l"(i) : "memory");
                continue;
            }
            unsigned long long seen = 0;
            for (unsigned spins = 1; seen != i; spins++) {
                if (releases)
                    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(mine) : "memory");
                else
                    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(mine) : "memory");
                if (spins % 65536 == 0 && time_ns() > limit) return;
            }
        }
    }
    out[0] = time_ns() - start;
}

extern "C" __global__ void probe_nothing() {}

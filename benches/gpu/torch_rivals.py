#!/usr/bin/env python3
"""Collectives of the library with NCCL's interface that torch finds, and torch's symmetric memory, measured as
`crossweft bench --device cuda` measures its own: bf16 in a CUDA graph of many calls, one call ahead to line the ranks
up, the slowest rank of each replay, median and least over the replays; sends and receives one by one, by the host's
clock. Microseconds by bytes of the larger of input and output.

  torchrun --nproc-per-node 2 -- benches/gpu/torch_rivals.py [--max BYTES] [--factor N] [NAME ...]

Another library than torch's own takes its place as LD_PRELOAD. All-reduce, broadcast and reduce are in place. Prints a
JSON object, `{"library": "2.28.9", "torch": ..., "absent": {...}, "times": {"all-gather": {"library": {"1024": [p50,
min], ...}, ...}, ...}}`; beside `library` there are, of all-reduce, `library, eager` (what a call takes the host, of
200 at once) and, with `--symmetric`, `one-shot` and `two-shot` of symmetric memory. `--rotate N`: N pairs of buffers
take turns. With `--device cpu` it is gloo on tensors of the host, one by one, to try this out. NVLink multicast is not
used: set NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1, or the figures are of something else.
"""

import argparse
import itertools
import json
import os
import statistics
import time

import torch
import torch.distributed as dist

NAMES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-recv"),
    *("reduce", "gather", "scatter"),
)
#: Those whose larger buffer has a block for each rank.
IN_BLOCKS = ("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter")
REPLAYS = 11
#: Timed one by one.
ITERATIONS = 50
#: Torch's one-shot all-reduce is not for more.
ONE_SHOT = 16 << 20


def slowest(times, device):
    """Median and least of the times, each of the slowest rank."""
    times = torch.tensor(times, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return statistics.median(times.tolist()), min(times.tolist())


def in_graph(calls, bytes_):
    """Of a call, in a graph of many."""
    count = 100 if bytes_ < 1 << 20 else 20
    # As often each pair of buffers.
    count = max(count, len(calls)) // len(calls) * len(calls)
    turn = itertools.cycle(calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(max(3, len(calls))):
            next(turn)()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                next(turn)()
        times = []
        for replay in range(REPLAYS + 1):
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            next(turn)()
            start.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            if replay:
                times.append(start.elapsed_time(end) * 1e3 / count)
    return slowest(times, "cuda")


def one_by_one(calls, device):
    """Of a call, from when the ranks have met until it is done."""
    turn = itertools.cycle(calls)
    times = []
    for _ in range(ITERATIONS + len(calls)):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        next(turn)()
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return slowest(times[len(calls) :], device)


def on_the_host(call):
    """What a call takes the thread that makes it."""
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        times.append((time.perf_counter() - start) * 1e6 / 200)
        torch.cuda.synchronize()
    return slowest(times, "cuda")


def call_of(name, count, device):
    """A call of the collective whose larger buffer has `count` elements; of sends and receives, a message."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def tensor(elements):
        return torch.ones(elements, dtype=torch.bfloat16, device=device)

    whole = tensor(count)
    if name in ("all-gather", "reduce-scatter", "gather", "scatter"):
        part = tensor(count // ranks)
    blocks = list(whole.chunk(ranks)) if name in ("gather", "scatter") and rank == 0 else None
    if name in ("all-to-all", "send-recv"):
        other = tensor(count)

    def ring():
        sent = dist.P2POp(dist.isend, whole, (rank + 1) % ranks)
        got = dist.P2POp(dist.irecv, other, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([sent, got]):
            work.wait()

    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send-recv": ring,
        "reduce": lambda: dist.reduce(whole, 0),
        "gather": lambda: dist.gather(part, blocks, 0),
        "scatter": lambda: dist.scatter(part, blocks, 0),
    }[name]


def symmetric_calls(count, turns):
    """Name -> calls of torch's symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name
    tensors = []
    for _ in range(turns):
        tensors.append(symmetric.empty(count, dtype=torch.bfloat16, device="cuda").zero_())
        symmetric.rendezvous(tensors[-1], dist.group.WORLD)
    ops = {"one-shot": torch.ops.symm_mem.one_shot_all_reduce, "two-shot": torch.ops.symm_mem.two_shot_all_reduce_}
    if 2 * count > ONE_SHOT:
        del ops["one-shot"]
    return {
        name: [lambda op=op, tensor=tensor: op(tensor, "sum", group) for tensor in tensors] for name, op in ops.items()
    }


def measured(name, size, options):
    """Bytes, and what -> times, of a collective."""
    ranks = dist.get_world_size()
    count = size // 2 // ranks * ranks if name in IN_BLOCKS else size // 2
    calls = [call_of(name, count, options.device) for _ in range(options.rotate)]
    if options.device == "cpu" or name == "send-recv":
        return 2 * count, {"library": one_by_one(calls, options.device)}
    found = {"library": in_graph(calls, size)}
    if name == "all-reduce" and options.rotate == 1:
        found["library, eager"] = on_the_host(calls[0])
    return 2 * count, found


def is_mapped(path):
    """Whether this process has loaded the file."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return any(line.rstrip().endswith(os.path.realpath(path)) for line in maps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES[:6], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--min", type=int, default=1024)
    parser.add_argument("--max", type=int, default=1 << 26)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--rotate", type=int, default=1, metavar="N", help="pairs of buffers that take turns")
    parser.add_argument("--symmetric", action="store_true", help="torch's symmetric memory, too")
    parser.add_argument("--preloaded", metavar="FILE", help="refuse to measure another library than this")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no {', '.join(sorted(unknown))}: {', '.join(NAMES)}")
    if options.preloaded and not is_mapped(options.preloaded):
        raise RuntimeError(f"{os.path.basename(options.preloaded)} is not loaded: the linker has refused it")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        library = ".".join(str(part) for part in torch.cuda.nccl.version())
    else:
        dist.init_process_group("gloo")
        library = "gloo"
    found, absent = {}, {}
    for name in options.names:
        times = found.setdefault(name, {})
        sizes = [options.min]
        while sizes[-1] * options.factor <= options.max:
            sizes.append(sizes[-1] * options.factor)
        for size in sizes:
            try:
                size, those = measured(name, size, options)
            except (RuntimeError, ValueError) as error:
                # What a library refuses, it refuses on every rank.
                absent[f"{name}, {size} B"] = str(error).splitlines()[0]
                continue
            for what, both in those.items():
                times.setdefault(what, {})[size] = both
        if options.symmetric and options.device == "cuda" and name == "all-reduce":
            for size in sizes:
                try:
                    for form, those in symmetric_calls(size // 2, options.rotate).items():
                        times.setdefault(form, {})[size] = in_graph(those, size)
                except (RuntimeError, ValueError) as error:
                    absent[f"symmetric memory, {size} B"] = str(error).splitlines()[0]
    if dist.get_rank() == 0:
        report = {"torch": torch.__version__, "library": library, "absent": absent, "times": found}
        print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

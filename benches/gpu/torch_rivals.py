#!/usr/bin/env python3
"""Collectives of the library with NCCL's interface that torch finds, and torch's symmetric memory, measured as
`crossweft bench --device cuda` measures its own: bf16 in a CUDA graph that has a call to line the ranks up, an event,
many calls, and another event; the slowest rank of each replay, median and least over the replays. Sends and receives
are timed one by one, by the host's clock. Microseconds by bytes of the larger of input and output.

  torchrun --nproc-per-node 2 -- benches/gpu/torch_rivals.py [--max BYTES] [--factor N] [NAME ...]

Another library than torch's own takes its place as LD_PRELOAD. All-reduce, broadcast and reduce are in place. Prints
JSON, a line when it is known: `{"library": "2.28.9", "torch": ...}`, then for each collective and size
`{"collective": "all-gather", "bytes": 1024, "times": {"library": [p50, min], ...}}`, or `{"absent": what, "why": ...}`.
Beside `library` there are `library, eager` (one call until it is done), `library, host` (what a call takes the host, of
200 at once, up to 1 MiB) and, of all-reduce with `--symmetric`, `one-shot` and `two-shot` of symmetric memory.
`--cold`: so many buffers take turns that none is in a cache, where crossweft can have as many. With `--device cpu` it
is gloo on tensors of the host, one by one, to try this out. NVLink multicast is not used: set NCCL_NVLS_ENABLE=0 and
TORCH_SYMM_MEM_DISABLE_MULTICAST=1, or the figures are of something else.
"""

import argparse
import datetime
import functools
import itertools
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from report import MOST_PAIRS, bytes_of, pairs, sizes_of  # noqa: E402, it lies beside this folder

NAMES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-recv"),
    *("reduce", "gather", "scatter"),
)
#: Those whose larger buffer has a block for each rank.
IN_BLOCKS = ("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter")
REPLAYS = 11
#: Timed one by one.
ITERATIONS = 50
#: Larger calls keep the device so busy that the host waits for it.
HOST = 1 << 20
#: What a call may wait for another rank, which may have failed.
LIMIT = datetime.timedelta(minutes=2)
#: Torch's one-shot all-reduce is not for more.
ONE_SHOT = 16 << 20


def first_line(error):
    return (str(error).splitlines() or [repr(error)])[0]


def slowest(times, device):
    """Median and least of the times, each of the slowest rank."""
    times = torch.tensor(times, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return statistics.median(times.tolist()), min(times.tolist())


@functools.cache
def no_events_in_graphs():
    """Why this torch cannot time events that a graph records; nothing if it can."""
    try:
        start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        stream, graph, something = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            start.record(stream)
            something.add_(1)
            end.record(stream)
        graph.replay()
        torch.cuda.synchronize()
        start.elapsed_time(end)
    except (TypeError, RuntimeError) as error:
        return first_line(error)
    return ""


def recorded(calls, count, stream):
    """What replays `count` calls behind one that lines the ranks up, and the events around them: all in one graph, as
    crossweft has them, or that call and the events outside, which then time the graph's launch too.
    """
    inside = not no_events_in_graphs()
    external = {"external": True} if inside else {}
    start, end = (torch.cuda.Event(enable_timing=True, **external) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        if inside:
            calls[0]()
            start.record(stream)
        for turn in range(count):
            calls[turn % len(calls)]()
        if inside:
            end.record(stream)

    def replay():
        if inside:
            return graph.replay()
        calls[0]()
        start.record(stream)
        graph.replay()
        end.record(stream)

    return replay, start, end


def in_graph(calls, message):
    """Of a call, in a graph of many; `message` is what crossweft goes by, too."""
    count = 100 if message < 1 << 20 else 20
    # As often each pair of buffers.
    count = max(count, len(calls)) // len(calls) * len(calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(max(3, len(calls))):
            calls[turn % len(calls)]()
        stream.synchronize()
        replay, start, end = recorded(calls, count, stream)
        times = []
        for number in range(REPLAYS + 1):
            dist.barrier()
            torch.cuda.synchronize()
            replay()
            stream.synchronize()
            if number:
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


def measured(name, size, options):
    """Bytes, and what -> times, of a collective."""
    ranks = dist.get_world_size()
    count = size // 2 // ranks * ranks if name in IN_BLOCKS else size // 2
    turns = pairs(name, size, ranks, in_place=True) if options.cold else 1
    calls = [call_of(name, count, options.device) for _ in range(turns)]
    if options.device == "cpu" or name == "send-recv":
        return 2 * count, {"library": one_by_one(calls, options.device)}
    found = {"library": in_graph(calls, size // ranks if name in IN_BLOCKS else size)}
    if not options.cold:
        found["library, eager"] = one_by_one(calls, options.device)
        if size <= HOST:
            found["library, host"] = on_the_host(calls[0])
    return 2 * count, found


def symmetric(name, size, options):
    """As `measured`, of all-reduce by torch's symmetric memory."""
    import torch.distributed._symmetric_memory as memory

    group, count = dist.group.WORLD.group_name, size // 2
    turns = pairs(name, size, dist.get_world_size(), in_place=True) if options.cold else 1
    # In one piece, as ranks meet for each.
    whole = memory.empty(turns * count, dtype=torch.bfloat16, device="cuda").zero_()
    memory.rendezvous(whole, dist.group.WORLD)
    tensors = whole.chunk(turns)
    ops = torch.ops.symm_mem
    calls = {"two-shot": [functools.partial(ops.two_shot_all_reduce_, one, "sum", group) for one in tensors]}
    if size <= ONE_SHOT:
        # Outputs of their own: of those that it allocates, the next is where the one before was.
        calls["one-shot"] = [
            functools.partial(ops.one_shot_all_reduce_out, one, "sum", group, torch.empty_like(one)) for one in tensors
        ]
    return 2 * count, {form: in_graph(those, size) for form, those in calls.items()}


def tell(**what):
    """Prints a line, at once: the next measurement may be the last."""
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


def compare(options):
    """Measures and tells everything, size by size."""
    ranks = dist.get_world_size()
    for name, size in itertools.product(options.names, sizes_of(options)):
        if options.cold and pairs(name, size, ranks) > MOST_PAIRS:
            continue
        ways = {name: measured}
        if options.symmetric and options.device == "cuda" and name == "all-reduce":
            ways["symmetric memory"] = symmetric
        for what, measure in ways.items():
            try:
                bytes_, times = measure(name, size, options)
            except (RuntimeError, ValueError) as error:
                # What a library refuses, it refuses on every rank.
                tell(absent=f"{what}, {size} B", why=first_line(error))
            else:
                tell(collective=name, bytes=bytes_, times=times)


def is_mapped(path):
    """Whether this process has loaded the file."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return any(line.rstrip().endswith(os.path.realpath(path)) for line in maps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES[:6], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--min", type=bytes_of, default=1024)
    parser.add_argument("--max", type=bytes_of, default=1 << 26)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--cold", action="store_true", help="so many buffers take turns that none is in a cache")
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
        dist.init_process_group("nccl", device_id=device, timeout=LIMIT)
        library = ".".join(str(part) for part in torch.cuda.nccl.version())
    else:
        dist.init_process_group("gloo", timeout=LIMIT)
        library = "gloo"
    tell(library=library, torch=torch.__version__)
    if options.device == "cuda" and (why := no_events_in_graphs()):
        tell(absent="events inside graphs", why=why)
    compare(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

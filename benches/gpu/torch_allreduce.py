#!/usr/bin/env python3
"""All-reduce of NCCL and of torch's symmetric memory, measured as `crossweft bench --device cuda` measures
its own: bf16 sums in a CUDA graph of many calls, one call ahead to line the ranks up, the slowest rank of
each replay, median and least over the replays; microseconds.

  torchrun --nproc-per-node 2 -- benches/gpu/torch_allreduce.py [--max BYTES] [--factor N]

Prints a JSON object. NVLink multicast is not used: set NCCL_NVLS_ENABLE=0 and
TORCH_SYMM_MEM_DISABLE_MULTICAST=1, or the figures are of something else.
"""

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

REPLAYS = 11


def measure(call, calls):
    """Median and least of the replays, of the slowest rank, in microseconds a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        times = []
        for replay in range(REPLAYS + 1):
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            start.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            if replay:
                times.append(start.elapsed_time(end) * 1e3 / calls)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    times = slowest.tolist()
    return statistics.median(times), min(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--min", type=int, default=1024)
    parser.add_argument("--max", type=int, default=1 << 26)
    parser.add_argument("--factor", type=int, default=4)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    group = dist.group.WORLD.group_name
    rows = []
    size = options.min
    while size <= options.max:
        calls = 100 if size < 1 << 20 else 20
        count = size // 2
        row = {"bytes": size}
        tensor = torch.ones(count, dtype=torch.bfloat16, device="cuda")
        row["nccl"] = measure(lambda: dist.all_reduce(tensor), calls)
        shared = symmetric.empty(count, dtype=torch.bfloat16, device="cuda")
        symmetric.rendezvous(shared, dist.group.WORLD)
        shared.zero_()
        for name in ("one_shot_all_reduce", "two_shot_all_reduce_"):
            if name.startswith("one") and size > 16 << 20:
                continue
            op = getattr(torch.ops.symm_mem, name)
            row[f"torch {name}"] = measure(lambda: op(shared, "sum", group), calls)
        rows.append(row)
        size *= options.factor
    if rank == 0:
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        print(json.dumps({"torch": torch.__version__, "nccl": version, "rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

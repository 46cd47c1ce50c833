"""All-reduce through torch.distributed (gloo) or DeepSpeed's shared-memory op, measured as
`crossweft bench all-reduce` measures. Started by torchrun; rank 0 prints one JSON object."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist


def iterations(size):
    return 200 if size <= 65536 else 50 if size <= 1 << 20 else 20 if size <= 8 << 20 else 8


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["gloo", "deepspeed"])
    parser.add_argument("min", type=int, help="smallest size, in bytes")
    parser.add_argument("max", type=int, help="largest size")
    parser.add_argument("factor", type=int, help="from one size to the next")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.backend == "gloo":
        version = f"torch {torch.__version__} gloo"

        def reduce(tensor):
            dist.all_reduce(tensor)

    else:
        import deepspeed
        from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

        version = f"DeepSpeed {deepspeed.__version__} SHM"
        # Read by the op, and set by DeepSpeed's launcher but not by torchrun.
        os.environ.setdefault("LOCAL_SIZE", str(world))
        op = ShareMemCommBuilder().load()
        op.initialize(world, rank)

        def reduce(tensor):
            # The op registers itself with torch; in place.
            torch.ops.deepspeed.inference_all_reduce_(tensor)

    rows = []
    size = options.min
    while size <= options.max:
        count = size // 4
        base = torch.arange(count, dtype=torch.int64)
        data = ((base + rank) % 7).to(torch.float32)
        expected = sum(((base + r) % 7) for r in range(world)).to(torch.float32)
        tensor = torch.empty_like(data)
        times = []
        n = iterations(size)
        for i in range(-max(1, n // 10), n):
            tensor.copy_(data)
            dist.barrier()
            start = time.perf_counter()
            reduce(tensor)
            taken = time.perf_counter() - start
            if i >= 0:
                times.append(taken * 1e6)
        wrong = int((tensor != expected).sum())
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        slowest = sorted(slowest.tolist())
        rows.append(
            {"bytes": size, "time_us_p50": slowest[n // 2], "time_us_min": slowest[0], "wrong": wrong}
        )
        size *= options.factor
    if rank == 0:
        print(json.dumps({"version": version, "rows": rows}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Tests as several processes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

LIMIT = timedelta(seconds=240)


def in_processes(ranks: int, rank_main: Callable[[], None], folder: Path, **environment: str) -> None:
    """Runs ``rank_main`` as every rank of a gloo group; raises what any of them raises."""
    store = folder / "store"
    arguments = (ranks, rank_main, str(store), environment)
    torch.multiprocessing.start_processes(_start, arguments, nprocs=ranks, join=True, start_method="spawn")


def _start(rank: int, ranks: int, rank_main: Callable[[], None], store: str, environment: dict[str, str]) -> None:
    import engine_stubs

    engine_stubs.install()
    os.environ.update(environment, CROSSWEFT_TIMEOUT="120")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=LIMIT)
    try:
        rank_main()
        dist.barrier()
    except BaseException:
        # Of several ranks that fail, torch tells of one, maybe one that only lost another.
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()

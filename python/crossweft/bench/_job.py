"""The ranks of a benchmark: those that a launcher has started, or processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

#: The longest that ranks wait for each other.
LIMIT = timedelta(minutes=10)


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(module: str, arguments: Sequence[str], ranks: int, seconds: float) -> int:
    """Runs a module once for every rank, as torchrun would, and returns the first exit code that is not 0.

    Ranks that are still there when another has failed, after ``seconds``, or when this process is told to end, are
    stopped. To be called in the main thread.
    """
    # Held here, so that its port is known to be free.
    store = dist.TCPStore(  # type: ignore[attr-defined,unused-ignore]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", module, *arguments]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + seconds
    try:
        for rank in range(ranks):
            own = {**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own))
        while True:
            codes = [process.poll() for process in processes]
            failed = next((code for code in codes if code), None)
            if failed is not None:
                return failed
            if None not in codes:
                return 0
            if time.monotonic() > end:
                print(f"stopped after {seconds:.0f} s", file=sys.stderr)
                return 1
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        signal.signal(signal.SIGTERM, before)


def bind() -> None:
    """Binds this rank, and all threads that it starts, to a processor of its own, if there are as many as ranks."""
    processors, local = sorted(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_RANK", "0"))
    if len(processors) >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        os.sched_setaffinity(0, {processors[local]})


def join(device: str) -> torch.device:
    """Joins the job and returns this rank's device."""
    if device != "cuda":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=LIMIT)
        return torch.device("cpu")
    chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    # Times and decisions are exchanged on the host; NCCL has no two ranks on one GPU.
    if share_devices():
        dist.init_process_group("gloo", timeout=LIMIT)
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=LIMIT, device_id=chosen)
    return chosen


def share_devices() -> bool:
    """Whether this host has fewer GPUs than ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return int(torch.cuda.device_count()) < ranks

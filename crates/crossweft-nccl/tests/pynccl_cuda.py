"""The communicators in Python that vLLM and SGLang have, on this library: two processes, each with a GPU of its own if
there are two, or else sharing one.

    python pynccl_cuda.py LIBRARY FOLDER

FOLDER has `vllm/` and `sglang/`, or one of them, as their wheels have them; of those only the modules `pynccl`,
`pynccl_wrapper` and `nccl` are used, and what they import of their packages is stood in for. Prints a line for each,
and exits with 1 if one has failed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import subprocess
import sys
import types
from typing import Any

RANKS = 2
WRAPPERS = {"vllm": "vllm.distributed.device_communicators", "sglang": "sglang.srt.distributed.device_communicators"}
# What only this library says.
VERSION = 23007
SYMMETRIC_BYTES = 1 << 20


def stand_in(name: str, **members: Any) -> None:
    """Makes a module, and the packages that it is in."""
    package = ""
    for part in name.split("."):
        package = f"{package}.{part}".lstrip(".")
        sys.modules.setdefault(package, types.ModuleType(package))
    module = sys.modules[name]
    for member, value in members.items():
        setattr(module, member, value)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


def load(folder: str, name: str) -> Any:
    """A module of theirs, from its file."""
    stand_in(name)
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, *name.split(".")) + ".py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def stand_in_for_vllm(library: str, folder: str) -> None:
    import torch

    class Environment(types.ModuleType):
        VLLM_NCCL_SO_PATH = library
        # As if windows were asked for: then all its functions must be there.
        VLLM_USE_NCCL_SYMM_MEM = True
        VLLM_DISABLE_PYNCCL = False

    class Platform:
        is_rocm = staticmethod(lambda: False)
        is_cuda = staticmethod(lambda: True)
        fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)

    def logger(_name: str) -> Any:
        log = logging.getLogger("vllm")
        for method in ("info", "warning", "debug"):
            setattr(log, f"{method}_once", getattr(log, method))
        return log

    stand_in("vllm.logger", init_logger=logger)
    stand_in("vllm.platforms", current_platform=Platform)
    stand_in("vllm.utils.torch_utils", current_stream=torch.cuda.current_stream)
    stand_in("vllm.distributed.utils", StatelessProcessGroup=type("StatelessProcessGroup", (), {}))
    sys.modules["vllm.envs"] = Environment("vllm.envs")
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    load(folder, "vllm.utils.nccl")


def stand_in_for_sglang(library: str, _folder: str) -> None:
    import torch

    os.environ["SGLANG_NCCL_SO_PATH"] = library
    stand_in("sglang.srt.distributed.utils", StatelessProcessGroup=type("StatelessProcessGroup", (), {}))
    stand_in("sglang.srt.utils.common", get_current_device_stream_fast=torch.cuda.current_stream)


def exercise(comm: Any, rank: int, device: Any) -> None:
    """Calls what both have, and checks what comes of it."""
    import torch

    def full(value: float, count: int = 1000, dtype: Any = torch.bfloat16) -> Any:
        return torch.full((count,), float(value), device=device, dtype=dtype)

    def equal(got: Any, expected: float) -> None:
        torch.cuda.synchronize()
        assert torch.equal(got, torch.full_like(got, expected)), f"{got[:8]} is not {expected}"

    data = full(rank + 1)
    total = comm.all_reduce(data)
    equal(data if total is None else total, 3)
    both = full(0, 2000)
    comm.all_gather(both, full(rank + 5))
    equal(both[:1000], 5)
    equal(both[1000:], 6)
    part = full(0)
    comm.reduce_scatter(part, full(rank + 1, 2000))
    equal(part, 3)
    data = full(rank + 7)
    comm.broadcast(data, 1)
    equal(data, 8)
    other, got = 1 - rank, full(0)
    comm.group_start()
    comm.send(full(rank + 1), other)
    comm.recv(got, other)
    comm.group_end()
    equal(got, other + 1)
    # In a graph, also what was not called before.
    graph, data, gathered = torch.cuda.CUDAGraph(), full(1, 5000), full(0, 10000)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total = comm.all_reduce(data)
        comm.all_gather(gathered, data)
    graph.replay()
    equal(data if total is None else total, 2)
    equal(gathered, 2 if total is None else 1)
    if hasattr(comm, "suspend"):
        comm.suspend()
        comm.resume()
        data = full(rank + 1)
        equal(comm.all_reduce(data), 3)


def one_process(library: str, folder: str, host: str) -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=RANKS)
    {"vllm": stand_in_for_vllm, "sglang": stand_in_for_sglang}[host](library, folder)
    wrapper = load(folder, f"{WRAPPERS[host]}.pynccl_wrapper")
    module = load(folder, f"{WRAPPERS[host]}.pynccl")
    comm = module.PyNcclCommunicator(dist.group.WORLD, device)
    # They turn themselves off without an error where a function is missing.
    assert comm.available
    comm.disabled = False
    assert comm.nccl_version == VERSION, comm.nccl_version
    exercise(comm, rank, device)
    functions = wrapper.NCCLLibrary.exported_functions
    if rank == 0:
        print(f"{host}: {len(functions)} functions, NCCL {comm.nccl_version}: ok", flush=True)
    if host == "vllm":
        comm.destroy()
    else:
        comm.nccl.ncclCommDestroy(comm.comm)
    dist.destroy_process_group()


def run(host: str) -> bool:
    """Whether both processes have ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {**os.environ, "RENDEZVOUS": f"tcp://127.0.0.1:{port}", "HOST_PROGRAM": host}
    command = [sys.executable, *sys.argv]
    processes = [subprocess.Popen(command, env={**own, "RANK": str(rank)}) for rank in range(RANKS)]
    codes = [process.wait() for process in processes]
    if any(codes):
        print(f"{host}: FAILED {codes}", flush=True)
    return not any(codes)


def main() -> int:
    folder = os.path.abspath(sys.argv[2])
    library = os.path.abspath(sys.argv[1])
    if "RANK" in os.environ:
        one_process(library, folder, os.environ["HOST_PROGRAM"])
        return 0
    there = [host for host in WRAPPERS if os.path.isdir(os.path.join(folder, host))]
    outcomes = [run(host) for host in there]
    return 0 if outcomes and all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

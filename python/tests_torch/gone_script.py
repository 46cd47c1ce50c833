"""A rank of two on CUDA, of which rank 1 is killed in the middle of a pass: ``gone_script.py WHEN HOW``, with the
variables of a launcher. Rank 0 says what it has made of that: it is told, or goes on without (``masking``, and by
DeepEP's names ``shrinking``)."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import crossweft as cw
from crossweft import moe
from crossweft.compat.deep_ep import Buffer

when, how = sys.argv[1:]
rank = int(os.environ["RANK"])
GPU = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(GPU)
#: Far less than what the calls may take.
SOON = 15.0

communicator = cw.Communicator.from_env(device=str(GPU), timeout=60.0)
tokens = torch.full((3, 256), rank + 1.0, dtype=torch.bfloat16, device=GPU)
experts = torch.tensor([[0, 1], [1, -1], [0, -1]], device=GPU)
weights = torch.tensor([[0.5, 0.25]] * 3, device=GPU)


class Plain:
    """A group and a handle."""

    def __init__(self) -> None:
        masking = how == "masking"
        self.group = moe.Group(
            communicator, experts=2, max_tokens=8, hidden=256, top_k=2, timeout=60.0, masking=masking
        )
        self.handle = self.group.handle(experts, weights)

    def send(self) -> None:
        self.handle.dispatch_send(tokens)

    def whole_pass(self) -> tuple[torch.Tensor, list[int]]:
        rows = self.handle.dispatch(tokens)
        sums = self.handle.combine(rows.tokens, weights="dispatched")
        counts = list(self.handle.counts().per_source)
        torch.cuda.synchronize()
        self.group.check()
        return sums, counts

    def masked(self) -> list[bool]:
        return self.group.masked


class Shrinking:
    """A buffer."""

    def __init__(self) -> None:
        self.buffer = Buffer(communicator, low_latency_mode=True, enable_shrink=True, timeout=60.0)

    def send(self) -> None:
        self.buffer.low_latency_dispatch(tokens, experts, 8, 2, use_fp8=False, return_recv_hook=True)

    def whole_pass(self) -> tuple[torch.Tensor, list[int]]:
        rows, _, handle, _, hook = self.buffer.low_latency_dispatch(
            tokens, experts, 8, 2, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None
        hook()
        sums, _, _ = self.buffer.low_latency_combine(rows, experts, weights, handle)
        return sums, (handle[1][0] & 0xFFFFFFFF).tolist()

    def masked(self) -> list[bool]:
        status = torch.full((2,), -1, dtype=torch.int32, device=GPU)
        self.buffer.low_latency_query_mask_buffer(status)
        return [bool(each) for each in status.tolist()]


job = Shrinking() if how == "shrinking" else Plain()


def factors(values: list[float]) -> torch.Tensor:
    return tokens * torch.tensor(values, dtype=torch.bfloat16, device=GPU).unsqueeze(1)


sums, counts = job.whole_pass()
assert torch.equal(sums, factors([0.75, 0.5, 0.5])), sums[:, 0]
assert counts == [2, 2], counts
communicator.barrier()
if rank == 1:
    if when == "dispatched":
        job.send()
        torch.cuda.synchronize()
    # The other one is waiting, or will be.
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)

start = time.monotonic()
try:
    sums, counts = job.whole_pass()
    # Rank 0 has expert 0, so the first choice of the first token, and of the last.
    if when == "dispatched":
        # What was sent has come before its sender went.
        assert counts == [2, 2], counts
    else:
        assert counts == [2, 0], counts
    assert torch.equal(sums, factors([0.5, 0.0, 0.5])), sums[:, 0]
    assert job.masked() == [False, True]
    # And from then on it is not waited for.
    sums, counts = job.whole_pass()
    assert counts == [2, 0] and torch.equal(sums, factors([0.5, 0.0, 0.5])), (counts, sums[:, 0])
    print("finished without rank 1", end=" ")
except cw.errors.Error as error:
    assert "rank 1" in str(error), error
    print(f"told: {type(error).__name__}: {error}", end=" ")
took = time.monotonic() - start
assert took < SOON, took
print(f"after {took:.1f} s", flush=True)
# What is gone cannot be left in good order.
os._exit(0)

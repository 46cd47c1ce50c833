"""What is measured: each a way to reduce, and maybe normalise, the same tensors."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..torch import AllReduceCommunicator
from ._nccl import Nccl, NcclError, crossweft_library

EPSILON = 1e-6
#: Beyond that, one-shot algorithms move more than anybody would wait for.
ONE_SHOT_LIMIT = 16 << 20
#: Why there is nothing to compare with where ranks share a GPU.
NCCL_ALONE = "NCCL cannot run two ranks on one GPU"


class LeftOut(Exception):
    """Why something cannot be measured here."""


@dataclass(frozen=True)
class Case:
    """One message: activations of some tokens."""

    tokens: int
    hidden: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.tokens, self.hidden

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's tensor."""
        return self.tokens * self.hidden * int(self.dtype.itemsize)

    def inputs(self, device: torch.device, turn: int = 0) -> torch.Tensor:
        """This rank's tensor in some turn: whole numbers, whose sums are exact in every type."""
        pattern = (torch.arange(7, device=device) + 3 * dist.get_rank() + turn) % 7
        return self._repeated(pattern, self.tokens * self.hidden).view(self.shape)

    def residual(self, device: torch.device) -> torch.Tensor:
        """What is added to the sum before it is normalised, the same on every rank."""
        pattern = torch.arange(5, device=device) - 2
        return self._repeated(pattern, self.tokens * self.hidden).view(self.shape)

    def weight(self, device: torch.device) -> torch.Tensor:
        """What normalised tokens are multiplied by."""
        return self._repeated(torch.arange(3, device=device) + 1, self.hidden)

    def _repeated(self, pattern: torch.Tensor, count: int) -> torch.Tensor:
        return pattern.to(self.dtype).repeat(-(-count // pattern.numel()))[:count].clone()


@dataclass(frozen=True)
class Call:
    """A call that can be repeated."""

    #: Writes all that the call reads, for some turn.
    refresh: Callable[[int], None]
    #: Does it, and returns the result.
    run: Callable[[], torch.Tensor]


@dataclass
class Machine:
    """What columns are made with."""

    device: torch.device
    ours: AllReduceCommunicator
    nccl_library: str | None
    #: Whether ranks share a GPU.
    shared: bool = False

    def stream(self) -> int:
        """The raw handle of the stream that calls go to."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0


class Column(ABC):
    """One way to do it. Made by each rank for itself; opened, bound and closed by all together."""

    name: str
    #: Whether calls are captured in CUDA graphs.
    is_graph = False
    #: Whether results are normalised.
    normalises = False
    #: Why it needs a GPU for each rank, if so.
    why_alone: str | None = None

    def __init__(self, machine: Machine) -> None:
        """Raises LeftOut if it cannot be measured here."""
        self.machine = machine
        if self.is_graph and machine.device.type != "cuda":
            raise LeftOut("CUDA graphs need a CUDA device")
        if machine.shared and self.why_alone is not None:
            raise LeftOut(self.why_alone)

    def open(self) -> None:  # noqa: B027
        """Joins the other ranks."""

    @abstractmethod
    def bind(self, case: Case) -> Call | None:
        """A call for a case, or ``None`` if it is not for that size."""

    def release(self) -> None:  # noqa: B027
        """Frees what the last call was bound to. Its tensors are not used any more."""

    def close(self) -> None:  # noqa: B027
        """Frees everything."""

    def _in_place(self, case: Case, reduce: Callable[[torch.Tensor], Any], tensor: torch.Tensor | None = None) -> Call:
        """A call that replaces its tensor."""
        turns = self._turns(case)
        buffer = torch.empty_like(turns[0]) if tensor is None else tensor

        def run() -> torch.Tensor:
            reduce(buffer)
            return buffer

        def refresh(turn: int) -> None:
            buffer.copy_(turns[turn % len(turns)])

        return Call(refresh, run)

    def _turns(self, case: Case) -> list[torch.Tensor]:
        return [case.inputs(self.machine.device, turn) for turn in range(2)]


class TorchEager(Column):
    """``torch.distributed``."""

    name = "torch eager"
    why_alone = NCCL_ALONE

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        return self._in_place(case, dist.all_reduce)


class CrossweftEager(Column):
    """This package."""

    name = "crossweft eager"

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        return self._in_place(case, self.machine.ours.all_reduce_)


class CrossweftGraph(CrossweftEager):
    """This package in a CUDA graph."""

    name = "crossweft graph"
    is_graph = True


class CrossweftSymmetric(Column):
    """This package in a CUDA graph, on tensors that all ranks reach."""

    name = "crossweft graph, symmetric"
    is_graph = True
    #: Bytes of memory for them.
    room = 1 << 30

    def open(self) -> None:
        """See Column."""
        ours = self.machine.ours
        # One of its own, as what a pool's calls compare is no part of the others.
        self._ours = AllReduceCommunicator(device=ours.device, max_bytes=ours.max_bytes, name="benchmark, symmetric")
        self._pool = self._ours.mem_pool(self.room)

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        # Segments of torch's allocator are larger than what is asked for.
        if case.nbytes + (32 << 20) > self.room - self._pool.used:
            return None
        with torch.cuda.use_mem_pool(self._pool, self.machine.device):
            tensor = torch.empty(case.shape, dtype=case.dtype, device=self.machine.device)
        return self._in_place(case, self._ours.all_reduce_, tensor)

    def close(self) -> None:
        """See Column."""
        self._ours.close()


class NcclGraph(Column):
    """NCCL in a CUDA graph, called as engines call it."""

    name = "NCCL graph"
    is_graph = True
    why_alone = NCCL_ALONE

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        try:
            # The one that torch has loaded.
            self._nccl = Nccl("libnccl.so.2")
        except NcclError as error:
            raise LeftOut(str(error)) from None

    def open(self) -> None:
        """See Column."""
        self._nccl.join()

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        return self._in_place(case, lambda tensor: self._nccl.all_reduce(tensor, self.machine.stream()))

    def close(self) -> None:
        """See Column."""
        self._nccl.close()


class CrossweftNccl(Column):
    """crossweft's library with NCCL's interface, on GPUs in a CUDA graph."""

    name = "crossweft by NCCL's interface"

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.is_graph = machine.device.type == "cuda"
        # Whose memory pointers are in.
        os.environ.setdefault("CROSSWEFT_DEVICE", machine.device.type)
        try:
            self._nccl = Nccl(crossweft_library(machine.nccl_library))
        except NcclError as error:
            raise LeftOut(str(error)) from None

    def open(self) -> None:
        """See Column."""
        self._nccl.join()

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        return self._in_place(case, lambda tensor: self._nccl.all_reduce(tensor, self.machine.stream()))

    def close(self) -> None:
        """See Column."""
        self._nccl.close()


class CrossweftNcclWindows(CrossweftNccl):
    """The same on registered memory."""

    name = "crossweft by NCCL's interface, registered"

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        shared = self._nccl.window(case.shape, case.dtype, self.machine.device)
        return self._in_place(case, lambda tensor: self._nccl.all_reduce(tensor, self.machine.stream()), shared)

    def release(self) -> None:
        """See Column."""
        self._nccl.free_windows()


class _Symmetric(Column):
    """torch's symmetric memory, in a CUDA graph. NVLink multicast is not asked for."""

    is_graph = True
    why_alone = "torch's symmetric memory needs a GPU for each rank"
    op: str
    limit: int | None = None

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        import torch.distributed._symmetric_memory as symmetric

        if self.limit is not None and case.nbytes > self.limit:
            return None
        shared = symmetric.empty(case.tokens * case.hidden, dtype=case.dtype, device=self.machine.device)
        group = dist.group.WORLD
        assert group is not None
        symmetric.rendezvous(shared, group)
        op = getattr(torch.ops.symm_mem, self.op)
        turns = self._turns(case)

        def run() -> torch.Tensor:
            out: torch.Tensor = op(shared, "sum", group.group_name)
            return out.view(case.shape)

        def refresh(turn: int) -> None:
            shared.copy_(turns[turn % len(turns)].view(-1))

        return Call(refresh, run)


class TorchOneShot(_Symmetric):
    """One-shot."""

    name = "torch one-shot graph"
    op = "one_shot_all_reduce"
    limit = ONE_SHOT_LIMIT


class TorchTwoShot(_Symmetric):
    """Two-shot."""

    name = "torch two-shot graph"
    op = "two_shot_all_reduce_"


class _Norm(Column):
    """All-reduce, then residual addition and RMS normalisation; on GPUs in a CUDA graph."""

    normalises = True

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.is_graph = machine.device.type == "cuda"

    def reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor by the sum of all ranks'."""
        raise NotImplementedError

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        device = self.machine.device
        turns, fresh, weight = self._turns(case), case.residual(device), case.weight(device)
        buffer, residual = torch.empty_like(turns[0]), torch.empty_like(fresh)

        def refresh(turn: int) -> None:
            buffer.copy_(turns[turn % len(turns)])
            residual.copy_(fresh)

        return Call(refresh, lambda: self._normalise(buffer, residual, weight))

    def _normalise(self, buffer: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.reduce(buffer)
        residual.add_(buffer)
        return torch.nn.functional.rms_norm(residual, weight.shape, weight, EPSILON)


class TorchThenNorm(_Norm):
    """``torch.distributed``, then torch."""

    name = "torch, then RMSNorm"
    why_alone = NCCL_ALONE

    def reduce(self, tensor: torch.Tensor) -> None:
        """See _Norm."""
        dist.all_reduce(tensor)


class CrossweftThenNorm(_Norm):
    """This package, then torch."""

    name = "crossweft, then RMSNorm"

    def reduce(self, tensor: torch.Tensor) -> None:
        """See _Norm."""
        self.machine.ours.all_reduce_(tensor)


class CrossweftFusedNorm(_Norm):
    """This package, in one call."""

    name = "crossweft with RMSNorm fused"

    def bind(self, case: Case) -> Call | None:
        """See Column."""
        # Tokens that are normalised in one call.
        return super().bind(case) if case.hidden % 8 == 0 and case.hidden <= 16384 else None

    def _normalise(self, buffer: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.machine.ours.all_reduce_rms_norm(buffer, weight, residual=residual, epsilon=EPSILON)


COLUMNS: tuple[type[Column], ...] = (
    TorchEager,
    CrossweftEager,
    CrossweftGraph,
    CrossweftSymmetric,
    NcclGraph,
    TorchOneShot,
    TorchTwoShot,
    CrossweftNccl,
    CrossweftNcclWindows,
    TorchThenNorm,
    CrossweftThenNorm,
    CrossweftFusedNorm,
)


def make(machine: Machine, kinds: tuple[type[Column], ...] = COLUMNS) -> tuple[list[Column], dict[str, str]]:
    """The columns that every rank can measure, and why each of the others is left out. Collective."""
    made, left_out = [], {}
    for kind in kinds:
        column, reason = None, None
        try:
            column = kind(machine)
        except LeftOut as error:
            reason = str(error)
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        reason = next(filter(None, reasons), None)
        if reason is not None:
            left_out[kind.name] = reason
        elif column is not None:
            column.open()
            made.append(column)
    return made, left_out


class Reference:
    """What results of a case must be, for two turns: as torch adds, and normalised as in 32 bits. Made by all ranks."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case = case
        self.sums = [case.inputs(device, turn) for turn in range(2)]
        for each in self.sums:
            dist.all_reduce(each)
        self._normalised: list[torch.Tensor] = []

    def normalised(self, turn: int) -> torch.Tensor:
        """In 32 bits."""
        if not self._normalised:
            case, device = self._case, self.sums[0].device
            residual, weight = case.residual(device).float(), case.weight(device).float()
            for each in self.sums:
                total = each.float() + residual
                self._normalised.append(torch.nn.functional.rms_norm(total, (case.hidden,), weight, EPSILON))
        return self._normalised[turn]


def check(column: Column, reference: Reference, call: Call) -> bool:
    """Whether results are right on every rank. Collective."""
    right = True
    for turn, total in enumerate(reference.sums):
        call.refresh(turn)
        found = call.run()
        if not column.normalises:
            right &= torch.equal(found, total)
            continue
        # Two roundings to the type, each of half of its precision.
        tolerance = 4 * torch.finfo(total.dtype).eps
        right &= torch.allclose(found.float(), reference.normalised(turn), rtol=tolerance, atol=tolerance)
    verdict = torch.tensor(int(right))
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())

"""Collectives on torch's tensors, for engines that choose between libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist

from .._counts import CommunicatorReport, Counts
from .._crossweft import Communicator
from .._torch import from_process_group
from ..errors import Mismatch, TensorError, UsageError
from ._dtypes import DTYPES, ReduceOp, op_name, reduce_op
from ._layout import flat, is_dense, written
from ._pool import SymmetricPool
from ._rms_norm import normalise
from ._streams import StreamOrder

if TYPE_CHECKING:
    from typing_extensions import Self

    from .._crossweft import _Op

#: The largest tensors that are taken unless a communicator is made for others.
MAX_BYTES = 256 << 20
#: The largest tokens that are normalised in the call which reduces them.
FUSED_HIDDEN = 16384


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is dense, with dimensions in the same order."""
    return tensor.detach().clone()


class AllReduceCommunicator:
    """One rank of a group of ranks, with collectives on torch's tensors.

    All ranks must make the same calls in the same order, on tensors of the same shape, type and strides. The first call
    of a type, operation or larger size prepares memory together with the other ranks, as :meth:`prepare` does; others
    allocate nothing but what they return.

    Calls on host tensors are complete when they return. Those on CUDA tensors are in the order of the current stream,
    and may be captured into CUDA graphs; a call on another stream than the one before waits for that one. Replays
    follow one another, and calls, in the same order on all ranks. What goes wrong on the device is raised by
    :meth:`check`, and by later calls.

    Whether a tensor is taken follows from its type, device, layout and size alone, so it is the same on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Communicator | None = None,
        *,
        device: str | torch.device = "cpu",
        max_bytes: int = MAX_BYTES,
        timeout: float = 600.0,
        bind: str | None = None,
        name: str | None = None,
    ) -> None:
        """Joins the ranks of ``group``: a process group of any backend, or a communicator that is there already.
        Without one, all ranks of ``torch.distributed``, or of the launcher (torchrun, MPI, Slurm, ``CROSSWEFT_*``).

        ``device`` is ``"cpu"``; ``"cuda"``, the device by this rank's number on its host; or a certain one:
        ``"cuda:2"``.
        Ranks may share a GPU. Those that are threads of one process need a current stream of their own each: on one
        stream, one's kernel would wait behind another's that waits for it.

        Collective. Tensors of more than ``max_bytes`` bytes are refused. ``timeout`` seconds bound every call. Across
        hosts, ``bind`` names an interface or address of the group's first rank. ``name`` is what reports call it.

        Raises LaunchError if there is neither a group nor a launcher, DeviceError, Mismatch if ranks give different
        ``max_bytes``, and what joining a job raises.
        """
        if isinstance(group, Communicator):
            self._communicator = group
        elif group is None and not (dist.is_available() and dist.is_initialized()):
            self._communicator = Communicator.from_env(device=str(device), timeout=timeout)
        else:
            self._communicator = from_process_group(group, str(device), timeout, bind)
        limits = [int(each) for each in self._communicator.all_gather_bytes(b"%d" % max_bytes)]
        if len(set(limits)) > 1:
            # Some would take what others refuse.
            raise Mismatch(f"ranks give different max_bytes: {limits}", rank=self._communicator.rank)
        #: Whether every tensor is refused; may be set, on all ranks alike.
        self.disabled = False
        self._rank = self._communicator.rank
        self._world_size = self._communicator.world_size
        self._device = torch.device(self._communicator.device)
        self._streams = StreamOrder(self._device) if self._device.type == "cuda" else None
        self._pool: SymmetricPool | None = None
        self._max_bytes = max_bytes
        self._name = name or f"{self._world_size} ranks on {self._device}"
        self._counts = Counts(self._name, self._communicator)

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        return self._device

    @property
    def max_bytes(self) -> int:
        """The largest tensor that is taken."""
        return self._max_bytes

    @property
    def name(self) -> str:
        """What reports call it."""
        return self._name

    @property
    def communicator(self) -> Communicator:
        """What it calls."""
        return self._communicator

    def __repr__(self) -> str:
        return f"<AllReduceCommunicator {self._name!r}: rank {self._rank} of {self._world_size} on {self._device}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves in good order. An error ends the job: the others would wait for this rank in vain."""
        self.disabled = True
        self._communicator.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Leaves in good order. Everything is refused from then on."""
        self.disabled = True
        self._communicator.leave()

    def report(self) -> CommunicatorReport:
        """What became of its calls; :func:`crossweft.report` has those of all."""
        return self._counts.report()

    # Which tensors are taken.

    def why_not(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> str | None:
        """Why an all-reduce of the tensor is refused, or ``None`` if it is not."""
        reason = self._why_refused(tensor)
        if reason is None and not is_dense(tensor):
            return "its elements do not fill a range of memory, so it would be copied"
        if reason is None and reduce_op(op) is None:
            return f"there is no operation {op_name(op)}"
        return reason

    def should_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> bool:
        """Whether an all-reduce of the tensor is taken without a copy. Counts those that are not."""
        reason = self.why_not(tensor, op)
        if reason is not None:
            self._counts.refuse("all_reduce", reason)
        return reason is None

    def _why_refused(self, tensor: torch.Tensor, bounded: bool = True) -> str | None:
        """Why no operation takes it. Reasons have no sizes of the tensor in them, so that there are only so many."""
        if self.disabled:
            return "the communicator is disabled"
        if tensor.device != self._device:
            return f"it is on {tensor.device}, the communicator on {self._device}"
        if tensor.layout is not torch.strided:
            return f"its layout is {tensor.layout}"
        if tensor.dtype not in DTYPES:
            return f"its elements are of {tensor.dtype}"
        if tensor.is_neg():
            return "it is a negative view, whose memory has the opposite numbers; give tensor.resolve_neg()"
        if bounded and tensor.nbytes > self._max_bytes:
            return f"it has more than max_bytes ({self._max_bytes}) bytes"
        return None

    def _accept(
        self, operation: str, tensor: torch.Tensor, op: ReduceOp = "sum", bounded: bool = True
    ) -> tuple[_Op, Any]:
        """How to reduce, or raises why the tensor is refused."""
        reason = self._why_refused(tensor, bounded)
        reduction = reduce_op(op)
        if reason is None and reduction is not None:
            return reduction
        reason = reason or f"there is no operation {op_name(op)}"
        self._counts.refuse(operation, reason)
        raise TensorError(f"{operation} does not take the tensor: {reason}", rank=self._rank, op=operation)

    def _fits(self, operation: str, out: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> None:
        same = tuple(out.shape) == tuple(shape) and out.dtype == like.dtype and out.device == like.device
        if same and not out.is_neg():
            return
        raise TensorError(
            f"{operation}: out is {tuple(out.shape)} of {out.dtype} on {out.device}; it must be {tuple(shape)} of "
            f"{like.dtype} on {like.device}, and no negative view",
            rank=self._rank,
            op=operation,
        )

    def _are_tokens(self, tensor: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
        """Whether a fused call takes the tensors, whatever ``hidden`` is."""

        def refuse(reason: str) -> NoReturn:
            operation = "all_reduce_rms_norm"
            self._counts.refuse(operation, reason)
            raise TensorError(f"{operation}: {reason}", rank=self._rank, op=operation)

        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            refuse(f"the tensor's elements are of {tensor.dtype}; it takes float32, float16 and bfloat16")
        for name, other in {"the tensor": tensor, **others}.items():
            if other is None:
                continue
            dtype = torch.float8_e4m3fn if name == "quantised" else tensor.dtype
            if other.dtype != dtype or other.device != tensor.device:
                refuse(f"{name} is of {other.dtype} on {other.device}; it must be of {dtype} on {tensor.device}")
            if not other.is_contiguous() or other.is_neg():
                refuse(f"{name} is not contiguous, or a negative view; give tensor.resolve_neg().contiguous()")
        out, residual = others["out"], others["residual"]
        if out is not None and residual is not None and out.data_ptr() == residual.data_ptr() and out.numel():
            refuse("out and residual are the same memory; both are written")

    def _count(
        self,
        operation: str,
        tensor: torch.Tensor,
        direct: bool,
        op: str = "",
        blocks: int = 1,
        result: torch.Tensor | None = None,
    ) -> None:
        """Counts a call on what the tensor is, or on a copy of it, and on its result unless that is in place."""
        path = "direct" if direct else "staged"
        pool = self._pool
        if pool is not None and direct and pool.holds(tensor) and (result is None or pool.holds(result)):
            path = "symmetric"
        self._counts.call(operation, path, DTYPES[tensor.dtype], op, tensor.nbytes * blocks)

    def _result(self, source: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A new tensor like another, or of another shape, in the pool if the other is."""
        pool = self._pool
        if pool is not None and pool.holds(source):
            with torch.cuda.use_mem_pool(pool, self._device):
                return self._new(source, shape)
        return self._new(source, shape)

    @staticmethod
    def _new(source: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
        if shape is None:
            return torch.empty_like(source, requires_grad=False)
        return torch.empty(tuple(shape), dtype=source.dtype, device=source.device)

    def _stream(self) -> int | None:
        """Where a call goes: the raw handle of a stream, or none on the host."""
        return None if self._streams is None else self._streams.enter()

    def check(self) -> None:
        """Raises what went wrong in calls on CUDA streams, once those have come to their end."""
        self._communicator.check()

    def mem_pool(self, nbytes: int) -> SymmetricPool:
        """A pool for ``torch.cuda.use_mem_pool``, of ``nbytes`` bytes on every rank, whose tensors all ranks reach:
        calls on those copy nothing that they need not. Collective; a communicator has one.

        Ranks must make and free the same tensors of the pool in the same order, so that those of a call lie at the same
        places on all of them; a difference is raised as Mismatch and ends the job. Where the pool has no room, torch
        raises its OutOfMemoryError. The memory stays until the communicator and all tensors of the pool are gone.

        Raises UsageError on the CPU, or if there is one already.
        """
        if self._device.type == "cpu":
            raise UsageError("mem_pool is for CUDA tensors, and this communicator is on the CPU")
        with torch.cuda.device(self._device):
            self._pool = SymmetricPool(self._communicator, nbytes)
        return self._pool

    def prepare(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        op: ReduceOp = "sum",
        operations: Sequence[Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]] = (
            "all_reduce",
        ),
    ) -> None:
        """Prepares calls with tensors of that shape or smaller, as the first ones do. Collective.

        Before a CUDA graph is captured, for one: what nobody has prepared is prepared while it is being captured only
        if all ranks capture it at the same time. Broadcasts are from rank 0. Raises UsageError for what calls refuse.
        """
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        reduction = reduce_op(op)
        if dtype not in DTYPES or tensor.nbytes > self._max_bytes or reduction is None:
            raise UsageError(f"no tensor of {dtype} with {tensor.nbytes} bytes is reduced by {op_name(op)}")
        for operation in operations:
            blocks = self._world_size if operation == "all_gather" else 1
            how = reduction[0] if operation in ("all_reduce", "reduce_scatter") else "sum"
            self._communicator.prepare(operation.replace("_", "-"), tensor.nbytes * blocks, dtype=DTYPES[dtype], op=how)

    # Collectives.

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
        """The reduction of all ranks' tensors: a new tensor, or ``out``.

        ``op`` is ``"sum"``, ``"avg"``, ``"prod"``, ``"min"``, ``"max"`` or a ``ReduceOp`` of torch, with PREMUL_SUM.
        Tensors that do not fill a range of memory are copied first. Raises TensorError for those that are refused.
        """
        name, scale = self._accept("all_reduce", tensor, op)
        direct = is_dense(tensor)
        source = tensor if direct else _dense(tensor)
        if out is None:
            result = self._result(source)
        else:
            self._fits("all_reduce", out, tensor.shape, tensor)
            # Elements meet by where they lie.
            direct = direct and out.stride() == source.stride()
            result = out if direct else torch.empty_like(source)
        self._count("all_reduce", tensor, direct, name, result=result)
        self._communicator.all_reduce(flat(source), flat(result), op=name, scale=scale, stream=self._stream())
        if out is None:
            return result
        if direct:
            written(out)
            return out
        return out.copy_(result)

    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """As :meth:`all_reduce`, in place. Returns the tensor."""
        name, scale = self._accept("all_reduce", tensor, op)
        direct = is_dense(tensor)
        self._count("all_reduce", tensor, direct, name)
        if direct:
            self._communicator.all_reduce(flat(tensor), op=name, scale=scale, stream=self._stream())
            written(tensor)
            return tensor
        dense = _dense(tensor)
        self._communicator.all_reduce(flat(dense), op=name, scale=scale, stream=self._stream())
        return tensor.copy_(dense)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """All ranks' tensors one after another along the first dimension: ``(world_size * n, ...)`` of ``(n, ...)``.
        Of tensors without dimensions, ``(world_size,)``."""
        self._accept("all_gather", tensor)
        shape = (self._world_size * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])
        return self._move("all_gather", tensor, shape, out, self._world_size)

    def reduce_scatter(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's block of the reduction of all tensors: ``(n, ...)`` of ``(world_size * n, ...)``."""
        name, scale = self._accept("reduce_scatter", tensor, op)
        shape = (self._block("reduce_scatter", tensor), *tensor.shape[1:])
        return self._move("reduce_scatter", tensor, shape, out, op=name, scale=scale)

    def all_to_all(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Block ``r`` of the tensor goes to rank ``r``, block ``r`` of the result comes from there.

        Blocks are along the first dimension, all of one size, or of the sizes given: both or none.
        Where sizes are given ``max_bytes`` does not hold: ranks' tensors may differ, and some would be refused alone.
        """
        self._accept("all_to_all", tensor, bounded=input_splits is None and output_splits is None)
        if input_splits is None and output_splits is None:
            self._block("all_to_all", tensor)
            return self._move("all_to_all", tensor, tensor.shape, out)
        if input_splits is None or output_splits is None or tensor.dim() == 0:
            raise UsageError("all_to_all: give input_splits and output_splits for a tensor with dimensions, or neither")
        if sum(input_splits) != tensor.shape[0]:
            raise UsageError(f"all_to_all: input_splits add up to {sum(input_splits)}, not {tensor.shape[0]}")
        row = math.prod(tensor.shape[1:])
        shape = (sum(output_splits), *tensor.shape[1:])
        counts = [[split * row for split in splits] for splits in (input_splits, output_splits)]
        return self._move("all_to_all", tensor, shape, out, counts=counts)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Replaces the tensor by that of rank ``root``. Returns it."""
        self._accept("broadcast", tensor)
        direct = is_dense(tensor)
        self._count("broadcast", tensor, direct)
        if direct:
            self._communicator.broadcast(flat(tensor), root=root, stream=self._stream())
            written(tensor)
            return tensor
        dense = _dense(tensor)
        self._communicator.broadcast(flat(dense), root=root, stream=self._stream())
        return tensor.copy_(dense)

    def _block(self, operation: str, tensor: torch.Tensor) -> int:
        """Rows of a rank's block."""
        if tensor.dim() and tensor.shape[0] % self._world_size == 0:
            return int(tensor.shape[0]) // self._world_size
        raise TensorError(
            f"{operation}: a tensor of shape {tuple(tensor.shape)} has no {self._world_size} blocks of one size along "
            "its first dimension",
            rank=self._rank,
            op=operation,
        )

    def _move(
        self,
        operation: Literal["all_gather", "reduce_scatter", "all_to_all"],
        tensor: torch.Tensor,
        shape: Sequence[int],
        out: torch.Tensor | None,
        blocks: int = 1,
        *,
        op: _Op | None = None,
        scale: Any = None,
        counts: list[list[int]] | None = None,
    ) -> torch.Tensor:
        """Calls a collective whose blocks are rows, so both sides must be contiguous."""
        if out is not None:
            self._fits(operation, out, shape, tensor)
        is_staged_out = out is not None and not out.is_contiguous()
        path = tensor.is_contiguous() and not is_staged_out
        source = tensor.contiguous()
        result = self._result(source, shape) if out is None or is_staged_out else out
        if counts is None:
            self._count(operation, tensor, path, op or "", blocks, result)
        else:
            # By messages, which do not know of symmetric memory.
            self._counts.call(f"{operation}_v", "direct" if path else "staged", DTYPES[tensor.dtype], "", tensor.nbytes)
        if operation == "all_gather":
            self._communicator.all_gather(source, result, stream=self._stream())
        elif operation == "reduce_scatter":
            self._communicator.reduce_scatter(source, result, op=op or "sum", scale=scale, stream=self._stream())
        elif counts is None:
            self._communicator.all_to_all(source, result, stream=self._stream())
        else:
            self._communicator.all_to_all_v(source, result, *counts, stream=self._stream())
        if out is None:
            return result
        if is_staged_out:
            return out.copy_(result)
        written(out)
        return out

    def all_reduce_rms_norm(
        self,
        tensor: torch.Tensor,
        weight: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        epsilon: float = 1e-6,
        out: torch.Tensor | None = None,
        quantised: torch.Tensor | None = None,
        scale: float | torch.Tensor | None = None,
        per: Literal["token", "group"] = "token",
    ) -> torch.Tensor:
        """All-reduce, residual addition and RMS normalisation of tokens, in one call; a new tensor, or ``out``.

        Contiguous tensors ``(..., hidden)`` of f32, f16 or bf16. ``residual``, the same on every rank, is replaced
        by its sum with the reduction. ``quantised`` (``torch.float8_e4m3fn``, like the tensor) gets the normalised
        tokens divided by ``scale``: a number, or a tensor of f32 that is written, ``(...,)`` per token or ``(...,
        ceil(hidden / 128))`` per group. Raises TensorError, UsageError.

        Reports count calls as ``fused``, and as ``unfused`` those whose ``hidden`` is no multiple of 8 or larger than
        16384: an all-reduce, and what torch does with the sum.
        """
        self._accept("all_reduce_rms_norm", tensor)
        if not tensor.dim() or weight.shape != tensor.shape[-1:]:
            # As bytes, several tokens could pass for one.
            raise TensorError(
                f"all_reduce_rms_norm: weight is {tuple(weight.shape)}, the tensor {tuple(tensor.shape)}",
                rank=self._rank,
                op="all_reduce_rms_norm",
            )
        result = torch.empty_like(tensor, requires_grad=False) if out is None else out
        self._fits("all_reduce_rms_norm", result, tensor.shape, tensor)
        self._are_tokens(tensor, {"weight": weight, "residual": residual, "quantised": quantised, "out": result})
        rest: Any = {"residual": residual, "epsilon": epsilon, "quantised": quantised, "scale": scale, "per": per}
        fused = weight.shape[0] % 8 == 0 and weight.shape[0] <= FUSED_HIDDEN
        path = "fused" if fused else "unfused"
        self._counts.call("all_reduce_rms_norm", path, DTYPES[tensor.dtype], "sum", tensor.nbytes)
        if fused:
            self._communicator.all_reduce_rms_norm(tensor, weight, result, **rest, stream=self._stream())
        else:
            total = torch.empty_like(tensor, requires_grad=False)
            self._communicator.all_reduce(tensor, total, stream=self._stream())
            normalise(total, weight, result, **rest)
        for each in (out, residual, quantised, scale):
            if isinstance(each, torch.Tensor):
                written(each)
        return result

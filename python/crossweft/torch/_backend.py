"""The ``crossweft`` backend of ``torch.distributed``, for host and CUDA tensors of ranks on one host.

Collectives on host tensors that their caller waits for run in the caller's thread; others in a thread of the group, in
order. Messages of every ordered pair of ranks and tag have a thread and a communicator of their own, since they may be
received in any order with those of other pairs. Collectives on CUDA tensors are put on streams; what they need is made
by the first one.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .._counts import Counts
from .._crossweft import Communicator
from .._torch import from_store
from ..errors import Error, PeerLost, TensorError, Timeout, UsageError
from ._dtypes import DTYPES, op_name, reduce_op
from ._lane import Lane
from ._sides import Call, CudaSide, CudaWork, HostSide, HostWork

NAME = "crossweft"
# Seconds that threads of a group that ends may take to end.
_PATIENCE = 2.0


class _Reduction:
    """How tensors of a type are reduced."""

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        found = reduce_op(op)
        if found is None:
            raise UsageError(
                f"{NAME} does not reduce by {op_name(op)}; there are SUM, AVG, PRODUCT, MIN, MAX and PREMUL_SUM"
            )
        self.op, self.scale = found
        is_plain = self.scale is None
        if dtype == torch.bool:
            # Of 0 and 1: or, and.
            if self.op == "avg" or not is_plain:
                raise UsageError(f"{NAME} does not reduce torch.bool by {op_name(op)}")
            self.op = "max" if self.op in ("sum", "max") else "min"
        elif dtype.is_complex:
            if self.op not in ("sum", "avg") or not is_plain:
                raise UsageError(f"{NAME} reduces complex numbers by SUM and AVG only, not by {op_name(op)}")
        elif dtype not in DTYPES:
            raise TensorError(f"{NAME} does not reduce elements of {dtype}")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory has its numbers, one after another: not of a view that negates or conjugates."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that is."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as elements that can be reduced."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes, for types that are only moved, and counts of any type."""
    return tensor.view(-1).view(torch.uint8)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as elements that can be moved: its own, so that ranks with different types are told."""
    return tensor if tensor.dtype in DTYPES else _bytes(tensor)


def _single(tensors: Sequence[Any]) -> Any:
    if len(tensors) == 1:
        return tensors[0]
    raise UsageError(f"{NAME} takes one tensor of a rank at a time, not {len(tensors)}")


def _are_even(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have as many elements, which every rank must answer alike."""
    return len({tensor.numel() for tensor in tensors}) == 1


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    return bool(begin < other.data_ptr() + other.nbytes and other.data_ptr() < end)


def _in_place(tensor: torch.Tensor, call: Callable[[torch.Tensor], object]) -> None:
    """Calls it with the tensor, or with a contiguous copy that is copied back."""
    dense = _plain(tensor)
    call(dense)
    if dense is not tensor:
        tensor.copy_(dense)


def _into(output: torch.Tensor, source: torch.Tensor, call: Callable[[torch.Tensor], object]) -> None:
    """Calls it with the output, or with a contiguous tensor that is copied there, and does not overlap the source."""
    if _is_plain(output) and not _overlap(output, source):
        call(output)
        return
    dense = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    call(dense)
    output.copy_(dense)


def _all_reduce(communicator: Communicator, tensor: torch.Tensor, how: _Reduction) -> None:
    all_reduce = communicator.all_reduce
    _in_place(tensor, lambda dense: all_reduce(_numbers(dense), op=how.op, scale=how.scale))


def _all_gather(communicator: Communicator, tensor: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    sizes = [output.numel() for output in outputs]
    flat = torch.empty(sum(sizes), dtype=tensor.dtype, device=tensor.device)
    tensor = _plain(tensor)
    if _are_even(outputs):
        communicator.all_gather(_elements(tensor), _elements(flat))
    else:
        counts = [size * tensor.element_size() for size in sizes]
        communicator.all_gather_v(_bytes(tensor), _bytes(flat), counts)
    for output, part in zip(outputs, flat.split(sizes), strict=True):
        output.copy_(part.view(output.shape))


def _all_gather_single(communicator: Communicator, output: torch.Tensor, tensor: torch.Tensor) -> None:
    all_gather = communicator.all_gather
    # This rank's block of the output.
    is_own = tensor.data_ptr() == output.data_ptr() + communicator.rank * tensor.nbytes
    if _is_plain(output) and is_own:
        all_gather(_elements(output))
    else:
        _into(output, tensor, lambda dense: all_gather(_elements(tensor), _elements(dense)))


def _reduce_scatter(
    communicator: Communicator, output: torch.Tensor, flat: torch.Tensor, sizes: list[int], how: _Reduction
) -> None:
    numbers, result = _numbers(flat), _numbers(output)
    if len(set(sizes)) == 1:
        communicator.reduce_scatter(numbers, result, op=how.op, scale=how.scale)
    elif flat.device.type == "cpu":
        parts = 2 if flat.is_complex() else 1
        communicator.reduce_scatter_v(numbers, result, [size * parts for size in sizes], op=how.op)
    else:
        # There, kernels that reduce blocks of any size would have to be compiled for this alone.
        padded = [torch.nn.functional.pad(each, (0, max(sizes) - len(each))) for each in flat.split(sizes)]
        block = torch.empty_like(padded[0])
        communicator.reduce_scatter(_numbers(torch.stack(padded)), _numbers(block), op=how.op, scale=how.scale)
        output.copy_(block[: output.numel()].view(output.shape))


def _reduce_scatter_single(
    communicator: Communicator, output: torch.Tensor, tensor: torch.Tensor, how: _Reduction
) -> None:
    numbers = _numbers(tensor)

    def reduce_scatter(dense: torch.Tensor) -> None:
        communicator.reduce_scatter(numbers, _numbers(dense), op=how.op, scale=how.scale)

    _into(output, tensor, reduce_scatter)


class _Route:
    """Messages from one rank to another, of one tag and on one device. Both join when they first use it."""

    def __init__(
        self,
        store: c10d.Store,
        group: Communicator,
        ends: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        source, destination, tag = ends
        self._words = f"message of tag {tag} from rank {source} to rank {destination}"
        self._lane = Lane(f"crossweft messages from {source} to {destination}")
        self._store = c10d.PrefixStore(f"{device.type}:{source}>{destination}:{tag}", store)
        self._group = group
        self._device = device
        self._is_sender = source == group.rank
        self._peer = destination if self._is_sender else source
        self._communicator: Communicator | None = None
        self._cuda: CudaSide | None = None
        self._is_ended = False

    def start(self, tensor: torch.Tensor) -> HostWork | CudaWork:
        """Sends the tensor, or receives into it, in the background. On a GPU behind what is on the current stream."""
        plain = tensor.detach()
        if self._device.type == "cpu":

            def pass_on() -> list[torch.Tensor]:
                with torch.inference_mode():
                    self._pass_on(self._joined(), plain)
                return [tensor]

            return HostWork([self._lane.start(pass_on)])
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(f"{NAME}: messages are not captured into graphs")
        begin = torch.cuda.current_stream(self._device).record_event()

        def put() -> Any:
            if self._cuda is None:
                self._cuda = CudaSide(self._joined())
            return self._cuda.after(begin, lambda communicator: self._pass_on(communicator, plain), [plain])

        return CudaWork(self._device, [self._lane.start(put)], [tensor])

    def _pass_on(self, communicator: Communicator, tensor: torch.Tensor) -> None:
        try:
            if self._is_sender:
                communicator.send(_elements(_plain(tensor)), 1)
            else:
                _in_place(tensor, lambda dense: communicator.recv(_elements(dense), 0))
        except Error as error:
            # Ranks of the pair say nothing to anybody.
            raise type(error)(f"{self._words} (0 sends, 1 receives): {error}") from error

    def _joined(self) -> Communicator:
        if self._communicator is None:
            own, other = ("sender", "receiver") if self._is_sender else ("receiver", "sender")
            timeout = self._group.timeout
            try:
                # The group's connection would be held while this waits.
                store = self._store.clone()
                store.set(own, "")
                try:
                    self._meet(store, other, time.monotonic() + timeout)
                    rank = 0 if self._is_sender else 1
                    self._communicator = from_store(store, rank, 2, device=str(self._device), timeout=timeout)
                finally:
                    store.delete_key(own)
            except dist.DistError as error:
                # Whoever has the store may be who has died.
                self._group.check_peer(self._peer, self._words)
                raise PeerLost(f"{self._words}: the store at which ranks meet is gone: {error}") from error
        return self._communicator

    def _meet(self, store: c10d.Store, other: str, deadline: float) -> None:
        """Waits until the other rank is there, for as long as the group says that it may come."""
        pause = 0.0005
        while not store.check([other]):
            self._group.check_peer(self._peer, self._words)
            if time.monotonic() > deadline:
                raise Timeout(f"{self._words}: rank {self._peer} has not come within {self._group.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def end(self, reason: str | None) -> None:
        """Ends what is under way, if there is a reason, or leaves when all is done. Only the first call does."""
        if self._is_ended:
            return
        self._is_ended = True
        communicator = self._communicator
        if communicator is not None:
            if reason is not None:
                self.abort(reason)
            elif self._cuda is not None:
                torch.cuda.synchronize(self._device)
            self._lane.start(communicator.leave)
        self._lane.close()

    def abort(self, reason: str) -> None:
        """Ends what is under way."""
        if self._communicator is not None:
            self._communicator.abort(reason)

    def wait(self, patience: float) -> bool:
        """Ends when all has been passed on, for which it waits at most so many seconds. Whether it has."""
        return self._lane.close(patience)


def _close(communicator: Communicator, lane: Lane, routes: dict[Any, _Route], process: int) -> None:
    """Called when nothing needs a group any more, the latest when the interpreter ends: its threads must have ended."""
    if process != os.getpid():
        return
    for reason in (None, f"rank {communicator.rank} has ended with calls under way"):
        if reason is not None:
            communicator.abort(reason)
            for route in routes.values():
                route.abort(reason)
        if _wait([lane.close, *(route.wait for route in routes.values())]):
            return


def _wait(waits: Sequence[Callable[[float], bool]]) -> bool:
    """Makes them, patiently; whether all came to their ends."""
    deadline = time.monotonic() + _PATIENCE
    # A list, so that all are waited for.
    return all([wait(max(0.0, deadline - time.monotonic())) for wait in waits])  # noqa: C419


class _Calls:
    """One rank of a group: what ``torch.distributed`` calls, whichever class of torch's it expects.

    Calls that cannot be raise UsageError or TensorError at once. What fails later in the background is raised by the
    work's ``wait``; by that of its future, as a RuntimeError with the text. What fails on a GPU, later calls raise.
    """

    #: Whether calls that have ended are to give a work, too.
    _always_works = False

    def __init__(self, store: c10d.Store, rank: int, world_size: int, timeout: timedelta, name: str) -> None:
        """Joins the ranks that share a store. Collective."""
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self._rank, self._world_size = rank, world_size
        self._timeout = timeout
        self._store = store
        self._name = name
        self._communicator = from_store(store, rank, world_size, timeout=timeout.total_seconds())
        self._counts = Counts(f"torch.distributed group {name}", self._communicator)
        self._lane = Lane("crossweft collectives")
        self._host = HostSide(self._communicator, self._lane)
        self._cuda: CudaSide | None = None
        self._cuda_counts: Counts | None = None
        self._routes: dict[tuple[int, int, int, torch.device], _Route] = {}
        self._coalesced: list[HostWork | CudaWork] | None = None
        self._lock = threading.Lock()
        # Collectives until now.
        self._sequence = 0
        weakref.finalize(self, _close, self._communicator, self._lane, self._routes, os.getpid())

    # What it is.

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        """Leaves in good order, after all calls that were made."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda.device)
            self._cuda.communicator.leave()
        self._lane.run(self._communicator.leave)
        self._end(None)

    def abort(self) -> None:
        """Ends all calls of all ranks with an error."""
        reason = f"rank {self._rank} aborted the process group"
        if self._cuda is not None:
            self._cuda.communicator.abort(reason)
        self._communicator.abort(reason)
        self._end(reason)

    def _end(self, reason: str | None) -> None:
        self._lane.close()
        with self._lock:
            routes = list(self._routes.values())
        for route in routes:
            route.end(reason)
        # The interpreter may be about to end.
        _wait([self._lane.close, *(route.wait for route in routes)])

    # How it runs.

    def _side(self, tensor: torch.Tensor) -> HostSide | CudaSide:
        """Where calls with such a tensor are made. The first one on a GPU joins the other ranks there."""
        if tensor.device.type == "cpu":
            return self._host
        if tensor.device.type != "cuda":
            raise TensorError(f"{NAME} takes host and CUDA tensors, not those on {tensor.device}")
        with self._lock:
            if self._cuda is None:
                store = c10d.PrefixStore("cuda", self._store)
                of_group = (store, self._rank, self._world_size)
                limit = self._timeout.total_seconds()
                communicator = from_store(*of_group, device=str(tensor.device), timeout=limit)
                self._cuda = CudaSide(communicator)
                self._cuda_counts = Counts(f"torch.distributed group {self._name} on CUDA devices", communicator)
            side = self._cuda
        if tensor.device != side.device:
            raise TensorError(f"{NAME}: the group's CUDA tensors are on {side.device}, this one is on {tensor.device}")
        return side

    def _collective(
        self,
        options: Any,
        outputs: list[torch.Tensor],
        call: Call,
        used: Sequence[torch.Tensor] = (),
    ) -> HostWork | CudaWork | None:
        """Makes a call of all ranks on outputs and other tensors that are used; without a work where it has ended."""
        tensors = [*outputs, *used]
        side = self._side(tensors[0]) if tensors else self._host
        self._sequence += 1
        # Some callers of older versions give none.
        if options is not None and options.asyncOp:
            return self._noted(side.later(call, outputs, tensors))
        side.now(call)
        return HostWork([]) if self._always_works else None

    def _noted(self, work: HostWork | CudaWork) -> HostWork | CudaWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        """By which torch's checks compare ranks."""
        return self._sequence

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> HostWork | CudaWork:
        works, self._coalesced = self._coalesced or [], None
        on_cuda = [work for work in works if isinstance(work, CudaWork)]
        if not on_cuda:
            return HostWork([call for work in works if isinstance(work, HostWork) for call in work.calls])
        if len(on_cuda) < len(works):
            raise UsageError(f"{NAME} does not coalesce calls on host tensors with others on CUDA tensors")
        ends = [end for work in on_cuda for end in work.ends]
        return CudaWork(on_cuda[0].device, ends, [output for work in on_cuda for output in work.outputs])

    def _count(self, operation: str, tensor: torch.Tensor, others: Sequence[torch.Tensor] = (), op: str = "") -> None:
        """Counts a collective by the tensor that is the larger of input and output."""
        self._side(tensor)
        self._count_once(operation, tensor, all(_is_plain(each) for each in (tensor, *others)), op)

    def _count_once(self, operation: str, tensor: torch.Tensor, direct: bool, op: str = "") -> None:
        # Messages may come before ranks join on GPUs.
        counts = (self._cuda_counts if tensor.device.type == "cuda" else None) or self._counts
        dtype = DTYPES.get(tensor.dtype, "u8")
        counts.call(operation, "direct" if direct else "staged", dtype, op, tensor.nbytes)

    # Collectives. Tensors are taken without what autograd knows of them.

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> HostWork | CudaWork | None:
        return self.allreduce_coalesced([_single(tensors)], options)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any) -> HostWork | CudaWork | None:
        reductions = [_Reduction(options.reduceOp, tensor.dtype) for tensor in tensors]
        for tensor, how in zip(tensors, reductions, strict=True):
            self._check(tensor, [])
            self._count("all_reduce", tensor, op=how.op)

        def call(communicator: Communicator) -> None:
            for tensor, how in zip(tensors, reductions, strict=True):
                _all_reduce(communicator, tensor.detach(), how)

        return self._collective(options, tensors, call)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> HostWork | CudaWork | None:
        tensor, root = _single(tensors).detach(), options.rootRank
        self._check(tensor, [])
        self._count("broadcast", tensor)

        def call(communicator: Communicator) -> None:
            _in_place(tensor, lambda dense: communicator.broadcast(_elements(dense), root=root))

        return self._collective(options, tensors, call)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> HostWork | CudaWork | None:
        tensor, root = _single(tensors).detach(), options.rootRank
        how = _Reduction(options.reduceOp, tensor.dtype)
        self._check(tensor, [])
        self._count("reduce", tensor, op=how.op)

        def call(communicator: Communicator) -> None:
            reduce = communicator.reduce
            _in_place(tensor, lambda dense: reduce(_numbers(dense), root=root, op=how.op, scale=how.scale))

        return self._collective(options, tensors, call)

    def allgather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        return self.allgather_coalesced([[output] for output in _single(output_lists)], [_single(inputs)], options)

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> HostWork | CudaWork | None:
        """``output_lists[r][i]`` becomes input ``i`` of rank ``r``; they may have different sizes."""
        if len(output_lists) != self._world_size or any(len(of_rank) != len(inputs) for of_rank in output_lists):
            raise UsageError(f"all_gather needs {self._world_size} lists of {len(inputs)} outputs, one for each input")
        gathered = [
            (tensor.detach(), [of_rank[i].detach() for of_rank in output_lists]) for i, tensor in enumerate(inputs)
        ]
        for tensor, outputs in gathered:
            self._check(tensor, outputs)
            self._count("all_gather" if _are_even(outputs) else "all_gather_v", tensor, outputs)

        def call(communicator: Communicator) -> None:
            for tensor, outputs in gathered:
                _all_gather(communicator, tensor, outputs)

        return self._collective(options, [output for of_rank in output_lists for output in of_rank], call, inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> HostWork | CudaWork | None:
        return self.all_gather_single_coalesced([output], [tensor], options)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> HostWork | CudaWork | None:
        pairs = [(output.detach(), tensor.detach()) for output, tensor in zip(outputs, inputs, strict=True)]
        for output, tensor in pairs:
            self._check_blocks("all_gather", tensor, output)
            self._count("all_gather", output, [tensor])

        def call(communicator: Communicator) -> None:
            for output, tensor in pairs:
                _all_gather_single(communicator, output, _plain(tensor))

        return self._collective(options, outputs, call, inputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], options: Any
    ) -> HostWork | CudaWork | None:
        """The output is the reduction of input ``rank`` of all ranks; they may have different sizes."""
        output, inputs = _single(outputs).detach(), [tensor.detach() for tensor in _single(input_lists)]
        how = _Reduction(options.reduceOp, output.dtype)
        self._check(output, inputs)
        sizes = [tensor.numel() for tensor in inputs]
        if sizes[self._rank] != output.numel():
            raise TensorError(f"reduce_scatter: input {self._rank} has {sizes[self._rank]} elements, the output has "
                              f"{output.numel()}")  # fmt: skip
        is_even = _are_even(inputs)
        if not is_even and how.scale is not None:
            raise UsageError("reduce_scatter by PREMUL_SUM needs inputs of one size")
        self._count("reduce_scatter" if is_even else "reduce_scatter_v", inputs[0], [output], op=how.op)

        def call(communicator: Communicator) -> None:
            flat = torch.cat([tensor.reshape(-1) for tensor in inputs])
            _into(output, flat, lambda dense: _reduce_scatter(communicator, dense, flat, sizes, how))

        return self._collective(options, outputs, call, inputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any
    ) -> HostWork | CudaWork | None:
        return self.reduce_scatter_single_coalesced([output], [tensor], options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> HostWork | CudaWork | None:
        pairs = [(output.detach(), tensor.detach()) for output, tensor in zip(outputs, inputs, strict=True)]
        reductions = [_Reduction(options.reduceOp, tensor.dtype) for tensor in inputs]
        for (output, tensor), how in zip(pairs, reductions, strict=True):
            self._check_blocks("reduce_scatter", output, tensor)
            self._count("reduce_scatter", tensor, [output], op=how.op)

        def call(communicator: Communicator) -> None:
            for (output, tensor), how in zip(pairs, reductions, strict=True):
                _reduce_scatter_single(communicator, output, _plain(tensor), how)

        return self._collective(options, outputs, call, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> HostWork | CudaWork | None:
        """Splits are rows; none means that all are of one size, on every rank."""
        target, source = output.detach(), tensor.detach()
        self._check(source, [target])
        has_splits = bool(output_splits or input_splits)
        counts = [self._bytes_of(target, output_splits), self._bytes_of(source, input_splits)]
        self._count("all_to_all_v" if has_splits else "all_to_all", source, [target])

        def call(communicator: Communicator) -> None:
            dense = _plain(source)

            def exchange(into: torch.Tensor) -> None:
                if has_splits:
                    communicator.all_to_all_v(_bytes(dense), _bytes(into), counts[1], counts[0])
                else:
                    communicator.all_to_all(_elements(dense), _elements(into))

            _into(target, dense, exchange)

        return self._collective(options, [output], call, [tensor])

    def _bytes_of(self, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """Bytes of each rank's rows."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits and rows % self._world_size == 0:
            splits = [rows // self._world_size] * self._world_size
        if len(splits) != self._world_size or sum(splits) != rows or min(splits) < 0:
            raise TensorError(f"all_to_all: {rows} rows cannot be split among {self._world_size} ranks as {splits}")
        row = tensor.nbytes // rows if rows else 0
        return [split * row for split in splits]

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> HostWork | CudaWork | None:
        if len(outputs) != self._world_size or len(inputs) != self._world_size:
            raise UsageError(f"all_to_all needs {self._world_size} inputs and outputs")
        self._check(inputs[0], [*inputs, *outputs])
        sent, received = list(enumerate(inputs)), list(enumerate(outputs))
        return self._messages("all_to_all_v", options, outputs, sent, received)

    def gather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        tensor, root = _single(inputs), options.rootRank
        outputs = _single(output_lists) if self._rank == root else []
        if len(outputs) != (self._world_size if self._rank == root else 0):
            raise UsageError(f"gather needs {self._world_size} outputs on its root")
        self._check(tensor, outputs)
        return self._messages("gather", options, outputs, [(root, tensor)], list(enumerate(outputs)))

    def scatter(self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], options: Any) -> Any:
        output, root = _single(outputs), options.rootRank
        inputs = _single(input_lists) if self._rank == root else []
        if len(inputs) != (self._world_size if self._rank == root else 0):
            raise UsageError(f"scatter needs {self._world_size} inputs on its root")
        self._check(output, inputs)
        return self._messages("scatter", options, outputs, list(enumerate(inputs)), [(root, output)])

    def _messages(
        self,
        operation: str,
        options: Any,
        outputs: list[torch.Tensor],
        sent: list[tuple[int, torch.Tensor]],
        received: list[tuple[int, torch.Tensor]],
    ) -> HostWork | CudaWork | None:
        """A collective that is a group of messages: what goes to which rank, and comes from which."""
        first, *others = (tensor for _, tensor in (*sent, *received))
        self._count(operation, first, others)

        def call(communicator: Communicator) -> None:
            sources = [(peer, _plain(tensor.detach())) for peer, tensor in sent]
            targets = [(peer, tensor.detach(), _plain(tensor.detach())) for peer, tensor in received]
            with communicator.group() as group:
                for peer, tensor in sources:
                    # Of the same call, an input may be where an output is.
                    shared = any(_overlap(tensor, dense) for _, _, dense in targets)
                    group.send(_elements(tensor.clone() if shared else tensor), peer)
                for peer, _, dense in targets:
                    group.recv(_elements(dense), peer)
            for _, tensor, dense in targets:
                if not _is_plain(tensor):
                    tensor.copy_(dense)

        return self._collective(options, outputs, call, [first, *others])

    def barrier(self, opts: Any) -> HostWork | CudaWork | None:
        """Once all ranks have come, and the devices have come to where the streams are that are current now."""
        event = None
        if self._cuda is not None:
            event = torch.cuda.current_stream(self._cuda.device).record_event()

        def call(communicator: Communicator) -> None:
            if event is not None:
                event.synchronize()
            communicator.barrier()

        return self._collective(opts, [], call)

    # Messages.

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> HostWork | CudaWork:
        return self._message("send", _single(tensors), (self._rank, destination, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> HostWork | CudaWork:
        return self._message("recv", _single(tensors), (source, self._rank, tag))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> HostWork | CudaWork:
        raise UsageError(f"{NAME} does not receive from any source; name the rank")

    def _message(self, operation: str, tensor: torch.Tensor, ends: tuple[int, int, int]) -> HostWork | CudaWork:
        if tensor.device.type not in ("cpu", "cuda"):
            raise TensorError(f"{NAME} takes host and CUDA tensors, not those on {tensor.device}")
        key = (*ends, tensor.device)
        with self._lock:
            route = self._routes.get(key)
            if route is None:
                route = _Route(self._store, self._communicator, ends, tensor.device)
                self._routes[key] = route
        self._count_once(operation, tensor, _is_plain(tensor))
        return self._noted(route.start(tensor))

    # What is asked of arguments.

    def _check(self, like: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in (like, *tensors):
            if tensor.layout != torch.strided or tensor.device != like.device or tensor.dtype != like.dtype:
                raise TensorError(
                    f"{NAME} takes strided tensors of one type on one device; given are {like.dtype} on {like.device} "
                    f"and a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device}"
                )

    def _check_blocks(self, operation: str, block: torch.Tensor, whole: torch.Tensor) -> None:
        self._check(block, [whole])
        if block.numel() * self._world_size != whole.numel():
            raise TensorError(
                f"{operation}: a tensor of {whole.numel()} elements is not {self._world_size} times one of "
                f"{block.numel()}"
            )

    # What older versions of torch call them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class CrossweftBackend(_Calls, c10d.Backend):  # type: ignore[misc, unused-ignore]
    """One rank of a group for some devices, beside other backends: torch 2.14 and newer."""

    @property
    def options(self) -> c10d.Backend.Options:
        return c10d.Backend.Options(NAME, self._timeout)

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        # Messages need not be: each pair's go their own way.
        return False

    def split(self, store: c10d.Store, ranks: list[int], options: Any) -> CrossweftBackend:
        """That of a part of the ranks, which are in it in this order. Collective over them."""
        if self._rank not in ranks:
            # torch (2.15) has no way to take no backend from Python.
            raise UsageError(f"rank {self._rank} is in none of the splits; give each rank one, or use new_group")
        rank = ranks.index(self._rank)
        return CrossweftBackend(store.clone(), rank, len(ranks), options._timeout, options.group_name)


class CrossweftGroup(_Calls, c10d.ProcessGroup):  # type: ignore[misc, unused-ignore]
    """One rank of a group, as a whole: for torch before 2.14, where no backend can be written in Python.

    It takes the place of all backends of its group, so it has host tensors too, whatever was asked for them.
    """

    # C++ cannot do without.
    _always_works = True

    @property
    def group_name(self) -> str:
        """What torch calls it."""
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def _start_coalescing(self, _device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, _device: torch.device) -> HostWork | CudaWork:
        return self.end_coalescing()


def _create(options: Any, _of_user: object) -> _Calls:
    of_group = (options.group_rank, options.group_size, options.timeout, options.group_id)
    if not _HAS_BACKENDS:
        return CrossweftGroup(options.store, *of_group)
    backend = CrossweftBackend(options.store, *of_group)
    # The group holds it, but not where torch puts its checks between (TORCH_DISTRIBUTED_DEBUG=DETAIL).
    weakref.finalize(options.process_group, _release, backend).atexit = False
    return backend


def _release(_backend: CrossweftBackend) -> None:
    """Called when nothing needs it any more."""


#: Whether backends can be written in Python.
_HAS_BACKENDS = hasattr(c10d.Backend, "all_gather_single")


def register_backend() -> None:
    """Tells ``torch.distributed`` of the backend."""
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])

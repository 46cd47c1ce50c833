"""The ``crossweft`` backend of ``torch.distributed``, for host tensors of ranks on one host.

Collectives that their caller waits for run in the caller's thread; others in a thread of the group, in order. Messages
of every ordered pair of ranks and tag have a thread and a communicator of their own, since they may be received in any
order with those of other pairs.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .._counts import Counts
from .._crossweft import Communicator
from .._torch import from_store
from ..errors import Error, TensorError, Timeout, UsageError
from ._dtypes import DTYPES, op_name, reduce_op
from ._lane import Lane

NAME = "crossweft"


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
    dense = tensor.contiguous()
    call(dense)
    if dense is not tensor:
        tensor.copy_(dense)


def _into(output: torch.Tensor, source: torch.Tensor, call: Callable[[torch.Tensor], object]) -> None:
    """Calls it with the output, or with a contiguous tensor that is copied there, and does not overlap the source."""
    if output.is_contiguous() and not _overlap(output, source):
        call(output)
        return
    dense = torch.empty(output.shape, dtype=output.dtype)
    call(dense)
    output.copy_(dense)


class CrossweftWork(c10d.Work):  # type: ignore[misc, unused-ignore]
    """A call in the background. ``wait`` raises what it raises.

    torch hands out works that pass on ``wait`` and ``get_future`` only; whether one has ended, its future tells.
    """

    def __init__(self, calls: Sequence[Future[list[torch.Tensor]]]) -> None:
        super().__init__()
        self._calls = calls

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until it has ended; without a timeout, as long as calls of the group may take."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        for call in self._calls:
            try:
                call.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except FutureTimeout:
                # It may be what the call raised.
                if not call.done():
                    raise Timeout(f"a call of {NAME} has not ended within {timeout}; it goes on") from None
                raise
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the call's outputs."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        # An exception that Python sets is none to C++; what a callback raises is.
        told = done.then(lambda _: [tensor for call in self._calls for tensor in call.result()])
        left = len(self._calls)
        asking = threading.get_ident()
        lock = threading.Lock()

        def one_more(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if not is_last:
                return
            if threading.get_ident() == asking:
                done.set_result(None)
                return
            # Callbacks may wait for further calls, so the thread that makes calls must not run them. An interpreter
            # that ends waits for this one: it must not be stopped inside of torch.
            threading.Thread(target=done.set_result, args=(None,), name=f"{NAME} callbacks").start()

        for call in self._calls:
            call.add_done_callback(one_more)
        if not self._calls:
            done.set_result(None)
        return told


class _Route:
    """Messages from one rank to another, of one tag. Both join when they first use it."""

    def __init__(self, store: c10d.Store, ends: tuple[int, int, int], is_sender: bool, timeout: float) -> None:
        source, destination, tag = ends
        self._words = f"message of tag {tag} from rank {source} to rank {destination}"
        self.lane = Lane(f"crossweft messages from {source} to {destination}")
        self._store = c10d.PrefixStore(f"{source}>{destination}:{tag}", store)
        self._is_sender = is_sender
        self._timeout = timeout
        self._communicator: Communicator | None = None

    def pass_on(self, tensor: torch.Tensor) -> None:
        """Sends the tensor, or receives into it."""
        try:
            communicator = self._joined()
            if self._is_sender:
                communicator.send(_elements(tensor.contiguous()), 1)
            else:
                _in_place(tensor, lambda dense: communicator.recv(_elements(dense), 0))
        except Error as error:
            # Ranks of the pair say nothing to anybody.
            raise type(error)(f"{self._words} (0 sends, 1 receives): {error}") from error

    def _joined(self) -> Communicator:
        if self._communicator is None:
            # The group's connection would be held while this waits.
            store, rank = self._store.clone(), 0 if self._is_sender else 1
            self._communicator = from_store(store, rank, 2, timeout=self._timeout)
        return self._communicator

    def end(self, reason: str | None) -> None:
        """Ends what is under way, if there is a reason, or leaves when all is done."""
        communicator = self._communicator
        if communicator is not None:
            if reason is not None:
                communicator.abort(reason)
            self.lane.start(communicator.leave)
        self.lane.close()


class CrossweftBackend(c10d.Backend):  # type: ignore[misc, unused-ignore]
    """One rank of a group. ``torch.distributed`` makes and calls it.

    Calls that cannot be raise UsageError or TensorError at once. What fails later in the background is raised by the
    work's ``wait``; by that of its future, as a RuntimeError with the text.
    """

    def __init__(self, store: c10d.Store, rank: int, world_size: int, timeout: timedelta, name: str) -> None:
        """Joins the ranks that share a store. Collective."""
        super().__init__(rank, world_size)
        self._rank, self._world_size = rank, world_size
        self._timeout = timeout
        self._store = store
        self._communicator = from_store(store, rank, world_size, timeout=timeout.total_seconds())
        self._counts = Counts(f"torch.distributed group {name}", self._communicator)
        self._lane = Lane("crossweft collectives")
        self._routes: dict[tuple[int, int, int], _Route] = {}
        self._coalesced: list[Future[list[torch.Tensor]]] | None = None
        self._lock = threading.Lock()
        # Collectives until now.
        self._sequence = 0

    # What it is.

    def getBackendName(self) -> str:
        return NAME

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

    def shutdown(self) -> None:
        """Leaves in good order, after all calls that were made."""
        self._lane.run(self._communicator.leave)
        self._end(None)

    def abort(self) -> None:
        """Ends all calls of all ranks with an error."""
        reason = f"rank {self._rank} aborted the process group"
        self._communicator.abort(reason)
        self._end(reason)

    def _end(self, reason: str | None) -> None:
        self._lane.close()
        with self._lock:
            routes, self._routes = self._routes, {}
        for route in routes.values():
            route.end(reason)

    # How it runs: in inference mode, where tensors of inference mode may be written too, in whatever thread that is.

    def _start(self, lane: Lane, outputs: list[torch.Tensor], call: Callable[[], object]) -> CrossweftWork:
        """Makes a call in the background."""

        def run() -> list[torch.Tensor]:
            with torch.inference_mode():
                call()
            return outputs

        started = lane.start(run)
        if self._coalesced is not None:
            self._coalesced.append(started)
        return CrossweftWork([started])

    def _collective(
        self, options: Any, outputs: list[torch.Tensor], call: Callable[[], object]
    ) -> CrossweftWork | None:
        """Makes a call of all ranks; without a work where it has ended."""
        self._sequence += 1
        if options.asyncOp:
            return self._start(self._lane, outputs, call)

        def run() -> None:
            with torch.inference_mode():
                call()

        self._lane.run(run)
        return None

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        """By which torch's checks compare ranks."""
        return self._sequence

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> CrossweftWork:
        calls, self._coalesced = self._coalesced or [], None
        return CrossweftWork(calls)

    def _count(self, operation: str, tensor: torch.Tensor, others: Sequence[torch.Tensor] = (), op: str = "") -> None:
        """Counts a call by the tensor that is the larger of input and output."""
        direct = all(each.is_contiguous() for each in (tensor, *others))
        dtype = DTYPES.get(tensor.dtype, "u8")
        self._counts.call(operation, "direct" if direct else "staged", dtype, op, tensor.nbytes)

    # Collectives. Tensors are taken without what autograd knows of them.

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> CrossweftWork | None:
        return self.allreduce_coalesced([_single(tensors)], options)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any) -> CrossweftWork | None:
        reductions = [_Reduction(options.reduceOp, tensor.dtype) for tensor in tensors]
        for tensor, how in zip(tensors, reductions, strict=True):
            self._count("all_reduce", tensor, op=how.op)

        def call() -> None:
            for tensor, how in zip(tensors, reductions, strict=True):
                self._all_reduce(tensor.detach(), how)

        return self._collective(options, tensors, call)

    def _all_reduce(self, tensor: torch.Tensor, how: _Reduction) -> None:
        all_reduce = self._communicator.all_reduce
        _in_place(tensor, lambda dense: all_reduce(_numbers(dense), op=how.op, scale=how.scale))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> CrossweftWork | None:
        tensor, root = _single(tensors).detach(), options.rootRank
        self._count("broadcast", tensor)

        def call() -> None:
            _in_place(tensor, lambda dense: self._communicator.broadcast(_elements(dense), root=root))

        return self._collective(options, tensors, call)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> CrossweftWork | None:
        tensor, root = _single(tensors).detach(), options.rootRank
        how = _Reduction(options.reduceOp, tensor.dtype)
        self._count("reduce", tensor, op=how.op)

        def reduce(dense: torch.Tensor) -> None:
            self._communicator.reduce(_numbers(dense), root=root, op=how.op, scale=how.scale)

        return self._collective(options, tensors, lambda: _in_place(tensor, reduce))

    def allgather(self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        return self.allgather_coalesced([[output] for output in _single(output_lists)], [_single(inputs)], options)

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> CrossweftWork | None:
        """``output_lists[r][i]`` becomes input ``i`` of rank ``r``; they may have different sizes."""
        if len(output_lists) != self._world_size or any(len(of_rank) != len(inputs) for of_rank in output_lists):
            raise UsageError(f"all_gather needs {self._world_size} lists of {len(inputs)} outputs, one for each input")
        gathered = [
            (tensor.detach(), [of_rank[i].detach() for of_rank in output_lists]) for i, tensor in enumerate(inputs)
        ]
        for tensor, outputs in gathered:
            self._check(tensor, outputs)
            self._count("all_gather" if _are_even(outputs) else "all_gather_v", tensor, outputs)

        def call() -> None:
            for tensor, outputs in gathered:
                self._all_gather(tensor, outputs)

        return self._collective(options, [output for of_rank in output_lists for output in of_rank], call)

    def _all_gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        sizes = [output.numel() for output in outputs]
        flat = torch.empty(sum(sizes), dtype=tensor.dtype)
        tensor = tensor.contiguous()
        if _are_even(outputs):
            self._communicator.all_gather(_elements(tensor), _elements(flat))
        else:
            counts = [size * tensor.element_size() for size in sizes]
            self._communicator.all_gather_v(_bytes(tensor), _bytes(flat), counts)
        for output, part in zip(outputs, flat.split(sizes), strict=True):
            output.copy_(part.view(output.shape))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> CrossweftWork | None:
        return self.all_gather_single_coalesced([output], [tensor], options)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> CrossweftWork | None:
        pairs = [(output.detach(), tensor.detach()) for output, tensor in zip(outputs, inputs, strict=True)]
        for output, tensor in pairs:
            self._check_blocks("all_gather", tensor, output)
            self._count("all_gather", output, [tensor])

        def call() -> None:
            for output, tensor in pairs:
                self._all_gather_single(output, tensor.contiguous())

        return self._collective(options, outputs, call)

    def _all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        all_gather = self._communicator.all_gather
        if output.is_contiguous() and self._is_own_block(tensor, output):
            all_gather(_elements(output))
        else:
            _into(output, tensor, lambda dense: all_gather(_elements(tensor), _elements(dense)))

    def reduce_scatter(
        self, outputs: list[torch.Tensor], input_lists: list[list[torch.Tensor]], options: Any
    ) -> CrossweftWork | None:
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

        def call() -> None:
            flat = torch.cat([tensor.reshape(-1) for tensor in inputs])
            _into(output, flat, lambda dense: self._reduce_scatter(dense, flat, sizes, how))

        return self._collective(options, outputs, call)

    def _reduce_scatter(self, output: torch.Tensor, flat: torch.Tensor, sizes: list[int], how: _Reduction) -> None:
        numbers, result = _numbers(flat), _numbers(output)
        if len(set(sizes)) == 1:
            self._communicator.reduce_scatter(numbers, result, op=how.op, scale=how.scale)
        else:
            parts = 2 if flat.is_complex() else 1
            self._communicator.reduce_scatter_v(numbers, result, [size * parts for size in sizes], op=how.op)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> CrossweftWork | None:
        return self.reduce_scatter_single_coalesced([output], [tensor], options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> CrossweftWork | None:
        pairs = [(output.detach(), tensor.detach()) for output, tensor in zip(outputs, inputs, strict=True)]
        reductions = [_Reduction(options.reduceOp, tensor.dtype) for tensor in inputs]
        for (output, tensor), how in zip(pairs, reductions, strict=True):
            self._check_blocks("reduce_scatter", output, tensor)
            self._count("reduce_scatter", tensor, [output], op=how.op)

        def call() -> None:
            for (output, tensor), how in zip(pairs, reductions, strict=True):
                self._reduce_scatter_single(output, tensor.contiguous(), how)

        return self._collective(options, outputs, call)

    def _reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, how: _Reduction) -> None:
        numbers = _numbers(tensor)

        def reduce_scatter(dense: torch.Tensor) -> None:
            self._communicator.reduce_scatter(numbers, _numbers(dense), op=how.op, scale=how.scale)

        _into(output, tensor, reduce_scatter)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> CrossweftWork | None:
        """Splits are rows; none means that all are of one size, on every rank."""
        target, source = output.detach(), tensor.detach()
        self._check(source, [target])
        has_splits = bool(output_splits or input_splits)
        counts = [self._bytes_of(target, output_splits), self._bytes_of(source, input_splits)]
        self._count("all_to_all_v" if has_splits else "all_to_all", source, [target])

        def call() -> None:
            dense = source.contiguous()
            communicator = self._communicator

            def exchange(into: torch.Tensor) -> None:
                if has_splits:
                    communicator.all_to_all_v(_bytes(dense), _bytes(into), counts[1], counts[0])
                else:
                    communicator.all_to_all(_elements(dense), _elements(into))

            _into(target, dense, exchange)

        return self._collective(options, [output], call)

    def _bytes_of(self, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """Bytes of each rank's rows."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits and rows % self._world_size == 0:
            splits = [rows // self._world_size] * self._world_size
        if len(splits) != self._world_size or sum(splits) != rows:
            raise TensorError(f"all_to_all: {rows} rows cannot be split among {self._world_size} ranks as {splits}")
        row = tensor.nbytes // rows if rows else 0
        return [split * row for split in splits]

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any) -> CrossweftWork | None:
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
    ) -> CrossweftWork | None:
        """A collective that is a group of messages: what goes to which rank, and comes from which."""
        first, *others = (tensor for _, tensor in (*sent, *received))
        self._count(operation, first, others)

        def call() -> None:
            sources = [(peer, tensor.detach().contiguous()) for peer, tensor in sent]
            targets = [(peer, tensor.detach(), tensor.detach().contiguous()) for peer, tensor in received]
            with self._communicator.group() as group:
                for peer, tensor in sources:
                    # Of the same call, an input may be where an output is.
                    shared = any(_overlap(tensor, dense) for _, _, dense in targets)
                    group.send(_elements(tensor.clone() if shared else tensor), peer)
                for peer, _, dense in targets:
                    group.recv(_elements(dense), peer)
            for _, tensor, dense in targets:
                if not tensor.is_contiguous():
                    tensor.copy_(dense)

        return self._collective(options, outputs, call)

    def barrier(self, options: Any) -> CrossweftWork | None:
        return self._collective(options, [], self._communicator.barrier)

    # Messages.

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> CrossweftWork:
        return self._message(_single(tensors), (self._rank, destination, tag), True)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> CrossweftWork:
        return self._message(_single(tensors), (source, self._rank, tag), False)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> CrossweftWork:
        raise UsageError(f"{NAME} does not receive from any source; name the rank")

    def _message(self, tensor: torch.Tensor, ends: tuple[int, int, int], is_sender: bool) -> CrossweftWork:
        with self._lock:
            route = self._routes.get(ends)
            if route is None:
                route = _Route(self._store, ends, is_sender, self._timeout.total_seconds())
                self._routes[ends] = route
        self._count("send" if is_sender else "recv", tensor)
        plain = tensor.detach()
        return self._start(route.lane, [tensor], lambda: route.pass_on(plain))

    # What is asked of arguments.

    def _check(self, like: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in (like, *tensors):
            if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype != like.dtype:
                raise TensorError(
                    f"{NAME} takes strided host tensors of one type; given are {like.dtype} and a tensor of "
                    f"{tensor.dtype}, {tensor.layout} on {tensor.device}"
                )

    def _check_blocks(self, operation: str, block: torch.Tensor, whole: torch.Tensor) -> None:
        self._check(block, [whole])
        if block.numel() * self._world_size != whole.numel():
            raise TensorError(
                f"{operation}: a tensor of {whole.numel()} elements is not {self._world_size} times one of "
                f"{block.numel()}"
            )

    def _is_own_block(self, block: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether a contiguous tensor is where this rank's block of another one is."""
        return bool(block.data_ptr() == whole.data_ptr() + self._rank * block.nbytes)

    # What older versions of torch call them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _create(options: Any, _of_user: object) -> CrossweftBackend:
    of_group = (options.group_rank, options.group_size, options.timeout, options.group_id)
    backend = CrossweftBackend(options.store, *of_group)
    # The group holds it, but not where torch puts its checks between (TORCH_DISTRIBUTED_DEBUG=DETAIL).
    weakref.finalize(options.process_group, _release, backend).atexit = False
    return backend


def _release(_backend: CrossweftBackend) -> None:
    """Called when nothing needs it any more."""


def register_backend() -> None:
    """Tells ``torch.distributed`` of the backend, if backends can be written in Python (torch 2.14 and newer)."""
    if hasattr(c10d.Backend, "all_gather_single"):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])

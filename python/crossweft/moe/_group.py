"""Groups and handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from .._crossweft import Communicator, MoeCounts, MoeGroup, MoeHandle
from ..errors import CapacityError, TensorError, UsageError
from ._kinds import Kind, dtype_of, kind_of
from ._shapes import check

#: How received tokens are laid out; each rank may have its own. Of L experts here, R ranks, at most M tokens of each:
#:
#: * ``expert_major``: ``[L, R * M, hidden]``, a row for each expert that a token is for; each expert's rows stand at
#:   the beginning of its part, what follows them is left as it was;
#: * ``expert_packed``: ``[rows, hidden]``, the same without gaps, each expert's rows followed by rows of zeros up to a
#:   multiple of ``alignment``;
#: * ``rank_major``: ``[R, M, hidden]``, a row for each token; what is for several experts here is to be
#:   summed before it is combined;
#: * ``flat``: ``[rows, hidden]``, the same without gaps, by source rank and then token.
Layout: TypeAlias = Literal["expert_major", "expert_packed", "rank_major", "flat"]

#: Quantise tokens to f8e4m3 on the way, with one scale for each 128 elements: in f32, rounded up to powers of two or
#: not, or as exponents plus 127 in bytes, four to an ``i32``.
Quantise: TypeAlias = Literal["f32", "f32_powers_of_two", "ue8m0"]


#: Bytes of elements.
_SIZES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8}


@dataclass
class Received:
    """What a dispatch brings."""

    #: ``[*rows, hidden]``, in the group's type, or in f8e4m3.
    tokens: Any
    #: ``[*rows, scales]``, f32 or i32 of four exponents each; of quantised tokens only.
    scales: Any | None
    #: ``[*rows, top_k]``: local experts of each row, -1 for none; only where rows are not grouped by expert.
    experts: Any | None
    #: ``[*rows, top_k]`` f32, 0 where there is no expert; ``[*rows]`` where rows are grouped by expert; ``None`` if not
    #: wanted.
    weights: Any | None
    #: ``[*rows]`` i32: which of its source's tokens a row is; -1 where it is none.
    sources: Any


class DeviceArray:
    """Memory of a CUDA device, for ``torch.as_tensor`` and the like. It keeps what it belongs to."""

    def __init__(self, address: int, shape: tuple[int, ...], owner: Any) -> None:
        self._owner = owner
        #: Of i32.
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": "<i4",
            "strides": None,
            "version": 3,
        }


@dataclass(frozen=True)
class DeviceCounts:
    """How many rows the last dispatch of a handle has brought, where its CUDA device has that.

    Each dispatch writes them anew, in the order of its stream.
    """

    #: ``[ranks, most experts of a rank]``: rows of each rank for each local expert.
    rows: DeviceArray
    #: The same shape: the first of those rows, where rows are grouped by expert.
    begins: DeviceArray


class Group:
    """The memory and streams of all ranks of ``communicator`` for dispatches and combines of one shape.

    ``experts`` are those of all ranks together: ranks have equally many, one after the other, the first ranks one more
    where that does not go. A rank has at most ``max_tokens`` tokens in a call, of ``hidden`` elements of ``dtype``
    (bf16, f16, f32), whose bytes must be a multiple of 16, each for at most ``top_k`` experts (1 to 32). ``blocks``
    thread blocks run each call: one on the CPU, 16 on a GPU if none are given. A call takes ``timeout`` seconds at
    most, as the communicator's if none are given. With ``masking`` a rank that is gone or late is left out from then
    on, instead of failing the call; on a GPU each call then waits for its end, and cannot be recorded into a graph.

    Of a communicator on a CUDA device, tensors are on that device. Calls are launched in the order of the current
    stream of the library that they are of, and return at once; they can be recorded into a graph, for which the handle
    must be kept. What goes wrong on the device is raised by a later call, or by :meth:`check`.

    Collective. Calls are made one after the other, in the same order on every rank, whatever handles they are of. At
    most two may be sent and not yet completed, and none when a call is made that is not in two halves. Raises
    UsageError, Mismatch, Timeout, PeerLost, DeviceError.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        experts: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        dtype: Any = "bf16",
        blocks: int | None = None,
        timeout: float | None = None,
        masking: bool = False,
    ) -> None:
        self._core = MoeGroup(
            communicator,
            experts=experts,
            max_tokens=max_tokens,
            hidden=hidden,
            top_k=top_k,
            dtype=dtype,
            blocks=blocks,
            timeout=timeout,
            masking=masking,
        )

    @property
    def communicator(self) -> Communicator:
        return self._core.communicator

    @property
    def rank(self) -> int:
        return self._core.rank

    @property
    def world_size(self) -> int:
        return self._core.world_size

    @property
    def experts(self) -> int:
        """Of all ranks."""
        return self._core.experts

    @property
    def max_tokens(self) -> int:
        return self._core.max_tokens

    @property
    def hidden(self) -> int:
        return self._core.hidden

    @property
    def top_k(self) -> int:
        """The most experts of a token."""
        return self._core.top_k

    @property
    def dtype(self) -> str:
        """``bf16``, ``f16`` or ``f32``."""
        return self._core.dtype

    @property
    def allocated_bytes(self) -> int:
        """What the group has allocated on this rank."""
        return self._core.allocated_bytes

    def local_experts(self, rank: int | None = None) -> range:
        """The experts of a rank, or of this one."""
        return range(*self._core.expert_bounds(rank))

    @property
    def masked(self) -> list[bool]:
        """Which ranks are left out, in rank order; each rank's own matter."""
        return self._core.masked

    def check(self) -> None:
        """Raises what went wrong in a call on a CUDA device that has ended; does not wait for those that have not."""
        self._core.check()

    def set_masked(self, rank: int, masked: bool) -> None:
        """Leaves a rank out from the next call on, or takes it in again.

        One that is taken in must have made all calls meanwhile, leaving this rank out. On a GPU launches must have come
        to their end before. Raises UsageError if there is no such rank or it is this one, or calls of this rank are
        under way.
        """
        self._core.set_masked(rank, masked)

    def handle(
        self,
        experts: Any,
        weights: Any | None = None,
        *,
        layout: Layout = "expert_major",
        alignment: int = 1,
        top_k: int | None = None,
    ) -> Handle:
        """A handle of a pass whose tokens go to ``experts``, with ``weights``. Local; it allocates.

        ``experts`` are i32 or i64, ``[tokens, top_k]``, -1 for none; ``top_k`` must be given of what has no shape, and
        be the same on all ranks. ``weights`` are f32, of the same shape; 1 if none are given. Raises UsageError,
        TensorError.
        """
        top_k, ids = _choices(experts, weights, top_k)
        core = self._core.handle(experts, top_k, weights, layout=layout, alignment=alignment)
        return Handle(self, core, layout, top_k, ids)


def _choices(experts: Any, weights: Any | None, top_k: int | None) -> tuple[int, str]:
    """How many experts a token has, and of what type they are."""
    ids = dtype_of(experts)
    if top_k is None:
        shape = getattr(experts, "shape", None)
        if shape is None or len(shape) != 2:
            raise UsageError("experts must be [tokens, top_k], or top_k be given")
        if ids == "u8":
            # They would be taken for the bytes of larger ones.
            raise TensorError("experts are of u8; they can be of i32 or i64")
        top_k = int(shape[1])
    check("experts", experts, top_k, _SIZES.get(ids, 1))
    if weights is not None:
        check("weights", weights, top_k)
    return top_k, ids


class Handle:
    """One forward pass: a dispatch, then any number of combines; another dispatch of the same routing may follow.

    Each call on the CPU blocks at most for the group's timeout, and leaves the interpreter to other threads meanwhile.
    On a GPU only counts are waited for; a ``flat`` or ``expert_packed`` dispatch without ``out`` does that. Staged
    calls (``dispatch_send``, then ``dispatch_complete``) leave time for other work in between; they are completed in
    the order in which they were sent, whatever handles they are of. A handle that goes before what it has sent is
    completed makes its group useless.
    """

    def __init__(self, group: Group, core: MoeHandle, layout: Layout, top_k: int, ids: str) -> None:
        self._group = group
        self._core = core
        self._layout: Layout = layout
        self._top_k = top_k
        self._ids = ids
        ranks, most = group.world_size, group.max_tokens
        #: Where rows have places of their own, whatever comes: for how many there are.
        self._places: tuple[int, ...] = ()
        if layout == "expert_major":
            self._places = (len(group.local_experts()), ranks * most)
        elif layout == "rank_major":
            self._places = (ranks, most)
        #: Of what was sent last.
        self._kind: Kind | None = None
        self._scales: Quantise | None = None
        self._tokens = 0

    @property
    def group(self) -> Group:
        return self._group

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def top_k(self) -> int:
        """Experts of each token of this pass."""
        return self._top_k

    @property
    def allocated_bytes(self) -> int:
        return self._core.allocated_bytes

    def counts(self) -> MoeCounts:
        """How many rows the last dispatch brought, and where they lie; waits for it on a GPU.

        Raises UsageError if there was none.
        """
        return self._core.counts()

    def device_counts(self) -> DeviceCounts:
        """Counts for what follows on the stream, at addresses that stay the same for as long as the handle lives.

        Waits for nothing. Raises UsageError on the CPU.
        """
        rows, begins, experts = self._core.device_counts()
        shape = (self._group.world_size, experts)
        return DeviceCounts(*(DeviceArray(address, shape, self._core) for address in (rows, begins)))

    def route(self, experts: Any, weights: Any | None = None, *, top_k: int | None = None) -> None:
        """Takes the routing of another pass. Raises UsageError, TensorError; also if a call was not completed."""
        top_k, ids = _choices(experts, weights, top_k)
        self._core.route(experts, top_k, weights)
        self._top_k, self._ids = top_k, ids

    def dispatch(
        self,
        tokens: Any,
        *,
        scales: Any | None = None,
        quantise: Quantise | None = None,
        out: Received | None = None,
        bounded: bool = False,
    ) -> Received:
        """Sends this rank's tokens and lays out what is received. All ranks must call it, with one format.

        Tokens are ``[tokens, hidden]`` in the group's type, perhaps to be quantised on the way, or in f8e4m3 with
        ``scales`` (f32, or exponents as i32 or bytes). ``out`` has room for what comes; it is made if there is none.
        Raises CapacityError if it is too small: then call :meth:`dispatch_complete` with more. On a GPU it must have
        room for the most that can come, unless it is ``bounded``: then the caller knows that no more come, and if they
        do it is a Mismatch. Otherwise as all calls: UsageError, also if another call was not completed; TensorError,
        Mismatch, Timeout, PeerLost, Aborted, Poisoned.
        """
        if out is None and self._layout in ("flat", "expert_packed"):
            self.dispatch_send(tokens, scales=scales, quantise=quantise)
            return self.dispatch_complete()
        sent = self._check_sent(tokens, scales, quantise)
        kind = kind_of(tokens)
        if out is None:
            out = self._room(kind, sent, self._rows(sent))
        else:
            self._check_room(out, sent)
        try:
            self._core.dispatch(
                tokens,
                out.tokens,
                scales=scales,
                quantise=quantise,
                output_scales=out.scales,
                output_experts=out.experts,
                output_weights=out.weights,
                output_sources=out.sources,
                bounded=bounded,
            )
        except CapacityError:
            # It was sent, and can be completed.
            self._kind, self._scales = kind, sent
            raise
        self._kind, self._scales = kind, sent
        return out

    def dispatch_send(self, tokens: Any, *, scales: Any | None = None, quantise: Quantise | None = None) -> None:
        """Sends this rank's tokens, which may be changed when it returns.

        Waits only if the call before the last has not been completed by all ranks.
        """
        sent = self._check_sent(tokens, scales, quantise)
        self._core.dispatch_send(tokens, scales=scales, quantise=quantise)
        self._kind, self._scales = kind_of(tokens), sent

    def wait_for_counts(self) -> MoeCounts:
        """Waits until it is known how many rows the dispatch that was sent brings."""
        return self._core.wait_for_counts()

    def empty(
        self, rows: int | None = None, *, like: Any, scales: Quantise | None = None, weights: bool = True
    ) -> Received:
        """Room for what a dispatch brings: for ``rows`` rows of a flat or packed layout, or for the most that can come.

        Its tensors are of the kind of ``like``, for quantised tokens if ``scales`` says what their scales are. Rows'
        weights can be left out.
        """
        most = self._rows(scales)
        if rows is None or self._layout in ("expert_major", "rank_major"):
            rows = most
        return self._room(kind_of(like), scales, min(rows, most), weights)

    def dispatch_complete(self, out: Received | None = None) -> Received:
        """Lays out what the dispatch that was sent brings. As much room is made as that takes if there is no
        ``out``."""
        if out is None:
            if self._kind is None:
                raise UsageError("no dispatch was sent; send one before completing it")
            rows = self._rows(self._scales)
            if self._layout in ("flat", "expert_packed"):
                rows = self.wait_for_counts().rows
            out = self._room(self._kind, self._scales, rows)
        else:
            self._check_room(out, self._scales)
        self._core.dispatch_complete(
            out.tokens, scales=out.scales, experts=out.experts, weights=out.weights, sources=out.sources
        )
        return out

    def combine(self, rows: Any, *, weights: Any | None = None, out: Any | None = None) -> Any:
        """Sums what the experts made of the tokens, and brings the sums back: ``[tokens, hidden]``.

        ``rows`` are laid out as the tokens were, in the group's type. They are multiplied by ``weights``, where rows
        are grouped by expert: those of the routing if it is ``"dispatched"``, or f32 ``[tokens, top_k]`` of this rank's
        tokens, which all ranks must give then. What experts of one rank made of a token is summed there and rounded
        once, then the ranks' sums are, all in f32 and in a fixed order. A token without experts becomes 0. All ranks
        must call it. ``out`` has the sums; it is made if there is none.
        """
        self._check_made(rows, weights)
        if out is None:
            out = self._sums(kind_of(rows))
        else:
            self._check("output", out)
        self._core.combine(rows, out, weights=weights)
        return out

    def combine_send(self, rows: Any, *, weights: Any | None = None) -> None:
        """Sums what the experts made of the tokens and sends the sums; ``rows`` may be changed when it returns.

        Waits only if the call before the last has not been completed by all ranks, and for weights that are given.
        """
        self._check_made(rows, weights)
        self._core.combine_send(rows, weights=weights)
        self._kind = kind_of(rows)

    def combine_complete(self, out: Any | None = None) -> Any:
        """Brings what the combine that was sent brings, to ``out`` if there is one, and returns that."""
        if out is None:
            if self._kind is None:
                raise UsageError("no combine was sent; send one before completing it")
            out = self._sums(self._kind)
        else:
            self._check("output", out)
        self._core.combine_complete(out)
        return out

    def _check(self, what: str, tensor: Any, places: tuple[int, ...] = ()) -> None:
        """That a tensor's rows are of the group's hidden size. Raises TensorError, as all of these."""
        check(what, tensor, self._group.hidden, _SIZES[self._group.dtype], places)

    def _check_sent(self, tokens: Any, scales: Any | None, quantise: Quantise | None) -> Quantise | None:
        """What the scales of tokens on their way are."""
        if scales is None:
            self._check("tokens", tokens)
            return quantise
        form: Quantise = "f32" if dtype_of(scales) == "f32" else "ue8m0"
        check("tokens", tokens, self._group.hidden, 1)
        check("scales", scales, self._scale_columns(form))
        return form

    def _check_room(self, out: Received, scales: Quantise | None) -> None:
        if scales is None:
            self._check("room for tokens", out.tokens, self._places)
        else:
            check("room for tokens", out.tokens, self._group.hidden, 1, self._places)
            if out.scales is not None:
                check("room for scales", out.scales, self._scale_columns(scales), places=self._places)
        is_by_expert = self._layout in ("expert_major", "expert_packed")
        for what, tensor in (("experts", out.experts), ("weights", out.weights)):
            if tensor is not None and not is_by_expert:
                check(f"room for {what}", tensor, self._top_k, places=self._places)

    def _check_made(self, rows: Any, weights: Any | None) -> None:
        self._check("rows", rows, self._places)
        if weights is not None and not isinstance(weights, str):
            check("weights", weights, self._top_k)

    def _scale_columns(self, scales: Quantise) -> int:
        scale_bytes: int = self._core.output_shape(scales=scales)[2]
        return scale_bytes // 4

    def _rows(self, scales: Quantise | None) -> int:
        """The most that a dispatch can bring."""
        return self._core.output_shape(scales=scales)[0]

    def _room(self, kind: Kind, scales: Quantise | None, rows: int, weights: bool = True) -> Received:
        _, _, scale_bytes, experts_per_row = self._core.output_shape(scales=scales)
        group = self._group
        shape = self._places or (rows,)
        each = (*shape, experts_per_row) if experts_per_row else shape
        scale_type = "i32" if scales == "ue8m0" else "f32"
        return Received(
            tokens=kind.empty((*shape, group.hidden), "f8e4m3" if scales else group.dtype),
            scales=kind.empty((*shape, scale_bytes // 4), scale_type) if scales else None,
            experts=kind.full(each, self._ids, -1) if experts_per_row else None,
            weights=kind.full(each, "f32", 0) if weights else None,
            sources=kind.full(shape, "i32", -1),
        )

    def _sums(self, kind: Kind) -> Any:
        return kind.empty((self._core.tokens, self._group.hidden), self._group.dtype)

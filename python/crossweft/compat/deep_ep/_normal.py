"""Calls for many tokens: rows without gaps, by source rank and then token, each once for all experts of a rank."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ... import moe
from ..._crossweft import Communicator
from ...errors import CapacityError, TensorError, UsageError
from ...moe._shapes import check_sign
from ._config import TOP_K
from ._groups import Groups, Shape, type_of_sums

#: The fewest tokens that memory is made for.
_FEWEST = 128
#: Weights of a token cross as a row of this many.
_WEIGHTS = 32

Bias: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class Pass:
    """Where tokens of one dispatch have gone, so that others can go, and come back, the same ways."""

    def __init__(
        self, group: moe.Group, experts: torch.Tensor, weights: torch.Tensor | None, rows: int, worst_rows: int
    ) -> None:
        self.group = group
        self.experts = experts
        self.handle = group.handle(experts, weights, layout="flat")
        #: How many come.
        self.rows = rows
        #: For how many there is to be room; 0 for as many as come.
        self.worst_rows = worst_rows
        #: For weights on their way back.
        self.of_weights: moe.Handle | None = None

    def room(self, tokens: torch.Tensor, scales: torch.Tensor | None) -> moe.Received:
        """Room for what comes of tokens like these."""
        rows, top_k = max(self.rows, self.worst_rows), self.experts.shape[1]
        experts = self.experts.new_empty((rows, top_k))
        weights = tokens.new_empty((rows, top_k), dtype=torch.float32)
        sources = tokens.new_empty((rows,), dtype=torch.int32)
        # Rows that nothing comes for have no experts.
        experts[self.rows :] = -1
        weights[self.rows :] = 0
        sources[self.rows :] = -1
        return moe.Received(
            tokens=tokens.new_empty(rows, tokens.shape[1]),
            scales=None if scales is None else scales.new_empty(rows, scales.shape[1]),
            experts=experts,
            weights=weights,
            sources=sources,
        )


class Handle(tuple[torch.Tensor, ...]):
    """DeepEP's six tensors: how many tokens came from each rank up to each rank, and by channel (there is one here),
    the rows' tokens in their sources, which tokens went where, and in which place."""

    way: Pass

    @classmethod
    def of(cls, way: Pass, tensors: tuple[torch.Tensor, ...]) -> Handle:
        made = cls(tensors)
        made.way = way
        return made


def first_experts(experts: int, ranks: int, device: torch.device) -> torch.Tensor:
    """The first expert of every rank: ranks have equally many, the first ones one more where that does not go."""
    each, more = divmod(experts, ranks)
    rank = torch.arange(ranks, device=device)
    return rank * each + rank.clamp(max=more)


def layout(topk_idx: torch.Tensor, experts: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens for each rank and for each expert, and which tokens are for which rank. Waits for no device."""
    _check_experts(topk_idx)
    if topk_idx.device.type == "cpu" and bool(strangers(topk_idx, experts)):
        raise UsageError(_NO_SUCH_EXPERT.format(experts))
    return _layout(topk_idx, experts, ranks)


def _check_experts(topk_idx: torch.Tensor) -> None:
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int32, torch.int64):
        raise TensorError(
            f"topk_idx is {tuple(topk_idx.shape)} of {topk_idx.dtype}; it must be [tokens, top-k] of int64"
        )


def _layout(topk_idx: torch.Tensor, experts: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = topk_idx.long()
    device = index.device
    # The first place is for those that are none.
    places = (index + 1).clamp(0, experts).flatten()
    per_expert = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    # -1 is before the first expert of rank 0. Ranks without experts come last.
    owner = torch.bucketize(index, first_experts(experts, ranks, device), right=True) - 1
    in_rank = (owner.unsqueeze(-1) == torch.arange(ranks, device=device)).any(1)
    return in_rank.sum(0, dtype=torch.int32), per_expert[1:], in_rank


def strangers(index: torch.Tensor, experts: int) -> torch.Tensor:
    """Whether there are experts that do not exist."""
    return ((index < -1) | (index >= experts)).any()


def _check_scales(x: torch.Tensor, scales: torch.Tensor | None) -> None:
    """That there are scales where there must be, one for 128 elements of a token. Raises TensorError."""
    is_quantised = x.dtype == torch.float8_e4m3fn
    if scales is None:
        if is_quantised:
            raise TensorError(f"x is of {x.dtype} without scales; give (x, scales)")
        return
    groups = -(-x.shape[1] // 128)
    columns = {torch.float32: groups, torch.int32: -(-groups // 4)}.get(scales.dtype)
    if not is_quantised or scales.shape != (len(x), columns):
        raise TensorError(
            f"x is {tuple(x.shape)} of {x.dtype}, its scales {tuple(scales.shape)} of {scales.dtype}; of "
            f"float8_e4m3fn they must be {(len(x), groups)} of float32, or {(len(x), -(-groups // 4))} of int32"
        )


_NO_SUCH_EXPERT = "topk_idx has experts that do not exist; there are {}, and -1 for none"

#: What ranks tell each other before their numbers: how many tokens they have, and what is wrong with them.
_TOLD = 2
_STRANGERS, _OTHER_RANKS, _OTHER_COUNTS, _ARGUMENTS = 1, 2, 4, 8


class Normal:
    """Dispatch and combine of as many tokens as there are."""

    def __init__(self, communicator: Communicator, groups: Groups) -> None:
        self._communicator = communicator
        self._groups = groups

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        routing: tuple[torch.Tensor | None, torch.Tensor | None],
        given: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        *,
        alignment: int,
        worst_tokens: int,
    ) -> tuple[moe.Received, list[int], Handle]:
        """Sends tokens to their experts, or without those to the ranks that they are for."""
        topk_idx, topk_weights = routing
        per_rank, per_expert, in_rank = given
        if per_rank is None or per_expert is None or in_rank is None:
            raise UsageError(
                "a dispatch without a handle needs num_tokens_per_rank, num_tokens_per_expert and is_token_in_rank: "
                "those of get_dispatch_layout"
            )
        job = self._communicator
        ranks, experts = job.world_size, per_expert.numel()
        try:
            if alignment < 1 or worst_tokens < 0:
                raise UsageError(
                    f"expert_alignment is {alignment}, num_worst_tokens {worst_tokens}; give 1 or more, and 0 or more"
                )
            self._check(x, scales, routing, (per_rank, per_expert, in_rank))
        except Exception:
            # The others raise too, rather than wait for this rank.
            nothing = torch.zeros(ranks + experts, dtype=torch.int32, device=job.device)
            self._everybody(0, nothing.new_full((), _ARGUMENTS), nothing[:ranks], nothing[ranks:])
            raise
        dtype = type_of_sums(x.dtype)
        if topk_idx is None:
            # Any expert of a rank stands for it.
            index = torch.where(in_rank, first_experts(experts, ranks, in_rank.device), -1)
            wrong = in_rank.new_zeros((), dtype=torch.int32)
        else:
            index = topk_idx.detach().contiguous()
            is_other = (_layout(index, experts, ranks)[2] != in_rank).any()
            wrong = _STRANGERS * strangers(index, experts).int() | _OTHER_RANKS * is_other.int()
        is_other = (in_rank.sum(0) != per_rank).any()
        wrong = wrong | _OTHER_COUNTS * is_other.int()
        on_device = self._everybody(len(x), wrong, per_rank, per_expert)
        everybody = on_device.cpu()
        _refuse(everybody[:, 1].tolist(), experts, job.rank)
        most = max(_FEWEST, int(everybody[:, 0].max()))
        shape = Shape(experts, 1 << (most - 1).bit_length(), x.shape[1], dtype)
        weights = None if topk_weights is None else topk_weights.detach().contiguous()
        rows = int(everybody[:, _TOLD + job.rank].sum())
        way = Pass(self._groups.at_least(shape), index, weights, rows, worst_tokens)
        received = self._send(way, x, scales)
        # Sums of what ranks have told, rounded up.
        own = way.group.local_experts()
        told = everybody[:, _TOLD + ranks :].sum(0)[own.start : own.stop].tolist()
        counts = [] if worst_tokens else [-(-n // alignment) * alignment for n in told]
        to_ranks = on_device[:, _TOLD : _TOLD + ranks]
        slots = in_rank.cumsum(0, dtype=torch.int32) - 1
        tensors = (
            to_ranks.cumsum(0, dtype=torch.int32),
            to_ranks[job.rank].unsqueeze(1).contiguous(),
            to_ranks.new_zeros(ranks, 1),
            received.sources,
            in_rank,
            torch.where(in_rank, slots, -1),
        )
        return received, counts, Handle.of(way, tensors)

    def again(self, x: torch.Tensor, scales: torch.Tensor | None, handle: Any) -> moe.Received:
        """Sends other tokens the ways of those before."""
        way = _way(handle)
        group, before = way.group, (len(way.experts), way.group.hidden)
        if x.shape != before or type_of_sums(x.dtype) != group.dtype:
            raise TensorError(
                f"x is {tuple(x.shape)} of {x.dtype}; a handle's other tokens are {before} that come back in "
                f"{group.dtype}, as those before"
            )
        _check_scales(x, scales)
        return self._send(way, x, scales)

    def combine(
        self, x: torch.Tensor, handle: Any, weights: torch.Tensor | None, bias: Bias
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums each token's rows, and its weights if there are any."""
        way = _way(handle)
        tokens, hidden = len(way.experts), way.group.hidden
        # All of it before anything is sent, or the other ranks would wait for the rest.
        rows = _all("x", x, hidden, way)
        given = [tensor for tensor in (bias if isinstance(bias, tuple) else (bias,)) if tensor is not None]
        for tensor in given:
            if tensor.shape != (tokens, hidden):
                raise TensorError(f"a bias is {tuple(tensor.shape)}; the sums are {(tokens, hidden)}")
        of_rows = None if weights is None else _weights(weights, way)
        sums: torch.Tensor = way.handle.combine(rows)
        of_tokens = None
        if weights is not None and of_rows is not None:
            of_tokens = self._sum_weights(of_rows, way)[:, : weights.shape[1]].contiguous()
        if given:
            total = sums.float()
            for tensor in given:
                total = total + tensor.detach().float()
            sums = total.to(sums.dtype)
        return sums, of_tokens

    def _sum_weights(self, rows: torch.Tensor, way: Pass) -> torch.Tensor:
        """Brings weights of rows back, each token's summed over the ranks, in f32."""
        if way.of_weights is None:
            group = way.group
            shape = Shape(group.experts, group.max_tokens, _WEIGHTS, "f32")
            way.of_weights = self._groups.at_least(shape).handle(way.experts, layout="flat")
            zeros = rows.new_zeros(len(way.experts), _WEIGHTS)
            way.of_weights.dispatch(zeros, out=way.room(zeros, None), bounded=True)
        sums: torch.Tensor = way.of_weights.combine(rows)
        return sums

    def _check(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        routing: tuple[torch.Tensor | None, torch.Tensor | None],
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """All that a dispatch is given, but for values."""
        topk_idx, topk_weights = routing
        per_rank, per_expert, in_rank = given
        ranks, device = self._communicator.world_size, torch.device(self._communicator.device)
        names = ("x", "its scales", "topk_idx", "topk_weights", "num_tokens_per_rank", "num_tokens_per_expert")
        for what, tensor in zip((*names, "is_token_in_rank"), (x, scales, *routing, *given), strict=True):
            if tensor is not None and tensor.device != device:
                raise TensorError(f"{what} is on {tensor.device}; the buffer is on {device}, so copy it there")
            check_sign(what, tensor)
        if x.dim() != 2:
            raise TensorError(f"x is {tuple(x.shape)}; it must be [tokens, hidden size]")
        type_of_sums(x.dtype)
        _check_scales(x, scales)
        if in_rank.shape != (len(x), ranks) or per_rank.numel() != ranks:
            raise TensorError(
                f"is_token_in_rank is {tuple(in_rank.shape)}, num_tokens_per_rank has {per_rank.numel()} elements; "
                f"there are {len(x)} tokens and {ranks} ranks"
            )
        if topk_idx is None:
            if topk_weights is not None:
                raise UsageError("topk_weights are of topk_idx; give both, or none")
            return
        _check_experts(topk_idx)
        top_k = topk_idx.shape[1]
        if len(topk_idx) != len(x) or not 0 < top_k <= TOP_K:
            raise TensorError(f"topk_idx is {tuple(topk_idx.shape)}; it must be [{len(x)}, 1 to {TOP_K}]")
        if topk_weights is not None and (topk_weights.shape, topk_weights.dtype) != (topk_idx.shape, torch.float32):
            raise TensorError(
                f"topk_weights is {tuple(topk_weights.shape)} of {topk_weights.dtype}; it must be "
                f"{tuple(topk_idx.shape)} of torch.float32"
            )

    def _everybody(
        self, tokens: int, wrong: torch.Tensor, per_rank: torch.Tensor, per_expert: torch.Tensor
    ) -> torch.Tensor:
        """Of each rank: how many tokens it has, what is wrong with them, and how many are for each rank and expert."""
        told = wrong.new_full((_TOLD,), tokens, dtype=torch.int32)
        told[1] = wrong
        own = torch.cat([told, per_rank.int(), per_expert.int()])
        out = own.new_empty(self._communicator.world_size, own.numel())
        self._communicator.all_gather(own, out)
        return out

    def _send(self, way: Pass, x: torch.Tensor, scales: torch.Tensor | None) -> moe.Received:
        dense = None if scales is None else scales.detach().contiguous()
        # Also if there are too many, or the other ranks would wait for this one.
        out = way.room(x, dense)
        way.handle.dispatch(x.detach().contiguous(), scales=dense, out=out, bounded=True)
        if 0 < way.worst_rows < way.rows:
            raise CapacityError(
                f"num_worst_tokens is {way.worst_rows}, but {way.rows} tokens came", rank=way.group.rank
            )
        if scales is not None and out.scales is not None and scales.stride(0) == 1 and scales.stride(1) != 1:
            # As they were given: one column after the other.
            out.scales = out.scales.T.contiguous().T
        return out


def _weights(weights: torch.Tensor, way: Pass) -> torch.Tensor:
    """Weights as they cross. Raises TensorError."""
    top_k = weights.shape[1] if weights.dim() == 2 else 0
    if top_k not in range(1, _WEIGHTS + 1) or weights.dtype != torch.float32:
        raise TensorError(
            f"topk_weights is {tuple(weights.shape)} of {weights.dtype}; it can be [rows, 1 to {_WEIGHTS}] of float32"
        )
    rows = _all("topk_weights", weights, top_k, way)
    return torch.nn.functional.pad(rows, (0, _WEIGHTS - top_k))


def _all(what: str, rows: torch.Tensor, columns: int, way: Pass) -> torch.Tensor:
    """Rows as a combine takes them: as many as there was room for. What is behind those that came is nobody's."""
    room = max(way.rows, way.worst_rows)
    if rows.dim() != 2 or len(rows) < way.rows or rows.shape[1] != columns:
        raise TensorError(f"{what} is {tuple(rows.shape)}; the dispatch brought {way.rows} rows of {columns}")
    check_sign(what, rows)
    dense = rows.detach()[:room].contiguous()
    missing = room - len(dense)
    return dense if missing == 0 else torch.nn.functional.pad(dense, (0, 0, 0, missing))


def _refuse(wrong: list[int], experts: int, own: int) -> None:
    """Raises what is wrong with some rank's routing, on all ranks."""
    for rank, what in enumerate(wrong):
        whose = "" if rank == own else f" of rank {rank}"
        if what & _ARGUMENTS:
            raise UsageError(f"the arguments{whose} are wrong, as is raised there; no tokens were sent")
        if what & _STRANGERS:
            raise UsageError(_NO_SUCH_EXPERT.format(experts).replace("topk_idx", f"topk_idx{whose}"))
        if what & _OTHER_RANKS:
            raise UsageError(f"is_token_in_rank{whose} is not what topk_idx says; give get_dispatch_layout's")
        if what & _OTHER_COUNTS:
            raise UsageError(
                f"num_tokens_per_rank{whose} is not what is_token_in_rank says; give get_dispatch_layout's"
            )


def _way(handle: Any) -> Pass:
    if not isinstance(handle, Handle):
        raise UsageError("the handle is not what a dispatch of this package has returned; give that object itself")
    return handle.way

"""Calls for many tokens: rows without gaps, by source rank and then token, each once for all experts of a rank."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ... import moe
from ..._crossweft import Communicator
from ...errors import CapacityError, TensorError, UsageError
from ._groups import Groups, Shape, type_of_sums

#: The fewest tokens that memory is made for.
_FEWEST = 128
#: Weights of a token cross as a row of this many.
_WEIGHTS = 32

Bias: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class Pass:
    """Where tokens of one dispatch have gone, so that others can go, and come back, the same ways."""

    def __init__(self, group: moe.Group, experts: torch.Tensor, weights: torch.Tensor | None, rows: int) -> None:
        self.group = group
        self.experts = experts
        self.handle = group.handle(experts, weights, layout="flat")
        self.given_rows = rows
        #: For weights on their way back.
        self.of_weights: moe.Handle | None = None


class Handle(tuple[torch.Tensor, ...]):
    """DeepEP's six tensors: how many tokens came from each rank up to each rank, and by channel (there is one here),
    the rows' tokens in their sources, which tokens went where, and in which place."""

    way: Pass

    @classmethod
    def of(cls, way: Pass, tensors: tuple[torch.Tensor, ...]) -> Handle:
        made = cls(tensors)
        made.way = way
        return made


def first_experts(experts: int, ranks: int) -> torch.Tensor:
    """The first expert of every rank: ranks have equally many, the first ones one more where that does not go."""
    each, more = divmod(experts, ranks)
    rank = torch.arange(ranks, device="cpu")
    return rank * each + rank.clamp(max=more)


def layout(topk_idx: torch.Tensor, experts: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens for each rank and for each expert, and which tokens are for which rank."""
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int32, torch.int64):
        raise TensorError(
            f"topk_idx is {tuple(topk_idx.shape)} of {topk_idx.dtype}; it must be [tokens, top-k] of int64"
        )
    if topk_idx.numel() and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < experts:
        raise UsageError(f"topk_idx has experts that do not exist; there are {experts}, and -1 for none")
    index = topk_idx.long()
    chosen = index[index >= 0]
    per_expert = torch.bincount(chosen, minlength=experts).to(torch.int32)
    # -1 is before the first expert of rank 0. Ranks without experts come last.
    owner = torch.bucketize(index, first_experts(experts, ranks), right=True) - 1
    in_rank = (owner.unsqueeze(-1) == torch.arange(ranks, device="cpu")).any(1)
    return in_rank.sum(0, dtype=torch.int32), per_expert, in_rank


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
        experts = per_expert.numel()
        if tuple(in_rank.shape) != (len(x), job.world_size) or per_rank.numel() != job.world_size:
            raise TensorError(
                f"is_token_in_rank is {tuple(in_rank.shape)}, num_tokens_per_rank has {per_rank.numel()} elements; "
                f"there are {len(x)} tokens and {job.world_size} ranks"
            )
        if topk_idx is None:
            if topk_weights is not None:
                raise UsageError("topk_weights are of topk_idx; give both, or none")
            # Any expert of a rank stands for it.
            index = torch.where(in_rank, first_experts(experts, job.world_size), -1)
        else:
            index = topk_idx.detach().contiguous()
            if not torch.equal(layout(index, experts, job.world_size)[2], in_rank):
                raise UsageError("is_token_in_rank is not what topk_idx says; give get_dispatch_layout's")
        everybody = self._everybody(len(x), per_rank, per_expert)
        most = max(_FEWEST, int(everybody[:, 0].max()))
        shape = Shape(experts, 1 << (most - 1).bit_length(), x.shape[1], type_of_sums(x.dtype))
        weights = None if topk_weights is None else topk_weights.detach().contiguous()
        way = Pass(self._groups.at_least(shape), index, weights, worst_tokens)
        received = self._send(way, x, scales)
        # Sums of what ranks have told, rounded up.
        own = way.group.local_experts()
        told = everybody[:, 1 + job.world_size :].sum(0)[own.start : own.stop]
        counts = [] if worst_tokens else [-(-int(n) // alignment) * alignment for n in told]
        to_ranks = everybody[:, 1 : 1 + job.world_size]
        slots = in_rank.cumsum(0, dtype=torch.int32) - 1
        tensors = (
            to_ranks.cumsum(0, dtype=torch.int32),
            to_ranks[job.rank].unsqueeze(1).contiguous(),
            to_ranks.new_zeros(job.world_size, 1),
            received.sources,
            in_rank,
            torch.where(in_rank, slots, -1),
        )
        return received, counts, Handle.of(way, tensors)

    def again(self, x: torch.Tensor, scales: torch.Tensor | None, handle: Any) -> moe.Received:
        """Sends other tokens the ways of those before."""
        return self._send(_way(handle), x, scales)

    def combine(self, x: torch.Tensor, handle: Any, bias: Bias) -> torch.Tensor:
        """Sums each token's rows."""
        sums: torch.Tensor = _way(handle).handle.combine(x.detach().contiguous())
        biases = bias if isinstance(bias, tuple) else (bias,)
        given = [tensor for tensor in biases if tensor is not None]
        if not given:
            return sums
        total = sums.float()
        for tensor in given:
            if tensor.shape != sums.shape:
                raise TensorError(f"a bias is {tuple(tensor.shape)}; the sums are {tuple(sums.shape)}")
            total = total + tensor.detach().float()
        return total.to(sums.dtype)

    def combine_weights(self, weights: torch.Tensor, handle: Any) -> torch.Tensor:
        """Brings weights of rows back, each token's summed over the ranks, in f32."""
        way = _way(handle)
        top_k = weights.shape[1]
        if top_k > _WEIGHTS or weights.dtype != torch.float32:
            raise TensorError(f"topk_weights are {top_k} a row, of {weights.dtype}; they can be {_WEIGHTS} of float32")
        if way.of_weights is None:
            group = way.group
            shape = Shape(group.experts, group.max_tokens, _WEIGHTS, "f32")
            way.of_weights = self._groups.at_least(shape).handle(way.experts, layout="flat")
            way.of_weights.dispatch(torch.zeros(len(way.experts), _WEIGHTS, dtype=torch.float32, device="cpu"))
        rows = torch.nn.functional.pad(weights.detach(), (0, _WEIGHTS - top_k))
        sums: torch.Tensor = way.of_weights.combine(rows)
        return sums[:, :top_k].contiguous()

    def _everybody(self, tokens: int, per_rank: torch.Tensor, per_expert: torch.Tensor) -> torch.Tensor:
        """Of each rank: how many tokens it has, and has for each rank and expert."""
        own = torch.cat([per_rank.new_tensor([tokens], dtype=torch.int32), per_rank.int(), per_expert.int()])
        out = own.new_empty(self._communicator.world_size, own.numel())
        self._communicator.all_gather(own, out)
        return out

    def _send(self, way: Pass, x: torch.Tensor, scales: torch.Tensor | None) -> moe.Received:
        handle = way.handle
        dense = None if scales is None else scales.detach().contiguous()
        handle.dispatch_send(x.detach().contiguous(), scales=dense)
        rows = handle.wait_for_counts().rows
        room = way.given_rows or rows
        ids = way.experts
        # Rows that nothing comes for have no experts.
        out = moe.Received(
            tokens=x.new_empty(max(room, rows), x.shape[1]),
            scales=None if dense is None else dense.new_empty(max(room, rows), dense.shape[1]),
            experts=ids.new_full((max(room, rows), ids.shape[1]), -1),
            weights=x.new_zeros((max(room, rows), ids.shape[1]), dtype=torch.float32),
            sources=x.new_full((max(room, rows),), -1, dtype=torch.int32),
        )
        # Even if there are too many, or the other ranks would wait for this one.
        handle.dispatch_complete(out)
        if rows > room:
            raise CapacityError(f"num_worst_tokens is {room}, but {rows} tokens came", rank=way.group.rank)
        if scales is not None and out.scales is not None and scales.stride(0) == 1 and scales.stride(1) != 1:
            # As they were given: one column after the other.
            out.scales = out.scales.T.contiguous().T
        return out


def _way(handle: Any) -> Pass:
    if not isinstance(handle, Handle):
        raise UsageError("the handle is not what a dispatch of this package has returned; give that object itself")
    return handle.way

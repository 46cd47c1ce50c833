"""Calls for few tokens: room for all that can come, by expert, and two halves of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import moe
from ...errors import TensorError, UsageError
from ._groups import Groups, Shape

Hook = Callable[[], None]


class Handle(tuple[Any, ...]):
    """DeepEP's five: which of its source's tokens a row is ``[L, R * M]``, where each source's rows are ``[L, R]``, M,
    hidden size, number of experts."""

    call: moe.Handle
    topk_idx: torch.Tensor
    #: What experts make of the rows, if they were told to put it there.
    made: torch.Tensor | None

    @classmethod
    def of(cls, call: moe.Handle, topk_idx: torch.Tensor, parts: tuple[Any, ...]) -> Handle:
        made = cls(parts)
        made.call, made.topk_idx, made.made = call, topk_idx, None
        return made


class LowLatency:
    """Dispatch and combine of at most M tokens of each rank."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def group(self, max_tokens: int, hidden: int, experts: int) -> moe.Group:
        return self.groups.of(Shape(experts, max_tokens, hidden, "bf16"))

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        group: moe.Group,
        quantise: moe.Quantise | None,
        stats: torch.Tensor | None,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, Handle, Hook]:
        """Sends tokens; what it returns is there when the hook has been called."""
        own, ranks, most = len(group.local_experts()), group.world_size, group.max_tokens
        index = topk_idx.detach().contiguous()
        if x.shape != (len(index), group.hidden) or x.dtype != torch.bfloat16:
            raise TensorError(
                f"x is {tuple(x.shape)} of {x.dtype}; it must be {(len(index), group.hidden)} of torch.bfloat16"
            )
        if stats is not None and (stats.shape != (own,) or stats.dtype != torch.int32):
            raise TensorError(f"cumulative_local_expert_recv_stats must be [{own}] of torch.int32")
        call = group.handle(index, layout="expert_major")
        out = call.empty(like=x, scales=quantise)
        counts = index.new_zeros(own, dtype=torch.int32)
        ranges = index.new_zeros((own, ranks), dtype=torch.int64)
        handle = Handle.of(call, index, (out.sources, ranges, most, group.hidden, group.experts))
        # One column after the other, which is how the matrix products of DeepEP's users read them.
        columns = None if out.scales is None else torch.empty_like(out.scales.transpose(1, 2).contiguous())
        call.dispatch_send(x.detach().contiguous(), quantise=quantise)

        def complete() -> None:
            call.dispatch_complete(out)
            found = call.counts()
            counts.copy_(counts.new_tensor(found.per_expert))
            for expert in range(own):
                for source in range(ranks):
                    begin, end = found.bounds(expert, source)
                    # Within the expert's own rows.
                    ranges[expert, source] = begin - expert * ranks * most << 32 | end - begin
            if columns is not None:
                columns.copy_(out.scales.transpose(1, 2))  # type: ignore[union-attr]
            if stats is not None:
                stats.add_(counts)
            self.groups.share_masks()

        received = out.tokens if columns is None else (out.tokens, columns.transpose(1, 2))
        return received, counts, handle, once(complete)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        zero_copy: bool,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Hook]:
        """Sends sums; what it returns is there when the hook has been called."""
        handle = checked(handle)
        if not torch.equal(topk_idx.detach(), handle.topk_idx):
            raise UsageError("topk_idx is not what was dispatched by; give the same")
        if zero_copy:
            if handle.made is None:
                raise UsageError("zero_copy takes what get_next_low_latency_combine_buffer(handle) returns; call it")
            x = handle.made
        if out is None:
            out = topk_idx.new_empty((len(topk_idx), handle.call.group.hidden), dtype=torch.bfloat16)
        call, sums = handle.call, out
        call.combine_send(x.detach().contiguous(), weights=topk_weights.detach().contiguous())

        def complete() -> None:
            call.combine_complete(sums)
            self.groups.share_masks()

        return sums, once(complete)

    def step(self, group: moe.Group) -> None:
        """A call without tokens: all ranks are there when it returns, or left out."""
        nothing = torch.empty(0, 1, dtype=torch.int64, device="cpu")
        call = group.handle(nothing, layout="flat")
        rows = call.dispatch(nothing.new_empty((0, group.hidden), dtype=torch.bfloat16))
        call.combine(rows.tokens)
        self.groups.share_masks()

    def next_buffer(self, handle: Any) -> torch.Tensor:
        """Room for what the experts make of the rows."""
        known = checked(handle)
        if known.made is None:
            group = known.call.group
            shape = (len(group.local_experts()), group.world_size * group.max_tokens, group.hidden)
            known.made = known.topk_idx.new_empty(shape, dtype=torch.bfloat16)
        return known.made


def once(complete: Hook) -> Hook:
    """A hook that may be called again, and then does nothing."""
    done = False

    def hook() -> None:
        nonlocal done
        if not done:
            complete()
            done = True

    return hook


def checked(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise UsageError("the handle is not what low_latency_dispatch has returned; give that object itself")
    return handle

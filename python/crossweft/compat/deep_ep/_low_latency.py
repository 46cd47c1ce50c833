"""Calls for few tokens: room for all that can come, by expert, and two halves of each call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ... import moe
from ...errors import Poisoned, TensorError, UsageError
from ._groups import Groups, Shape
from ._streams import Streams

#: How many shapes are kept.
_SHAPES = 4

#: Completes a call.
Complete = Callable[[], None]


class Hook:
    """Completes a call. It may be called again, and then does nothing."""

    def __init__(self, complete: Complete, dropped: Complete) -> None:
        self._complete: Complete | None = complete
        #: For one that goes without having been called.
        self._dropped: Complete | None = dropped

    def __call__(self) -> None:
        self._dropped = None
        if self._complete is not None:
            self._complete()
            # It keeps what it fills.
            self._complete = None

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped()


class Pass:
    """The tables of a pass, which others take when nobody has them any more: to allocate them anew would synchronise a
    device."""

    def __init__(self, handle: moe.Handle) -> None:
        self.handle = handle
        group = handle.group
        self.shape = (len(group.local_experts()), group.world_size)
        self._most = group.world_size * group.max_tokens
        #: Something was sent and not completed, so it can send nothing else.
        self.is_open = False
        #: Where a device has the rows of each expert from each source, the first of them, and each expert's first.
        self._tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def count(self, counts: torch.Tensor, ranges: torch.Tensor) -> None:
        """Writes the rows of each expert, ``[L]`` of i32, and of those from each source the first one and the number,
        ``[L, R]`` of i64."""
        own, ranks = self.shape
        rows, begins, first = self._on_host() if counts.device.type == "cpu" else self._on(counts.device)
        torch.sum(rows, 1, dtype=torch.int32, out=counts)
        # Within the expert's own rows, above their number.
        halves = ranges.view(torch.int32).view(own, ranks, 2)
        halves[..., 0] = rows
        torch.sub(begins, first, out=halves[..., 1])

    def _on_host(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own, ranks = self.shape
        found = self.handle.counts()
        bounds = [[found.bounds(expert, source) for source in range(ranks)] for expert in range(own)]
        of_sources = torch.tensor(bounds, dtype=torch.int32, device="cpu").view(own, ranks, 2)
        begins = of_sources[..., 0]
        return of_sources[..., 1] - begins, begins, self._first("cpu")

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._tables is None:
            counts = self.handle.device_counts()
            rows, begins = (
                torch.as_tensor(array, device=device)[:, : self.shape[0]].T for array in (counts.rows, counts.begins)
            )
            self._tables = rows, begins, self._first(device)
        return self._tables

    def _first(self, device: torch.device | str) -> torch.Tensor:
        end = self.shape[0] * self._most
        return torch.arange(0, end, self._most, dtype=torch.int32, device=device).unsqueeze(1)


class Lease:
    """A pass, as long as somebody has this."""

    def __init__(self, of: Pass, free: list[Pass]) -> None:
        self.of = of
        self._free = free

    def __del__(self) -> None:
        if not self.of.is_open:
            self._free.append(self.of)


class Handle(tuple[Any, ...]):
    """DeepEP's five: which of its source's tokens a row is ``[L, R * M]``, where each source's rows are ``[L, R]``, M,
    hidden size, number of experts."""

    lease: Lease
    topk_idx: torch.Tensor
    #: What experts make of the rows, if they were told to put it there.
    made: torch.Tensor | None

    @classmethod
    def of(cls, lease: Lease, topk_idx: torch.Tensor, parts: tuple[Any, ...]) -> Handle:
        made = cls(parts)
        made.lease, made.topk_idx, made.made = lease, topk_idx, None
        return made

    @property
    def call(self) -> moe.Handle:
        return self.lease.of.handle


class LowLatency:
    """Dispatch and combine of at most M tokens of each rank."""

    def __init__(self, groups: Groups, streams: Streams) -> None:
        self.groups = groups
        self._streams = streams
        self._free: dict[tuple[moe.Group, bool], list[Pass]] = defaultdict(list)
        self._sent = 0
        #: What can never be completed.
        self._dropped: dict[moe.Group, str] = {}

    def group(self, max_tokens: int, hidden: int, experts: int) -> moe.Group:
        group = self.groups.of(Shape(experts, max_tokens, hidden, "bf16"))
        # By the order of calls, which ranks share, so that all make one anew or none does. What a graph has recorded is
        # used without a call; and one that leaves ranks out could not be made without them.
        if len(self.groups) > _SHAPES and not self.groups.masking:
            for old in [each for each in self.groups if (each, True) not in self._free][:-_SHAPES]:
                self.groups.forget(old)
                self._free.pop((old, False), None)
                self._dropped.pop(old, None)
        return group

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        group: moe.Group,
        quantise: moe.Quantise | None,
        stats: torch.Tensor | None,
        staged: bool,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, Handle, Hook | None]:
        """Sends tokens; what it returns is there when the hook has been called, or if it is not ``staged``."""
        own, ranks, most = len(group.local_experts()), group.world_size, group.max_tokens
        index = topk_idx.detach().contiguous()
        if x.shape != (len(index), group.hidden) or x.dtype != torch.bfloat16:
            raise TensorError(
                f"x is {tuple(x.shape)} of {x.dtype}; it must be {(len(index), group.hidden)} of torch.bfloat16"
            )
        if stats is not None and (stats.shape != (own,) or stats.dtype != torch.int32):
            raise TensorError(f"cumulative_local_expert_recv_stats must be [{own}] of torch.int32")
        self._check(group)
        lease = self._lease(group, index)
        call = lease.of.handle
        out = call.empty(like=x, scales=quantise, weights=False)
        counts = index.new_empty(own, dtype=torch.int32)
        ranges = index.new_empty((own, ranks), dtype=torch.int64)
        handle = Handle.of(lease, index, (out.sources, ranges, most, group.hidden, group.experts))
        # One column after the other, which is how the matrix products of DeepEP's users read them.
        columns = None
        if out.scales is not None and out.scales.shape[2] > 1:
            columns = out.scales.new_empty((own, out.scales.shape[2], out.scales.shape[1]))
        sent = x.detach().contiguous()

        def finish() -> None:
            lease.of.count(counts, ranges)
            if columns is not None:
                columns.copy_(out.scales.transpose(1, 2))  # type: ignore[union-attr]
            if stats is not None:
                stats.add_(counts)
            self.groups.share_masks()

        def complete() -> None:
            self._check(group)
            with self._streams.call(()):
                call.dispatch_complete(out)
                lease.of.is_open = False
                finish()

        scales = out.scales if columns is None else columns.transpose(1, 2)
        received = out.tokens if scales is None else (out.tokens, scales)
        if staged:
            call.dispatch_send(sent, quantise=quantise)
            lease.of.is_open = True
            return received, counts, handle, self._hook("dispatch", group, complete)
        call.dispatch(sent, quantise=quantise, out=out)
        finish()
        return received, counts, handle, None

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        zero_copy: bool,
        out: torch.Tensor | None,
        staged: bool,
    ) -> tuple[torch.Tensor, Hook | None]:
        """Sends sums; what it returns is there when the hook has been called, or if it is not ``staged``."""
        handle = checked(handle)
        group = handle.call.group
        self._check(group)
        # Values on a device are not waited for.
        if topk_idx.shape != handle.topk_idx.shape or (
            topk_idx.device.type == "cpu" and not torch.equal(topk_idx.detach(), handle.topk_idx)
        ):
            raise UsageError("topk_idx is not what was dispatched by; give the same")
        if zero_copy:
            if handle.made is None:
                raise UsageError("zero_copy takes what get_next_low_latency_combine_buffer(handle) returns; call it")
            x = handle.made
        if out is None:
            out = topk_idx.new_empty((len(topk_idx), group.hidden), dtype=torch.bfloat16)
        call, sums = handle.call, out
        rows, weights = x.detach().contiguous(), topk_weights.detach().contiguous()

        def complete() -> None:
            self._check(group)
            with self._streams.call(()):
                # The handle's, as long as this is called.
                handle.call.combine_complete(sums)
                handle.lease.of.is_open = False
                self.groups.share_masks()

        if staged:
            call.combine_send(rows, weights=weights)
            handle.lease.of.is_open = True
            return sums, self._hook("combine", group, complete)
        call.combine(rows, weights=weights, out=sums)
        self.groups.share_masks()
        return sums, None

    def step(self, group: moe.Group) -> None:
        """A call without tokens: all ranks are there when it returns, or left out."""
        self._check(group)
        nothing = torch.empty(0, 1, dtype=torch.int64, device=self._streams.device)
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

    def _hook(self, what: str, group: moe.Group, complete: Complete) -> Hook:
        self._sent += 1
        why = f"staged call {self._sent} of this buffer, a low-latency {what}, went without its hook having been called"
        dropped = self._dropped
        return Hook(complete, lambda: dropped.__setitem__(group, why))

    def _check(self, group: moe.Group) -> None:
        """Raises Poisoned if what was sent can never be completed: nothing can then be sent after it."""
        if why := self._dropped.get(group):
            raise Poisoned(f"{why}; keep hooks and call them all, and make a new Buffer", rank=group.rank)

    def _lease(self, group: moe.Group, index: torch.Tensor) -> Lease:
        # A graph keeps the addresses of tables, so they are for graphs alone from then on. Those replay one after the
        # other.
        is_recorded = index.is_cuda and torch.cuda.is_current_stream_capturing()
        free = self._free[group, is_recorded]
        for candidates in (free, self._free[group, False]):
            if candidates:
                found = candidates.pop()
                found.handle.route(index)
                return Lease(found, free)
        return Lease(Pass(group.handle(index, layout="expert_major")), free)


def checked(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise UsageError("the handle is not what low_latency_dispatch has returned; give that object itself")
    return handle

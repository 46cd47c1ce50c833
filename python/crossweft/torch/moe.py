"""Mixture of experts with gradients: the gradient of a dispatch is a combine, and the other way round.

* :class:`Exchange`: long-lived, as :class:`crossweft.moe.Group`, and what weights' gradients go back through.
* :class:`Route`: one forward pass and its backward pass: :meth:`Route.dispatch`, :meth:`Route.combine`.
* :class:`Rows`: what a dispatch brings.

Tokens are where the communicator computes. Backward passes communicate as forward passes do, so all ranks must make
them, in the same order: also a rank that nothing was sent to must let what it received, be it no rows, into what it
combines, and where any rank wants gradients of tokens or of weights, all must.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .. import moe
from .._crossweft import Communicator
from ..errors import TensorError

__all__ = ["Exchange", "Route", "Rows"]

#: The most experts of a token.
_TOP_K = 32


class Rows(NamedTuple):
    """What a dispatch brings. Rows that nothing was received for are 0."""

    #: ``[*rows, hidden]``, which gradients go back from.
    tokens: torch.Tensor
    #: f32, which gradients go back from: ``[*rows, top_k]``, 0 where there is no expert, or ``[*rows]`` where rows are
    #: grouped by expert. ``None`` if the dispatch had none.
    weights: torch.Tensor | None
    #: ``[*rows, top_k]``: local experts of each row, -1 for none; only where rows are not grouped by expert.
    experts: torch.Tensor | None
    #: ``[*rows]`` i32: which of its source's tokens a row is; -1 where it is none.
    sources: torch.Tensor


class Exchange:
    """Memory and streams of all ranks of ``communicator`` for passes of at most ``max_tokens`` tokens of a rank.

    Arguments are those of :class:`crossweft.moe.Group`. Collective. Raises UsageError, Mismatch, Timeout, PeerLost.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        experts: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        dtype: torch.dtype = torch.bfloat16,
        blocks: int | None = None,
        timeout: float | None = None,
    ) -> None:

        def group(hidden: int, dtype: Any) -> moe.Group:
            return moe.Group(
                communicator,
                experts=experts,
                max_tokens=max_tokens,
                hidden=hidden,
                top_k=top_k,
                dtype=dtype,
                blocks=blocks,
                timeout=timeout,
            )

        self._tokens = group(hidden, dtype)
        # A weight's gradient goes back in the place of its choice, or of its expert.
        width = -(-max(experts, _TOP_K) // 4) * 4
        self._weights = group(width, "f32")

    @property
    def group(self) -> moe.Group:
        """What tokens go through."""
        return self._tokens

    def local_experts(self, rank: int | None = None) -> range:
        """The experts of a rank, or of this one."""
        return self._tokens.local_experts(rank)

    def route(self, topk_idx: torch.Tensor, *, layout: moe.Layout = "flat", alignment: int = 1) -> Route:
        """A pass whose tokens go to the experts ``topk_idx``: ``[tokens, top_k]`` of int32 or int64, -1 for none.
        Local."""
        return Route(self, topk_idx.detach().contiguous(), layout, alignment)


class Route:
    """One pass: a dispatch, what the experts do, a combine; then backward through all of it."""

    def __init__(self, exchange: Exchange, topk_idx: torch.Tensor, layout: moe.Layout, alignment: int) -> None:
        self._exchange = exchange
        self._topk_idx = topk_idx
        by_expert = layout in ("expert_major", "expert_packed")
        #: Where a row is for one expert, its sum is to have it once, however often its token names the expert.
        self._sent_idx = _once(topk_idx) if by_expert else topk_idx
        self._layout: moe.Layout = layout
        self._alignment = alignment
        self._handle: moe.Handle | None = None
        self._of_weights: moe.Handle | None = None

    def counts(self) -> moe.Counts:
        """How many rows came, and where they lie. Raises UsageError before the dispatch."""
        return self._sent().counts()

    def dispatch(self, tokens: torch.Tensor, weights: torch.Tensor | None = None) -> Rows:
        """Sends ``tokens`` ``[tokens, hidden]`` and their f32 ``weights`` ``[tokens, top_k]`` to the experts' ranks.

        Collective. Raises what :meth:`crossweft.moe.Handle.dispatch` raises.
        """
        if weights is not None and weights.shape != self._topk_idx.shape:
            raise TensorError(f"weights are {tuple(weights.shape)}, experts {tuple(self._topk_idx.shape)}")
        given = None if weights is None else self._sent_weights(weights.detach())
        group = self._exchange.group
        self._handle = group.handle(self._sent_idx, given, layout=self._layout, alignment=self._alignment)
        return Rows(*_Dispatch.apply(self, tokens, weights))

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Sums what was made of each token: ``rows`` are laid out as they came, and multiplied by their weights if that
        is wanted. Returns ``[tokens, hidden]``. Collective; raises what :meth:`crossweft.moe.Handle.combine` raises.
        """
        sums: torch.Tensor = _Combine.apply(self, rows)
        return sums

    def _sent(self) -> moe.Handle:
        if self._handle is None:
            group = self._exchange.group
            self._handle = group.handle(self._sent_idx, layout=self._layout, alignment=self._alignment)
        return self._handle

    def _sent_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Those of an expert that a token names several times, together."""
        if self._sent_idx is self._topk_idx:
            return weights.contiguous()
        # Others are left out, not multiplied by 0: those of choices that are none may be no numbers.
        return torch.where(_same(self._topk_idx), weights.unsqueeze(1), 0).sum(2).contiguous()

    def _bring(self, tokens: torch.Tensor) -> moe.Received:
        handle = self._sent()
        handle.dispatch_send(tokens.detach().contiguous())
        room = handle.empty(handle.wait_for_counts().rows, like=tokens)
        # What experts make of rows that nothing came for is multiplied by no gradient, but must be no NaN.
        room.tokens.zero_()
        return handle.dispatch_complete(room)

    def _sum(self, rows: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = self._sent().combine(rows.detach().contiguous())
        return sums

    def _sum_of_weights(self, gradients: torch.Tensor, experts: torch.Tensor | None) -> torch.Tensor:
        """Gradients of the weights of tokens, from those of rows."""
        if self._of_weights is None:
            group = self._exchange._weights
            self._of_weights = group.handle(self._sent_idx, layout=self._layout, alignment=self._alignment)
            self._of_weights.dispatch(
                self._topk_idx.new_zeros((len(self._topk_idx), group.hidden), dtype=torch.float32)
            )
        width = self._exchange._weights.hidden
        if experts is not None:
            # In the place of the choice. What this rank has no expert for has no gradient from here.
            own = torch.where(experts >= 0, gradients, 0)
            rows = torch.nn.functional.pad(own, (0, width - own.shape[-1]))
            sums: torch.Tensor = self._of_weights.combine(rows)
            return sums[:, : self._topk_idx.shape[1]]
        flat = gradients.reshape(-1)
        rows = flat.new_zeros(len(flat), width)
        counts = self.counts()
        own_experts = self._exchange.local_experts()
        for expert, begin, count in zip(own_experts, counts.expert_offsets, counts.per_expert, strict=True):
            rows[begin : begin + count, expert] = flat[begin : begin + count]
        sums = self._of_weights.combine(rows)
        chosen = sums.gather(1, self._topk_idx.long().clamp(min=0))
        return torch.where(self._topk_idx >= 0, chosen, 0)


def _same(topk_idx: torch.Tensor) -> torch.Tensor:
    """Which choices of a token are the same: ``[tokens, top_k, top_k]``."""
    return topk_idx.unsqueeze(2) == topk_idx.unsqueeze(1)


def _once(topk_idx: torch.Tensor) -> torch.Tensor:
    """Each expert once a token: -1 for what an earlier choice has named."""
    return torch.where(_same(topk_idx).tril(-1).any(2), -1, topk_idx)


class _Dispatch(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, route: Route, tokens: torch.Tensor, weights: torch.Tensor | None) -> tuple[Any, ...]:
        received = route._bring(tokens)
        ctx.route, ctx.experts = route, received.experts
        no_gradient = [t for t in (received.experts, received.sources) if t is not None]
        ctx.mark_non_differentiable(*no_gradient)
        of_rows = None if weights is None else received.weights
        return received.tokens, of_rows, received.experts, received.sources

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        of_tokens = ctx.route._sum(tokens) if ctx.needs_input_grad[1] else None
        of_weights = None
        if ctx.needs_input_grad[2] and weights is not None:
            of_weights = ctx.route._sum_of_weights(weights, ctx.experts)
        return None, of_tokens, of_weights


class _Combine(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, route: Route, rows: torch.Tensor) -> torch.Tensor:
        ctx.route = route
        ctx.shape = rows.shape
        return route._sum(rows)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, sums: torch.Tensor) -> tuple[Any, ...]:
        return None, ctx.route._bring(sums).tokens.view(ctx.shape)

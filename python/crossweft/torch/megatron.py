"""What Megatron-LM's ``MoEFlexTokenDispatcher`` sends tokens through: its communication manager, on
:mod:`crossweft.torch.moe`.

A dispatcher takes one in place of its own: ``dispatcher._comm_manager = FlexManager(exchange, router_topk)``. Tokens
come grouped by expert, so that there is nothing to permute and to restore.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import TensorError, UsageError
from .moe import Exchange, Route, Rows

__all__ = ["FlexManager", "top_k_of"]


def top_k_of(routing_map: torch.Tensor, probs: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts ``[tokens, top_k]`` (int64, -1 for none), by falling probability, and their probabilities (f32), of a
    bool map ``[tokens, experts]``.

    Gradients of probabilities go back to ``probs``. Raises UsageError if a token has more experts than ``top_k``.
    """
    if routing_map.shape != probs.shape or routing_map.dim() != 2:
        raise TensorError(
            f"the routing map is {tuple(routing_map.shape)}, probabilities {tuple(probs.shape)}; both must be "
            "[tokens, experts]"
        )
    chosen = routing_map.bool()
    if len(chosen) and int(chosen.sum(1).max()) > top_k:
        raise UsageError(f"a token has {int(chosen.sum(1).max())} experts, but top_k is {top_k}")
    if top_k > chosen.shape[1]:
        raise UsageError(f"top_k is {top_k}, of {chosen.shape[1]} experts")
    scores = torch.where(chosen, probs.detach(), -torch.inf)
    experts = scores.topk(top_k, 1)[1]
    is_chosen = chosen.gather(1, experts)
    weights = torch.where(is_chosen, probs.gather(1, experts), 0).float()
    return torch.where(is_chosen, experts, -1), weights


class FlexManager:
    """One pass after the other: ``setup_metadata``, ``dispatch``, ``get_permuted_hidden_states_by_experts``, the
    experts, ``get_restored_hidden_states_by_experts``, ``combine``.

    ``exchange`` must be for as many experts as the routing map has, and ``router_topk`` of each token. Tokens that no
    expert was chosen for, or whose choice was dropped, have fewer. Errors are those of
    :class:`crossweft.torch.moe.Route`.
    """

    def __init__(self, exchange: Exchange, router_topk: int) -> None:
        self._exchange = exchange
        self._top_k = router_topk
        self._route: Route | None = None
        self._rows: Rows | None = None
        self.token_indices: torch.Tensor | None = None
        #: ``[tokens, router_topk]``, f32.
        self.token_probs: torch.Tensor | None = None
        #: Of each row that came.
        self.dispatched_probs: torch.Tensor | None = None

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Takes where tokens go: ``[tokens, experts]``, or ``[tokens, ranks, local experts]``."""
        shape = (len(routing_map), self._exchange.group.experts)
        if routing_map.numel() != shape[0] * shape[1]:
            raise TensorError(f"the routing map is {tuple(routing_map.shape)}, of {shape[1]} experts")
        self.token_indices, self.token_probs = top_k_of(routing_map.reshape(shape), probs.reshape(shape), self._top_k)

    def dispatch(
        self, hidden_states: torch.Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> torch.Tensor:
        """Sends tokens; returns those that came, grouped by expert: ``[rows, hidden]``. Collective."""
        if self.token_indices is None:
            raise UsageError("where tokens go is not known; call setup_metadata before")
        self._route = self._exchange.route(self.token_indices, layout="expert_packed")
        self._rows = self._route.dispatch(hidden_states, self.token_probs)
        self.dispatched_probs = self._rows.weights
        return self._rows.tokens

    def get_dispached_metadata(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The local expert of each row that came, and its probability."""
        counts = self.get_number_of_tokens_per_expert()
        experts = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
        if self._rows is not None:
            experts = experts.to(self._rows.tokens.device)
        return experts, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> torch.Tensor:
        """Rows of each local expert, int64, on the host."""
        return torch.tensor(self._sent().counts().per_expert, dtype=torch.int64, device="cpu")

    def get_permuted_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> tuple[Any, Any]:
        """What the dispatch returned, as it is, and each row's probability."""
        self._sent()
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the experts made, as it is."""
        return hidden_states

    def combine(
        self, hidden_states: torch.Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> torch.Tensor:
        """Sums what the experts made of each token. Collective; it ends the pass."""
        sums = self._sent().combine(hidden_states)
        self._route = self._rows = None
        return sums

    def _sent(self) -> Route:
        if self._route is None:
            raise UsageError("nothing was dispatched; dispatch before")
        return self._route

"""The manager for Megatron-LM's Flex dispatcher, against all experts on one rank."""

from __future__ import annotations

import pytest
import torch
from conftest import in_threads

import crossweft as cw
from crossweft.torch.megatron import FlexManager, top_k_of
from crossweft.torch.moe import Exchange

RANKS = 2
EXPERTS = 4
HIDDEN = 8
TOP_K = 2


def test_from_many_hot_to_top_k() -> None:
    routing = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    probs = torch.tensor([[0.2, 0.9, 0.7, 0.1], [0.4, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    experts, weights = top_k_of(routing, probs, 2)
    # One that was chosen with probability 0 is chosen; what was not is not, whatever it has.
    assert experts.tolist() == [[2, 0], [3, -1], [-1, -1]]
    assert torch.equal(weights, torch.tensor([[0.7, 0.2], [0.0, 0.0], [0.0, 0.0]]))
    (weights * torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).sum().backward()
    assert probs.grad is not None and probs.grad.tolist() == [[2, 0, 1, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
    with pytest.raises(cw.UsageError, match="a token has 2 experts"):
        top_k_of(routing, probs, 1)
    with pytest.raises(cw.TensorError, match="routing map is"):
        top_k_of(routing[:2], probs, 2)


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, map and probabilities."""
    generator = torch.Generator().manual_seed(rank)
    count = 5 + rank
    probs = torch.rand(count, EXPERTS, generator=generator)
    routing = torch.zeros_like(probs).scatter(1, probs.topk(TOP_K, 1)[1], 1).bool()
    # Dropped, as by a capacity.
    routing[0] = False
    routing[1, :2] = False
    return torch.randn(count, HIDDEN, generator=generator), routing, probs


def test_a_layer() -> None:
    matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9))

    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        exchange = Exchange(
            communicator, experts=EXPERTS, max_tokens=8, hidden=HIDDEN, top_k=TOP_K, dtype=torch.float32
        )
        manager = FlexManager(exchange, TOP_K)
        with pytest.raises(cw.UsageError, match="setup_metadata"):
            manager.dispatch(torch.zeros(1, HIDDEN))
        with pytest.raises(cw.UsageError, match="nothing was dispatched"):
            manager.combine(torch.zeros(1, HIDDEN))
        own = exchange.local_experts()
        for _ in range(2):
            tokens, routing, probs = inputs(rank)
            tokens.requires_grad_()
            probs.requires_grad_()
            # As the dispatcher has them: by rank and local expert.
            shape = (len(tokens), RANKS, EXPERTS // RANKS)
            manager.setup_metadata(routing.view(shape), probs.view(shape))
            came = manager.dispatch(tokens, True, True)
            rows, row_probs = manager.get_permuted_hidden_states_by_experts(came)
            counts = manager.get_number_of_tokens_per_expert()
            needed = [sum(int(inputs(source)[1][:, expert].sum()) for source in range(RANKS)) for expert in own]
            assert counts.tolist() == needed and len(rows) == sum(needed)
            experts, same = manager.get_dispached_metadata()
            assert same is row_probs and torch.bincount(experts, minlength=len(own)).tolist() == needed
            parts = rows.split(counts.tolist())
            made = torch.cat([part @ matrices[expert] for part, expert in zip(parts, own, strict=True)])
            made = manager.get_restored_hidden_states_by_experts(made * row_probs.unsqueeze(1))
            combined = manager.combine(made, True, True)

            x, _, p = inputs(rank)
            x.requires_grad_()
            p.requires_grad_()
            expected = torch.einsum("te,eho,th->to", torch.where(routing, p, 0), matrices, x)
            torch.testing.assert_close(combined, expected)
            combined.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(tokens.grad, x.grad, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(probs.grad, p.grad, rtol=1e-4, atol=1e-4)

    in_threads(RANKS, rank_main)

"""Gradients of mixtures of experts, against all experts on one rank in f64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import in_threads

import crossweft as cw
from crossweft import moe
from crossweft.torch.moe import Exchange, Rows

RANKS = 3
EXPERTS = 5  # 2, 2 and 1 a rank.
HIDDEN = 12
TOP_K = 3
#: The last rank has none.
TOKENS = [7, 4, 0]


@pytest.fixture
def f64_by_default() -> Iterator[None]:
    """What nothing must be of by mistake."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, experts, weights, and what the sums are multiplied by for the loss."""
    generator = torch.Generator().manual_seed(rank)
    count = TOKENS[rank]
    tokens = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
    # Some experts several times, some choices none.
    topk_idx = torch.randint(-1, EXPERTS, (count, TOP_K), generator=generator)
    weights = torch.rand(count, TOP_K, generator=generator, dtype=torch.float64)
    return tokens, topk_idx, weights, torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)


def matrices() -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64) / HIDDEN**0.5


def expert(tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return torch.tanh(tokens @ matrix)


def reference() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Sums and gradients of tokens and weights of every rank, gradients of all experts."""
    experts = matrices().requires_grad_()
    sums, all_tokens, all_weights = [], [], []
    loss = torch.zeros((), dtype=torch.float64)
    for rank in range(RANKS):
        tokens, topk_idx, weights, factors = inputs(rank)
        tokens.requires_grad_()
        weights.requires_grad_()
        total = torch.zeros_like(tokens)
        for k in range(TOP_K):
            for e in range(EXPERTS):
                chosen = (topk_idx[:, k] == e).unsqueeze(1)
                total = total + torch.where(chosen, weights[:, k : k + 1] * expert(tokens, experts[e]), 0)
        loss = loss + (total * factors).sum()
        sums.append(total.detach())
        all_tokens.append(tokens)
        all_weights.append(weights)
    loss.backward()
    assert experts.grad is not None
    return sums, [t.grad for t in all_tokens], [w.grad for w in all_weights], experts.grad


def by_row(rows: Rows, own: range, experts: torch.Tensor) -> torch.Tensor:
    """What the experts make of rows that may be for several of them."""
    assert rows.weights is not None and rows.experts is not None
    made = torch.zeros_like(rows.tokens)
    for k in range(TOP_K):
        for local in range(len(own)):
            chosen = (rows.experts[..., k] == local).unsqueeze(-1)
            made = made + torch.where(chosen, rows.weights[..., k : k + 1] * expert(rows.tokens, experts[local]), 0)
    return made


def by_expert(rows: Rows, counts: moe.Counts, experts: torch.Tensor) -> torch.Tensor:
    """What the experts make of the rows that are each for one of them."""
    assert rows.weights is not None
    flat = rows.tokens.reshape(-1, HIDDEN)
    weighted = torch.zeros_like(flat)
    for local, (begin, count) in enumerate(zip(counts.expert_offsets, counts.per_expert, strict=True)):
        span = torch.zeros(len(flat), 1, dtype=torch.bool)
        span[begin : begin + count] = True
        made = expert(flat, experts[local]) * rows.weights.reshape(-1, 1)
        weighted = weighted + torch.where(span, made, 0)
    return weighted.view(rows.tokens.shape)


@pytest.mark.usefixtures("f64_by_default")
@pytest.mark.parametrize("layout", ["flat", "rank_major", "expert_packed", "expert_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_one_rank(layout: moe.Layout, dtype: torch.dtype) -> None:
    sums, of_tokens, of_weights, of_experts = reference()
    rough = dtype == torch.bfloat16

    def close(found: torch.Tensor | None, expected: torch.Tensor) -> None:
        assert found is not None
        torch.testing.assert_close(found.double(), expected, rtol=0.05 if rough else 1e-4, atol=0.08 if rough else 1e-5)

    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        hidden = HIDDEN if not rough else 16
        exchange = Exchange(
            communicator, experts=EXPERTS, max_tokens=8, hidden=hidden, top_k=TOP_K, dtype=dtype, timeout=60
        )
        own = exchange.local_experts()
        for _ in range(2):
            tokens, topk_idx, weights, factors = inputs(rank)
            tokens = tokens.to(dtype).requires_grad_()
            weights = weights.float().requires_grad_()
            experts = matrices()[own.start : own.stop].to(dtype).requires_grad_()
            route = exchange.route(topk_idx, layout=layout, alignment=4)
            padded = torch.nn.functional.pad(tokens, (0, hidden - HIDDEN))
            rows = route.dispatch(padded, weights)
            rows = rows._replace(tokens=rows.tokens[..., :HIDDEN])
            if layout in ("flat", "rank_major"):
                made = by_row(rows, own, experts)
            else:
                made = by_expert(rows, route.counts(), experts)
            combined = route.combine(torch.nn.functional.pad(made.to(dtype), (0, hidden - HIDDEN)))[:, :HIDDEN]
            close(combined, sums[rank])
            (combined.double() * factors).sum().backward()
            close(tokens.grad, of_tokens[rank])
            close(weights.grad, of_weights[rank])
            close(experts.grad, of_experts[own.start : own.stop])

    in_threads(RANKS, rank_main)


def test_each_is_the_others_transpose() -> None:
    """<dispatch(x), y> == <x, combine(y)> over all ranks, for any x and y."""

    def rank_main(communicator: cw.Communicator) -> list[float]:
        rank = communicator.rank
        exchange = Exchange(
            communicator, experts=EXPERTS, max_tokens=8, hidden=HIDDEN, top_k=TOP_K, dtype=torch.float32
        )
        tokens, topk_idx, _, _ = inputs(rank)
        found = []
        layouts: list[moe.Layout] = ["flat", "rank_major", "expert_packed", "expert_major"]
        for layout in layouts:
            route = exchange.route(topk_idx.int(), layout=layout)
            rows = route.dispatch(tokens.float())
            assert rows.weights is None
            generator = torch.Generator().manual_seed(7 + rank)
            other = torch.randn(rows.tokens.shape, generator=generator)
            back = route.combine(other)
            found += [float((rows.tokens.double() * other).sum()), float((tokens * back).sum())]
        return found

    of_ranks = in_threads(RANKS, rank_main)
    total = torch.tensor(of_ranks, dtype=torch.float64).sum(0).view(-1, 2)
    assert (total[:, 0].abs() > 0.1).all()
    torch.testing.assert_close(total[:, 0], total[:, 1], rtol=1e-5, atol=1e-5)


def test_weights_of_choices_that_are_none_are_of_no_account() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        exchange = Exchange(communicator, experts=2, max_tokens=2, hidden=8, top_k=3, dtype=torch.float32)
        topk_idx = torch.tensor([[0, -1, 1], [1, 1, -1]])
        weights = torch.tensor([[0.5, torch.nan, 0.25], [0.5, 0.125, torch.nan]], requires_grad=True)
        tokens = torch.ones(2, 8)
        layouts: list[moe.Layout] = ["flat", "rank_major", "expert_packed", "expert_major"]
        for layout in layouts:
            route = exchange.route(topk_idx, layout=layout)
            rows = route.dispatch(tokens, weights)
            assert rows.weights is not None
            of_row = rows.weights.sum(-1) if layout in ("flat", "rank_major") else rows.weights
            sums = route.combine(rows.tokens * of_row.unsqueeze(-1))
            assert sums[:, 0].tolist() == [0.75, 0.625], layout
            weights.grad = None
            sums.sum().backward()
            assert weights.grad is not None
            assert weights.grad.tolist() == [[8, 0, 8], [8, 8, 0]], layout

    in_threads(2, rank_main)


def test_errors() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        exchange = Exchange(communicator, experts=2, max_tokens=4, hidden=8, top_k=1)
        route = exchange.route(torch.zeros(2, 1, dtype=torch.int64))
        with pytest.raises(cw.TensorError, match="weights are"):
            route.dispatch(torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 2))
        with pytest.raises(cw.UsageError, match="no counts"):
            route.counts()
        with pytest.raises(cw.UsageError, match="nothing to combine"):
            route.combine(torch.zeros(2, 8, dtype=torch.bfloat16))

    in_threads(1, rank_main)

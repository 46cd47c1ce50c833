"""DeepEP's names: normal and low-latency calls, their values, and what happens to those that cannot be."""

from __future__ import annotations

import importlib
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_threads, torchrun
from torch.multiprocessing.reductions import StorageWeakRef

import crossweft as cw
from crossweft.compat import deep_ep
from crossweft.compat.deep_ep import Buffer, Config
from crossweft.torch.moe import Exchange

HERE = Path(__file__).parent
TOP_K = 4


class Job:
    """Tokens and routing of all ranks, which every rank can tell."""

    def __init__(self, ranks: int, tokens: int, hidden: int, experts: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ranks, self.tokens, self.hidden, self.experts = ranks, tokens, hidden, experts
        self.local = experts // ranks
        # Rank and token show in every element, and can be told apart in bf16.
        self.x = [self._tokens(rank) for rank in range(ranks)]
        scores = torch.rand(ranks, tokens, experts, generator=generator)
        self.topk_idx = scores.topk(TOP_K, -1)[1]
        self.topk_idx[torch.rand(self.topk_idx.shape, generator=generator) < 0.15] = -1
        self.weights = torch.rand(ranks, tokens, TOP_K, generator=generator)

    def _tokens(self, rank: int) -> torch.Tensor:
        token = torch.arange(self.tokens).unsqueeze(1)
        column = torch.arange(self.hidden).unsqueeze(0)
        return (rank * 64 + token + (column % 2) * 0.5).to(torch.bfloat16)

    def here(self, rank: int) -> torch.Tensor:
        """Which tokens of all ranks are for this one: ``[ranks, tokens]``."""
        return ((self.topk_idx >= rank * self.local) & (self.topk_idx < (rank + 1) * self.local)).any(-1)

    def for_expert(self, source: int, expert: int) -> list[int]:
        return [token for token in range(self.tokens) if expert in self.topk_idx[source, token].tolist()]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """One minus the similarity of two tensors."""
    a, b = a.double() + 1, b.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for 128 elements."""
    groups = x.float().view(len(x), -1, 128)
    scales = groups.abs().amax(-1).clamp(1e-4) / 448
    return (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(x.shape), scales


def from_fp8(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.int32:
        scales = torch.exp2(scales.contiguous().view(torch.uint8).float() - 127)
    groups = x.float().reshape(*x.shape[:-1], -1, 128)
    return (groups * scales[..., : groups.shape[-2]].unsqueeze(-1)).reshape(x.shape)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("with_experts", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_normal(ranks: int, fp8: bool, with_experts: bool, asynchronous: bool) -> None:
    job = Job(ranks, 37, 256, 8)

    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        buffer = Buffer(communicator, int(2e9), 0, low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True)
        x = job.x[rank]
        topk_idx, weights = job.topk_idx[rank], job.weights[rank]
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, job.experts)
        assert per_rdma_rank is None and event.event is None
        for peer in range(ranks):
            assert torch.equal(in_rank[:, peer], job.here(peer)[rank]) and per_rank[peer] == in_rank[:, peer].sum()
        assert per_expert.tolist() == [len(job.for_expert(rank, expert)) for expert in range(job.experts)]
        assert (per_rank.dtype, per_expert.dtype, in_rank.dtype) == (torch.int32, torch.int32, torch.bool)

        sent: Any = x
        if fp8:
            values, scales = to_fp8(x)
            sent = (values, scales.T.contiguous().T)
        arguments: dict[str, Any] = {
            "x": sent,
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "config": Config(24, 8, 256),
            "async_finish": asynchronous,
        }
        if with_experts:
            arguments |= {"topk_idx": topk_idx, "topk_weights": weights}
        if asynchronous:
            arguments["previous_event"] = buffer.capture()
        recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(**arguments)
        assert (event.event is not None) == asynchronous
        with event:
            pass
        event.current_stream_wait()
        if fp8:
            assert recv_x[1].stride(0) == 1
            rows = from_fp8(*recv_x)
        else:
            rows = recv_x.float()

        # By source rank, then token.
        here = job.here(rank)
        expected = torch.cat([job.x[source][here[source]] for source in range(ranks)]).float()
        if fp8:
            assert torch.allclose(rows, expected, rtol=0.07)
        else:
            assert torch.equal(rows, expected)
        ends = here.sum(1).cumsum(0)
        assert torch.equal(handle[0][:, rank], ends.int())
        assert handle[3].tolist() == [t for source in range(ranks) for t in here[source].nonzero()[:, 0].tolist()]
        own = range(rank * job.local, (rank + 1) * job.local)
        of_own = [sum(len(job.for_expert(source, expert)) for source in range(ranks)) for expert in own]
        assert counts == of_own
        if with_experts:
            assert recv_idx is not None and recv_weights is not None
            theirs = torch.cat([job.topk_idx[source][here[source]] for source in range(ranks)])
            is_own = (theirs >= own.start) & (theirs < own.stop)
            assert torch.equal(recv_idx, torch.where(is_own, theirs - own.start, -1))
            given = torch.cat([job.weights[source][here[source]] for source in range(ranks)])
            assert torch.equal(recv_weights, torch.where(is_own, given, 0))
        else:
            assert recv_idx is None and recv_weights is None

        # As many rows as can be: the same come first.
        worst, worst_idx, _, none, _, _ = buffer.dispatch(**arguments, num_worst_tokens=job.tokens * ranks)
        assert none == []
        padded = worst[0] if fp8 else worst
        assert len(padded) == job.tokens * ranks
        first = recv_x[0] if fp8 else recv_x
        assert torch.equal(padded[: len(rows)].float(), first.float())
        if with_experts:
            assert torch.equal(worst_idx[: len(rows)], recv_idx)
            assert (worst_idx[len(rows) :] == -1).all()

        # Others go the ways of those before.
        again, *nothing, _ = buffer.dispatch(x=job.x[(rank + 1) % ranks], handle=handle, config=Config(24, 8, 256))
        assert nothing[:3] == [None, None, None]
        others = [job.x[(source + 1) % ranks][here[source]] for source in range(ranks)]
        assert torch.equal(again, torch.cat(others))

        # Every rank returns what it got: once for each rank that a token went to.
        returned = rows.to(torch.bfloat16)
        back: dict[str, Any] = {"x": returned, "handle": handle, "config": Config(24, 4, 256)}
        if with_experts:
            back["topk_weights"] = recv_weights
        combined, combined_weights, event = buffer.combine(**back)
        times = in_rank.sum(1, keepdim=True)
        assert difference(combined, x.float() * times) < (1e-3 if fp8 else 5e-6)
        assert (combined[times[:, 0] == 0] == 0).all()
        if with_experts:
            assert combined_weights is not None
            assert torch.equal(combined_weights, torch.where(topk_idx >= 0, weights, 0))
            # The handle has all that a second one needs.
            assert torch.equal(buffer.combine(**back)[1], combined_weights)
        biased, none, _ = buffer.combine(returned, handle, bias=(x, torch.ones_like(x)))
        assert none is None
        assert torch.equal(biased, (combined.float() + x.float() + 1).to(torch.bfloat16))
        buffer.destroy()
        with pytest.raises(cw.UsageError, match="destroyed"):
            buffer.combine(returned, handle)

    in_threads(ranks, rank_main)


def test_normal_of_any_size() -> None:
    """More tokens than before, none, experts that ranks do not share evenly, alignment."""
    ranks, experts, hidden = 3, 7, 24

    def batch(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(rank * 1000 + tokens)
        topk_idx = torch.rand(tokens, experts, generator=generator).topk(2, -1)[1]
        return torch.randint(-8, 8, (tokens, hidden), generator=generator).to(torch.bfloat16), topk_idx

    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        buffer = Buffer(communicator)
        own = [[0, 1, 2], [3, 4], [5, 6]][rank]
        for tokens in [[5, 9, 2], [0, 300, 3], [0, 0, 0], [130, 1, 500]]:
            x, topk_idx = batch(rank, tokens[rank])
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, experts)
            weights = torch.ones(topk_idx.shape)
            recv_x, _, _, counts, handle, _ = buffer.dispatch(
                x=x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=weights,
                expert_alignment=16,
            )
            batches = [batch(source, tokens[source]) for source in range(ranks)]
            needed = [sum(int((idx == expert).sum()) for _, idx in batches) for expert in own]
            assert counts == [math.ceil(n / 16) * 16 for n in needed]
            mine = [x[torch.isin(idx, torch.tensor(own)).any(1)] for x, idx in batches]
            assert torch.equal(recv_x, torch.cat(mine))
            combined, _, _ = buffer.combine(recv_x, handle)
            assert torch.equal(combined, x * in_rank.sum(1, keepdim=True).to(torch.bfloat16))

    in_threads(ranks, rank_main)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("scales", [None, "f32", "rounded", "ue8m0"])
def test_low_latency(ranks: int, hook: bool, scales: str | None) -> None:
    hidden, most = 512, 24
    job = Job(ranks, 20, hidden, 8)

    def rank_main(communicator: cw.Communicator) -> list[torch.Tensor]:
        rank = communicator.rank
        hint = Buffer.get_low_latency_rdma_size_hint(most, hidden, ranks, job.experts)
        buffer = Buffer(communicator, num_rdma_bytes=hint, low_latency_mode=True, explicitly_destroy=True)
        assert buffer.low_latency_mode and (buffer.rank, buffer.group_size) == (rank, ranks)
        x, topk_idx, weights = job.x[rank], job.topk_idx[rank], job.weights[rank]
        stats = torch.zeros(job.local, dtype=torch.int32)
        made = []
        for times in range(1, 3):
            for _ in range(times):
                received, counts, handle, event, receive = buffer.low_latency_dispatch(
                    x,
                    topk_idx,
                    most,
                    job.experts,
                    use_fp8=scales is not None,
                    round_scale=scales in ("rounded", "ue8m0"),
                    use_ue8m0=scales == "ue8m0",
                    cumulative_local_expert_recv_stats=stats,
                    async_finish=not hook,
                    return_recv_hook=hook,
                )
                assert (receive is not None) == hook and (event.event is not None) != hook
                if receive is not None:
                    receive()
                    receive()
            if scales is None:
                rows = received.float()
            else:
                of_row = hidden // 512 if scales == "ue8m0" else hidden // 128
                assert received[1].shape == (job.local, ranks * most, of_row)
                assert received[1].transpose(1, 2).is_contiguous()
                rows = from_fp8(*received)
            assert rows.shape == (job.local, ranks * most, hidden) and handle[2:] == (most, hidden, job.experts)
            for local in range(job.local):
                used = 0
                for source in range(ranks):
                    begin, count = int(handle[1][local, source]) >> 32, int(handle[1][local, source]) & 0xFFFFFFFF
                    tokens = job.for_expert(source, rank * job.local + local)
                    assert handle[0][local, begin : begin + count].tolist() == tokens
                    expected = job.x[source][tokens].float()
                    found = rows[local, begin : begin + count]
                    assert (
                        torch.equal(found, expected) if scales is None else torch.allclose(found, expected, rtol=0.07)
                    )
                    used += count
                assert counts[local] == used
            # Those that were not received may hold anything, and are not summed.
            rows = torch.where(handle[0].unsqueeze(-1) >= 0, rows, torch.nan)
            made_here = rows.to(torch.bfloat16)
            zero_copy = times == 2
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = made_here
            out = torch.full((job.tokens, hidden), torch.nan, dtype=torch.bfloat16)
            combined, _, receive = buffer.low_latency_combine(
                made_here, topk_idx, weights, handle, zero_copy=zero_copy, return_recv_hook=hook, out=out
            )
            if receive is not None:
                receive()
            assert combined is out and not combined.isnan().any()
            expected = x.float() * torch.where(topk_idx >= 0, weights, 0).sum(1, keepdim=True)
            assert difference(combined, expected) < (1e-5 if scales is None else 9e-4)
            made.append(combined.clone())
        of_all = [len(job.for_expert(s, rank * job.local + e)) for e in range(job.local) for s in range(ranks)]
        assert stats.tolist() == (3 * torch.tensor(of_all).view(job.local, ranks).sum(1)).tolist()
        assert torch.equal(made[0], made[1])
        return made

    # The same bits in another run.
    first, second = in_threads(ranks, rank_main), in_threads(ranks, rank_main)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[0], b[0])


def test_two_low_latency_calls_under_way() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator, low_latency_mode=True)
        peer = torch.tensor([[1 - communicator.rank]])
        ones = torch.ones(1, 1)
        x = [torch.full((1, 128), 2.0 * communicator.rank + i, dtype=torch.bfloat16) for i in range(2)]
        calls = [buffer.low_latency_dispatch(each, peer, 4, 2, use_fp8=False, return_recv_hook=True) for each in x]
        with pytest.raises(cw.UsageError, match="two calls are under way"):
            buffer.low_latency_dispatch(x[0], peer, 4, 2, use_fp8=False, return_recv_hook=True)
        with pytest.raises(cw.UsageError, match="another call was sent before"):
            calls[1][4]()
        for _, _, _, _, hook in calls:
            hook()
        for i, (rows, counts, handle, _, _) in enumerate(calls):
            assert counts.tolist() == [1]
            assert (rows[0, 0] == 2.0 * (1 - communicator.rank) + i).all()
            combined, _, _ = buffer.low_latency_combine(rows, peer, ones, handle)
            assert torch.equal(combined, x[i])

    in_threads(2, rank_main)


def test_ranks_that_are_gone_are_left_out() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        buffer = Buffer(communicator, low_latency_mode=True, enable_shrink=True)
        buffer.clean_low_latency_buffer(4, 128, 3)
        masks = torch.full((3,), 7, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(masks)
        assert masks.tolist() == [0, 0, 0]
        if rank == 1:
            return  # and leaves
        topk_idx = torch.tensor([[0, 1], [1, 2], [2, 0]])
        weights = torch.tensor([[0.5, 0.25]]).repeat(3, 1)
        x = torch.full((3, 128), rank + 1.0, dtype=torch.bfloat16)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, 3, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
        assert torch.equal(combined, x * torch.tensor([[0.5], [0.25], [0.75]], dtype=torch.bfloat16))
        buffer.low_latency_query_mask_buffer(masks)
        assert masks.tolist() == [0, 1, 0]
        with pytest.raises(cw.UsageError, match="cannot be masked"):
            buffer.low_latency_update_mask_buffer(rank, True)
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_update_mask_buffer(1, True)
        buffer.low_latency_query_mask_buffer(masks)
        assert masks.tolist() == [0, 1, 0]
        buffer.clean_low_latency_buffer(4, 128, 3)

    in_threads(3, rank_main)


def test_what_cannot_be() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator)
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        topk_idx = torch.tensor([[0], [1]])
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        with pytest.raises(cw.UsageError, match="get_dispatch_layout"):
            buffer.dispatch(x)
        with pytest.raises(cw.UsageError, match="do not exist"):
            buffer.get_dispatch_layout(topk_idx, 1)
        given: dict[str, Any] = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }
        with pytest.raises(cw.UsageError, match="not what topk_idx says"):
            buffer.dispatch(x, topk_idx=-torch.ones_like(topk_idx), **given)
        with pytest.raises(cw.UsageError, match="num_tokens_per_rank is not what"):
            buffer.dispatch(x, topk_idx=topk_idx, **{**given, "num_tokens_per_rank": per_rank + 1})
        with pytest.raises(cw.TensorError, match="float64"):
            buffer.dispatch(x.double(), topk_idx=topk_idx, **given)
        with pytest.raises(cw.CapacityError, match="num_worst_tokens is 1, but 2"):
            buffer.dispatch(x, topk_idx=topk_idx, num_worst_tokens=1, **given)
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **given)
        with pytest.raises(cw.UsageError, match="that object itself"):
            buffer.combine(recv_x, tuple(handle))
        with pytest.raises(cw.UsageError, match="have its experts"):
            buffer.dispatch(x, handle=handle, topk_idx=topk_idx)
        wide = torch.nn.functional.pad(recv_x, (0, 128))
        for wrong in (x[:1], wide, recv_x.reshape(-1)):
            with pytest.raises(cw.TensorError, match="the dispatch brought 2 rows of 128"):
                buffer.combine(wrong, handle)
        for call in (buffer.internode_dispatch, buffer.internode_combine):
            with pytest.raises(deep_ep.Unsupported, match="several hosts"):
                call(x)
        with pytest.raises(deep_ep.Unsupported, match="layout of its own"):
            buffer.get_local_buffer_tensor(torch.bfloat16)
        with pytest.raises(cw.UsageError, match="enable_shrink"):
            buffer.low_latency_clean_mask_buffer()
        with pytest.raises(cw.UsageError, match="one of async_finish"):
            buffer.low_latency_dispatch(x, topk_idx, 2, 2, async_finish=True, return_recv_hook=True)
        with pytest.raises(deep_ep.Unsupported, match="not measured"):
            buffer.low_latency_dispatch(x, topk_idx, 2, 2, dispatch_wait_recv_cost_stats=torch.zeros(1))
        with pytest.raises(cw.UsageError, match="tokens"):
            buffer.low_latency_dispatch(x, topk_idx, 1, 2)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 2, 2, use_fp8=False)
        with pytest.raises(cw.UsageError, match="zero_copy"):
            buffer.low_latency_combine(rows, topk_idx, torch.ones(2, 1), handle, zero_copy=True)
        with pytest.raises(cw.UsageError, match="not what was dispatched"):
            buffer.low_latency_combine(rows, 1 - topk_idx, torch.ones(2, 1), handle)
        buffer.get_comm_stream()

    in_threads(1, rank_main)
    with pytest.raises(cw.UsageError, match="a group or"):
        Buffer()


def test_tensors_of_another_shape_are_refused() -> None:
    """They would be read with the wrong stride, be there bytes enough. No rank sends anything."""

    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator)
        x = torch.arange(1.0, 5).unsqueeze(1).expand(4, 128).bfloat16()
        topk_idx, weights = torch.tensor([[0, 1], [1, -1], [0, -1], [1, 0]]), torch.ones(4, 2)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        rows, _, of_rows, _, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, topk_idx, weights
        )
        assert isinstance(rows, torch.Tensor) and of_rows is not None
        bytes_of_x = torch.ones(8, 64, dtype=torch.bfloat16)
        for other in (bytes_of_x, x[:3], torch.ones(4, 256, dtype=torch.bfloat16), x.float(), x.reshape(-1)):
            with pytest.raises(cw.TensorError, match=r"a handle's other tokens are \(4, 128\)"):
                buffer.dispatch(other, handle)
        quantised = x.to(torch.float8_e4m3fn)
        for sent in (quantised, (quantised, torch.ones(4, 2)), (x, torch.ones(4, 1))):
            with pytest.raises(cw.TensorError, match="scales"):
                buffer.dispatch(sent, handle)
        with pytest.raises(cw.TensorError, match="a bias is"):
            buffer.combine(rows, handle, bias=x[:1])
        for wrong in (of_rows.bfloat16(), of_rows[:1], of_rows[:, 0], of_rows.repeat(1, 32)):
            with pytest.raises(cw.TensorError, match="topk_weights is"):
                buffer.combine(rows, handle, topk_weights=wrong)
        sums, summed_weights, _ = buffer.combine(buffer.dispatch(x, handle)[0], handle, topk_weights=of_rows)
        assert torch.equal(sums, x * in_rank.sum(1, keepdim=True).bfloat16())
        assert summed_weights is not None and torch.equal(summed_weights, (topk_idx >= 0).float())

        few, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, 2, use_fp8=False)
        assert isinstance(few, torch.Tensor)
        wide = torch.nn.functional.pad(few, (0, 128))
        out = torch.empty(2, 256, dtype=torch.bfloat16)
        for made, given, to in (
            (wide, weights, None),
            (few[:, :8].contiguous(), weights, None),
            (few, weights.T.contiguous(), None),
            (few, weights, out),
        ):
            with pytest.raises(cw.TensorError, match="shape of the (rows|weights|output) is"):
                buffer.low_latency_combine(made, topk_idx, given, handle, out=to)
        sums, _, _ = buffer.low_latency_combine(few, topk_idx, weights, handle)
        assert torch.equal(sums, x * in_rank.sum(1, keepdim=True).bfloat16())

    in_threads(2, rank_main)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"topk_weights": torch.ones(2, 1).double()}, cw.TensorError, "topk_weights is .* of torch.float32"),
        ({"topk_weights": torch.ones(1, 2)}, cw.TensorError, "topk_weights is"),
        ({"topk_weights": torch._neg_view(torch.ones(2, 1))}, cw.TensorError, "negative view"),
        ({"topk_idx": torch.tensor([[0]])}, cw.TensorError, r"topk_idx is \(1, 1\); it must be \[2, 1 to 32\]"),
        ({"topk_idx": torch.tensor([0, 1])}, cw.TensorError, "topk_idx is"),
        ({"topk_idx": torch.tensor([[0], [2]])}, cw.UsageError, "do not exist"),
        ({"topk_idx": None}, cw.UsageError, "give both, or none"),
        ({"x": torch.ones(2, 128).double()}, cw.TensorError, "float64"),
        ({"x": torch.ones(128)}, cw.TensorError, r"x is \(128,\)"),
        ({"x": torch.ones(2, 128, device="meta")}, cw.TensorError, "x is on meta; the buffer is on cpu"),
        ({"x": torch.ones(2, 128).to(torch.float8_e4m3fn)}, cw.TensorError, "without scales"),
        ({"is_token_in_rank": torch.ones(2, 3).bool()}, cw.TensorError, "is_token_in_rank is"),
        ({"expert_alignment": 0}, cw.UsageError, "expert_alignment is 0"),
        ({"expert_alignment": -4}, cw.UsageError, "expert_alignment is -4"),
        ({"num_worst_tokens": -1}, cw.UsageError, "num_worst_tokens -1"),
    ],
)
def test_wrong_arguments_of_one_rank_are_told_to_all(wrong: dict[str, Any], error: type, words: str) -> None:
    """At once; and the next dispatch goes well."""

    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator)
        topk_idx = torch.tensor([[0], [1]])
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        given: dict[str, Any] = {
            "x": torch.ones(2, 128, dtype=torch.bfloat16),
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
            "topk_idx": topk_idx,
            "topk_weights": torch.ones(2, 1),
        }
        if communicator.rank == 1:
            with pytest.raises(error, match=words):
                buffer.dispatch(**{**given, **wrong})
        else:
            with pytest.raises(cw.UsageError, match="of rank 1"):
                buffer.dispatch(**given)
        assert buffer.dispatch(**given)[3] == [2]

    in_threads(2, rank_main)


def test_negative_views_are_refused() -> None:
    """Their memory has the other sign. No rank sends anything."""

    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator)
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        topk_idx, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 2, 2, use_fp8=False)
        negative = [torch._neg_view(each) for each in (x, rows, weights)]
        exchange = Exchange(communicator, experts=2, max_tokens=2, hidden=128, top_k=1)
        for call in (
            lambda: buffer.low_latency_dispatch(negative[0], topk_idx, 2, 2, use_fp8=False),
            lambda: buffer.low_latency_combine(negative[1], topk_idx, weights, handle),
            lambda: buffer.low_latency_combine(rows, topk_idx, negative[2], handle),
            lambda: buffer.low_latency_combine(rows, topk_idx, weights, handle, out=torch._neg_view(x)),
            lambda: exchange.route(topk_idx).dispatch(negative[0]),
            lambda: exchange.route(topk_idx).dispatch(x, negative[2]),
        ):
            with pytest.raises(cw.TensorError, match="negative view was given as .*resolve_neg"):
                call()
        sums, _, _ = buffer.low_latency_combine(rows, topk_idx, negative[2].resolve_neg(), handle)
        assert torch.equal(sums, -x)

    in_threads(2, rank_main)


def test_few_shapes_are_kept() -> None:
    """Those of the last calls, and what has handles."""

    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator, low_latency_mode=True)
        topk_idx, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
        x = torch.full((1, 128), communicator.rank + 1.0, dtype=torch.bfloat16)
        groups = []
        first = buffer.low_latency_dispatch(x, topk_idx, 1, 2, use_fp8=False)
        # Some again and again, some once more when they have gone.
        for most in (1, 2, 3, 4, 1, 5, 6, 2, 1, 7, 8, 9, 10, 1):
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, most, 2, use_fp8=False)
            groups.append(weakref.ref(handle.call.group))
            assert torch.equal(buffer.low_latency_combine(rows, topk_idx, weights, handle)[0], 2 * x)
        rows, _, handle, _, _ = first
        del first
        assert torch.equal(buffer.low_latency_combine(rows, topk_idx, weights, handle)[0], 2 * x)
        assert groups[0]() is handle.call.group is not groups[-1]()
        del handle
        alive = [group.max_tokens for group in {each() for each in groups} if group is not None]
        assert sorted(alive) == [1, 8, 9, 10]

    in_threads(2, rank_main)


@pytest.mark.parametrize("call", ["dispatch", "combine"])
@pytest.mark.parametrize("keeps_handle", [False, True])
def test_a_hook_that_was_dropped_is_named(call: str, keeps_handle: bool) -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator, low_latency_mode=True)
        topk_idx, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, 2, 2, use_fp8=False, return_recv_hook=True)
        if call == "combine":
            hook()
            _, _, hook = buffer.low_latency_combine(rows, topk_idx, weights, handle, return_recv_hook=True)
        kept = handle if keeps_handle else None
        del hook, handle
        words = f"a low-latency {call}, went without its hook having been called; .* make a new Buffer"
        for staged in (True, False):
            with pytest.raises(cw.Poisoned, match=words):
                buffer.low_latency_dispatch(x, topk_idx, 2, 2, return_recv_hook=staged)
        if kept is not None:
            with pytest.raises(cw.Poisoned, match=words):
                buffer.low_latency_combine(rows, topk_idx, weights, kept)
        with pytest.raises(cw.Poisoned, match=words):
            buffer.clean_low_latency_buffer(2, 128, 2)

    in_threads(2, rank_main)


def test_configurations_and_sizes() -> None:
    assert Config(24, 8, 256).num_max_rdma_chunked_recv_tokens == 258
    assert Buffer.get_dispatch_config(8) == Config(20) == Buffer.get_combine_config(3)
    before = Buffer.num_sms
    try:
        Buffer.set_num_sms(24)
        assert Buffer.get_dispatch_config(2).num_sms == 24
        with pytest.raises(cw.UsageError, match="even"):
            Buffer.set_num_sms(23)
    finally:
        Buffer.set_num_sms(before)
    with pytest.raises(cw.UsageError, match="the second larger"):
        Config(20, 6, 6)
    assert Buffer.is_sm90_compiled()
    assert deep_ep.topk_idx_t == torch.int64
    # Two parities of 8 sources' rows: of hidden size, in lines (a sixteenth is flags), and what belongs to a row.
    hint = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=128, hidden=7168, num_ranks=8, num_experts=256
    )
    assert 2 * 8 * 128 * 7168 * 2 < hint < 2 * 8 * 128 * (7168 * 2 * 16 // 15 + 1024)
    assert Config().get_nvl_buffer_size_hint(7168 * 2, 8) > 2 * 8 * 4096 * 7168 * 2
    assert Config().get_rdma_buffer_size_hint(7168 * 2, 8) == 0
    with pytest.raises(cw.UsageError, match="no group of"):
        Buffer.get_low_latency_rdma_size_hint(0, 7168, 8, 256)


def test_installed_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deep_ep" not in sys.modules
    deep_ep.install()
    try:
        import deep_ep as installed

        assert installed is deep_ep
        assert importlib.import_module("deep_ep.utils").EventOverlap is deep_ep.EventOverlap
        deep_ep.install()
    finally:
        deep_ep.uninstall()
    assert "deep_ep" not in sys.modules and "deep_ep.utils" not in sys.modules
    monkeypatch.setitem(sys.modules, "deep_ep", math)
    monkeypatch.setitem(sys.modules, "deep_ep.part", math)
    try:
        with pytest.raises(cw.ShadowError):
            deep_ep.install()
        deep_ep.install(shadow=True)
        assert sys.modules["deep_ep"] is sys.modules["crossweft.compat.deep_ep"]
        assert "deep_ep.part" not in sys.modules
    finally:
        deep_ep.uninstall()
    # What was hidden is there again.
    assert sys.modules["deep_ep"] is math is sys.modules["deep_ep.part"]


def test_process_groups() -> None:
    # Its buffer would be on a GPU if there is one, which its tensors are not.
    assert torchrun(2, HERE / "deep_ep_script.py", CUDA_VISIBLE_DEVICES="").count("rank ok") == 2


def test_passes_do_not_keep_what_was_sent() -> None:
    """Their tables are kept for others; tokens and rows may be most of the memory there is."""

    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator, low_latency_mode=True)
        topk_idx, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        sent = StorageWeakRef(x.untyped_storage())
        rows, _, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, 2, 2, use_fp8=False, return_recv_hook=True)
        del x
        assert hook is not None and isinstance(rows, torch.Tensor)
        hook()
        assert sent.expired()
        made = StorageWeakRef(rows.untyped_storage())
        sums, _, hook = buffer.low_latency_combine(rows, topk_idx, weights, handle, return_recv_hook=True)
        del rows
        assert hook is not None
        hook()
        assert made.expired() and bool((sums == 1).all())

    in_threads(2, rank_main)


def test_hooks_are_called_before_calls_without() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        buffer = Buffer(communicator, low_latency_mode=True)
        topk_idx, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, 2, 2, use_fp8=False, return_recv_hook=True)
        assert hook is not None
        with pytest.raises(cw.UsageError, match="a call is under way"):
            buffer.low_latency_dispatch(2 * x, topk_idx, 2, 2, use_fp8=False)
        hook()
        # Nothing was sent.
        sums, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
        assert torch.equal(sums, x)

    in_threads(2, rank_main)

"""Run by torchrun: mixtures of experts on CUDA tensors of processes, each on a GPU of its own or sharing one.

Everything is done on the host first, on the same numbers, and must give the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import crossweft as cw
from crossweft import moe
from crossweft.compat.deep_ep import Buffer, Config
from crossweft.torch.megatron import FlexManager
from crossweft.torch.moe import Exchange

TIMEOUT = 60.0
HIDDEN, EXPERTS, TOP_K, TOKENS, MOST = 512, 6, 3, 40, 48

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
GPU = torch.device("cuda", torch.cuda.current_device())

Found = Iterator[tuple[str, Any]]

#: Begins the names of what torch has added up, in an order of its own.
ADDED_BY_TORCH = "+ "


def inputs(seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Tokens, experts and weights of this rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    experts = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K, -1)[1]
    experts[torch.rand(experts.shape, generator=generator) < 0.2] = -1
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    return tokens.to(device), experts.to(device), weights.to(device)


def normal(device: torch.device) -> Found:
    """Every way of a dispatch and a combine of many tokens."""
    buffer = Buffer(dist.group.WORLD, timeout=TIMEOUT, device=device)
    for seed, asynchronous in [(0, False), (1, True), (2, True)]:
        tokens, experts, weights = inputs(seed, device)
        previous = buffer.capture() if asynchronous else None
        extra: dict[str, Any] = {"async_finish": asynchronous, "previous_event": previous}
        per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(experts, EXPERTS, **extra)
        event.current_stream_wait()
        yield from {"per rank": per_rank, "per expert": per_expert, "in rank": in_rank}.items()
        given = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
            "config": Config(24, 8, 256),
        }
        # On the host, as devices divide otherwise.
        scaled = tokens.cpu().float().view(TOKENS, -1, 128)
        scales = scaled.abs().amax(-1).clamp(1e-4) / 448
        quantised = (scaled / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(TOKENS, HIDDEN).to(device)
        scales = scales.to(device)
        for name, sent in {"plain": tokens, "quantised": (quantised, scales.T.contiguous().T)}.items():
            for worst in (0, TOKENS * ranks):
                x, idx, w, counts, handle, event = buffer.dispatch(
                    sent, topk_idx=experts, topk_weights=weights, num_worst_tokens=worst, **given, **extra
                )
                event.current_stream_wait()
                count = int(handle[0][-1, rank])
                yield f"{name} counts", counts
                rows = [t[:count] for t in (x if isinstance(x, tuple) else (x,))]
                yield from [(f"{name} rows", row) for row in rows]
                yield f"{name} experts", idx
                yield f"{name} weights", w
                yield from [(f"{name} handle {i}", part[:count] if i == 3 else part) for i, part in enumerate(handle)]
        x, _, w, _, handle, event = buffer.dispatch(tokens, topk_idx=experts, topk_weights=weights, **given, **extra)
        event.current_stream_wait()
        again, *_, event = buffer.dispatch(tokens * 2, handle=handle, **extra)
        event.current_stream_wait()
        yield "again", again
        combined, gathered, event = buffer.combine(
            again, handle, topk_weights=w, bias=(tokens, torch.ones_like(tokens)), **extra
        )
        event.current_stream_wait()
        yield "combined", combined
        yield "weights", gathered
        x, *_, handle, event = buffer.dispatch(tokens, **given, **extra)
        event.current_stream_wait()
        yield "without experts", x
    buffer.destroy()


def low_latency(device: torch.device) -> Found:
    """Every way of a dispatch and a combine of few tokens."""
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, timeout=TIMEOUT, device=device)
    buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    first, stop = len(range(EXPERTS)) // ranks * rank, len(range(EXPERTS)) // ranks * (rank + 1)
    stats = torch.zeros(stop - first, dtype=torch.int32, device=device)
    for seed, how in enumerate(["hook", "event", "neither"]):
        tokens, experts, weights = inputs(seed, device)
        for scales in ("none", "f32", "rounded", "ue8m0"):
            x, counts, handle, event, hook = buffer.low_latency_dispatch(
                tokens,
                experts,
                MOST,
                EXPERTS,
                cumulative_local_expert_recv_stats=stats,
                use_fp8=scales != "none",
                round_scale=scales in ("rounded", "ue8m0"),
                use_ue8m0=scales == "ue8m0",
                async_finish=how == "event",
                return_recv_hook=how == "hook",
            )
            hook() if hook else event.current_stream_wait()
            yield f"{scales} counts", counts
            yield f"{scales} sources", handle[0]
            filled = counts > 0
            of_sources = handle[1] & 0xFFFFFFFF
            yield f"{scales} from each", of_sources
            # Where nothing came from, it lies nowhere.
            yield f"{scales} begins", torch.where(of_sources > 0, handle[1] >> 32, 0)
            is_row = (handle[0] >= 0).unsqueeze(-1)
            for part in x if isinstance(x, tuple) else (x,):
                known = torch.where(is_row, part.float() if part.is_floating_point() else part, 0)
                yield f"{scales} rows", known
            made = torch.where(is_row, (x[0] if isinstance(x, tuple) else x).float(), 0).bfloat16() * 2
            if how != "neither":
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = made
            sums, event, hook = buffer.low_latency_combine(
                made,
                experts,
                weights,
                handle,
                zero_copy=how != "neither",
                async_finish=how == "event",
                return_recv_hook=how == "hook",
            )
            hook() if hook else event.current_stream_wait()
            yield f"{scales} sums", sums
            yield "filled", filled
    yield "stats", stats
    buffer.destroy()


def gradients(device: torch.device) -> Found:
    """Sums and gradients of all layouts."""
    communicator = cw.Communicator.from_process_group(device=str(device), timeout=TIMEOUT)
    exchange = Exchange(communicator, experts=EXPERTS, max_tokens=MOST, hidden=HIDDEN, top_k=TOP_K, dtype=torch.float32)
    layouts: list[moe.Layout] = ["flat", "rank_major", "expert_packed", "expert_major"]
    for seed, layout in enumerate(layouts):
        tokens, experts, weights = inputs(seed, device, torch.float32)
        tokens.requires_grad_()
        weights.requires_grad_()
        route = exchange.route(experts, layout=layout)
        rows = route.dispatch(tokens, weights)
        assert rows.weights is not None
        of_row = rows.weights.sum(-1) if layout in ("flat", "rank_major") else rows.weights
        sums = route.combine(rows.tokens * of_row.unsqueeze(-1))
        yield f"{layout} sums", sums.detach()
        (sums * tokens.detach()).sum().backward()
        yield f"{layout} tokens", tokens.grad
        yield f"{ADDED_BY_TORCH}{layout} weights", weights.grad
    manager = FlexManager(exchange, TOP_K)
    tokens, experts, weights = inputs(9, device, torch.float32)
    # What is for no expert is for one before the first.
    probs = torch.zeros(TOKENS, 1 + EXPERTS, device=device).scatter_(1, experts + 1, weights)[:, 1:]
    manager.setup_metadata(probs > 0, probs)
    came = manager.dispatch(tokens)
    yield "flex experts", manager.get_dispached_metadata()[0]
    yield "flex rows", came
    made, of_rows = manager.get_permuted_hidden_states_by_experts(came)
    yield "flex sums", manager.combine(manager.get_restored_hidden_states_by_experts(made * of_rows.unsqueeze(1)))


def recorded() -> None:
    """Low-latency calls in a graph, replayed with other tokens, and others between the replays."""
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, timeout=TIMEOUT)
    tokens, experts, weights = inputs(0, GPU)

    def layer(tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x, _, handle, _, hook = buffer.low_latency_dispatch(
            tokens, experts, MOST, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None
        hook()
        assert isinstance(x, torch.Tensor)
        sums, _, hook = buffer.low_latency_combine(x, experts, weights, handle, return_recv_hook=True)
        assert hook is not None
        hook()
        return sums

    layer(tokens, experts, weights)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice = layer(layer(tokens, experts, weights), experts, weights)
    for seed in range(1, 5):
        for to, new in zip((tokens, experts, weights), inputs(seed, GPU), strict=True):
            to.copy_(new)
        graph.replay()
        between = layer(tokens, experts, weights)
        again = layer(between, experts, weights)
        torch.cuda.synchronize()
        assert torch.equal(twice, again), seed
        factor = (weights * (experts >= 0)).sum(1, keepdim=True)
        torch.testing.assert_close(between.float(), tokens.float() * factor, rtol=0.03, atol=0.03)
    buffer.destroy()


def same(work: Callable[[torch.device], Found]) -> None:
    """What is found on the host and on the GPU: the same bits, but for what torch itself has added up."""
    host = [
        (name, part.clone() if isinstance(part, torch.Tensor) else part) for name, part in work(torch.device("cpu"))
    ]
    count = 0
    for (name, expected), (_, found) in zip(host, work(GPU), strict=True):
        count += 1
        if isinstance(expected, torch.Tensor):
            assert found.device == GPU, name
            assert found.dtype == expected.dtype and found.shape == expected.shape, (name, found.shape, expected.shape)
            found, expected = found.cpu().contiguous(), expected.contiguous()
            if name.startswith(ADDED_BY_TORCH):
                torch.testing.assert_close(found, expected)
                continue
            equal = torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        else:
            equal = found == expected
        assert equal, (work.__name__, count, name)
    assert count > 0


WORKS: dict[str, Callable[[], None]] = {
    "normal": lambda: same(normal),
    "low_latency": lambda: same(low_latency),
    "gradients": lambda: same(gradients),
    "recorded": recorded,
}
for work in sys.argv[1].split(","):
    WORKS[work]()
    dist.barrier()
    print(f"rank {rank}: {work} ok", flush=True)
dist.destroy_process_group()

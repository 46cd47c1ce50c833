"""Dispatch and combine of torch's tensors on a CUDA device, in the order of its streams: the CPU's bits. Skipped where
there is no device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Literal

import pytest
import torch
from conftest import in_threads, killed, on_host, torchrun

import crossweft as cw
from crossweft import moe

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

HERE = Path(__file__).parent
RANKS = 2
EXPERTS = 5
HIDDEN = 256
TOP_K = 3
TOKENS = 70

Device = Literal["cpu", "cuda"]


def inputs(
    rank: int, step: int, device: str, dtype: torch.dtype = torch.bfloat16, experts_of_all: int = EXPERTS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, experts and weights."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    # Some experts several times, some choices none.
    experts = torch.randint(-1, experts_of_all, (TOKENS, TOP_K), generator=generator)
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    return tokens.to(device), experts.to(device), weights.to(device)


def group_of(communicator: cw.Communicator) -> moe.Group:
    return moe.Group(communicator, experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K, timeout=20)


def on(device: Device, layout: moe.Layout, quantise: moe.Quantise | None, staged: bool) -> list[list[torch.Tensor]]:
    """What each rank has received and combined, on the host."""

    def rank_main(communicator: cw.Communicator) -> list[torch.Tensor]:
        group = group_of(communicator)
        by_expert = layout in ("expert_major", "expert_packed")
        # Ranks of one process on one device: each its own stream.
        stream = torch.cuda.Stream() if device == "cuda" else None
        found = []
        with torch.cuda.stream(stream):
            handle = None
            for step in range(3):
                tokens, experts, weights = inputs(group.rank, step, device)
                if handle is None:
                    handle = group.handle(experts, weights, layout=layout, alignment=4)
                else:
                    handle.route(experts, weights)
                out = handle.empty(like=tokens, scales=quantise)
                for room in (out.tokens, out.scales):
                    if room is not None:
                        room.view(torch.uint8).fill_(0xA5)
                if staged:
                    handle.dispatch_send(tokens, quantise=quantise)
                    assert handle.wait_for_counts().rows <= out.tokens.shape[0] * (out.tokens.shape[1])
                    handle.dispatch_complete(out)
                else:
                    handle.dispatch(tokens, quantise=quantise, out=out)
                made = out.tokens.to(torch.bfloat16)
                if layout == "flat" or layout == "expert_packed":
                    made = made[: handle.counts().rows]
                made = made.contiguous()
                combined = handle.combine(made, weights="dispatched" if by_expert else None)
                group.check()
                parts = [out.tokens.view(torch.uint8), out.weights, out.sources, combined]
                parts += [part for part in (out.scales, out.experts) if part is not None]
                found += [on_host(part) for part in parts]
        return found

    return in_threads(RANKS, rank_main, device=device)


@pytest.mark.parametrize("layout", ["expert_major", "rank_major", "flat", "expert_packed"])
@pytest.mark.parametrize("quantise", [None, "f32", "ue8m0"])
def test_the_cpu_s_bits(layout: moe.Layout, quantise: moe.Quantise | None) -> None:
    for staged in (False, True):
        cpu, cuda = on("cpu", layout, quantise, staged), on("cuda", layout, quantise, staged)
        for ours, theirs in zip(cuda, cpu, strict=True):
            for part, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (layout, quantise, staged, part)


def test_a_graph_is_replayed_with_other_tokens() -> None:
    alone = threading.Lock()

    def rank_main(communicator: cw.Communicator) -> None:
        group = group_of(communicator)
        with torch.cuda.stream(torch.cuda.Stream()):
            tokens, experts, weights = inputs(group.rank, 0, "cuda")
            handle = group.handle(experts, weights)
            out = handle.empty(like=tokens)
            combined = torch.empty_like(tokens)
            torch.cuda.current_stream().synchronize()
            communicator.barrier()
            graph = torch.cuda.CUDAGraph()
            # Torch synchronises the device for a capture, which another's would not bear.
            with alone, torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                handle.dispatch(tokens, out=out)
                handle.combine(out.tokens, weights="dispatched", out=combined)
            for step in range(1, 4):
                for to, new in zip((tokens, experts, weights), inputs(group.rank, step, "cuda"), strict=True):
                    to.copy_(new)
                graph.replay()
                torch.cuda.current_stream().synchronize()
                group.check()
                # Experts that give back what came: the token times the sum of its weights, roughly.
                factor = (weights * (experts >= 0)).sum(1, keepdim=True)
                torch.testing.assert_close(combined.float(), tokens.float() * factor, rtol=0.03, atol=0.03)
            communicator.barrier()

    in_threads(RANKS, rank_main, device="cuda")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("layout", ["expert_major", "rank_major", "flat", "expert_packed"])
def test_graphs_of_all_layouts_and_types(layout: moe.Layout, ranks: int) -> None:
    """The CPU's bits, replayed with other tokens."""
    kinds: list[tuple[torch.dtype, moe.Quantise | None]] = [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, None),
        (torch.bfloat16, "f32"),
        (torch.bfloat16, "ue8m0"),
    ]
    for dtype, quantise in kinds:
        cpu, cuda = (_replayed(device, layout, dtype, quantise, ranks) for device in ("cpu", "cuda"))
        for rank, (ours, theirs) in enumerate(zip(cuda, cpu, strict=True)):
            for part, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (dtype, quantise, rank, part)


def _replayed(
    device: Device, layout: moe.Layout, dtype: torch.dtype, quantise: moe.Quantise | None, ranks: int
) -> list[list[torch.Tensor]]:
    """What each rank has received and combined in each of several passes: of one graph, on a GPU."""
    by_expert = layout in ("expert_major", "expert_packed")
    experts_of_all, steps = 2 * ranks + 1, 3
    alone = threading.Lock()
    if device == "cuda":
        # Else the first thread that needs it would hold up the others' kernels.
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    def rank_main(communicator: cw.Communicator) -> list[torch.Tensor]:
        name = str(dtype).removeprefix("torch.")
        # Few blocks: what else a rank runs must find room beside those that wait.
        group = moe.Group(
            communicator,
            experts=experts_of_all,
            max_tokens=TOKENS,
            hidden=HIDDEN,
            top_k=TOP_K,
            dtype={"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[name],
            blocks=4 if device == "cuda" else None,
            timeout=20,
        )
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            passes = [inputs(group.rank, step, device, dtype, experts_of_all) for step in range(steps)]
            static = [part.clone() for part in passes[0]]
            tokens, experts, weights = static
            handle = group.handle(experts, weights, layout=layout, alignment=4)
            out, combined = handle.empty(like=tokens, scales=quantise), torch.empty_like(tokens)

            def body() -> None:
                handle.dispatch(tokens, quantise=quantise, out=out)
                made = out.tokens.to(dtype)
                handle.combine(made, weights="dispatched" if by_expert else None, out=combined)

            def begin(step: int) -> None:
                for to, new in zip(static, passes[step], strict=True):
                    to.copy_(new)
                for room in (out.tokens, out.scales):
                    if room is not None:
                        room.view(torch.uint8).fill_(0xA5)
                out.sources.fill_(-1)
                out.weights.fill_(0)
                if out.experts is not None:
                    out.experts.fill_(-1)
                out.tokens.to(dtype)

            graph = None
            if device == "cuda":
                begin(0)
                torch.cuda.current_stream().synchronize()
                communicator.barrier()
                graph = torch.cuda.CUDAGraph()
                stream = torch.cuda.current_stream()
                with alone, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    body()
            found = []
            for step in range(steps):
                begin(step)
                if graph is None:
                    handle.route(experts, weights)
                    body()
                else:
                    torch.cuda.current_stream().synchronize()
                    # Torch may allocate before a rank's kernel waits, not while it does.
                    communicator.barrier()
                    graph.replay()
                    torch.cuda.current_stream().synchronize()
                    communicator.barrier()
                    group.check()
                parts = [out.tokens.view(torch.uint8), out.weights, out.sources, combined]
                parts += [part for part in (out.scales, out.experts) if part is not None]
                found += [on_host(part).clone() for part in parts]
            communicator.barrier()
        return found

    return in_threads(ranks, rank_main, device=device)


def test_a_decoding_group_takes_little_memory() -> None:
    """Of 8 ranks with 128 tokens each: what a rank allocates on the device, handle and all."""

    def rank_main(communicator: cw.Communicator) -> int:
        group = moe.Group(communicator, experts=256, max_tokens=128, hidden=7168, top_k=8, timeout=60)
        handle = group.handle(torch.zeros(128, 8, dtype=torch.int64, device="cuda"))
        allocated = group.allocated_bytes + handle.allocated_bytes
        communicator.barrier()
        return allocated

    found = in_threads(8, rank_main, device="cuda")
    assert all(0 < each <= 40_000_000 for each in found), found


def test_tensors_elsewhere_are_refused_and_an_expert_that_is_none_is_told() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        group = group_of(communicator)
        tokens, experts, weights = inputs(group.rank, 0, "cuda")
        with pytest.raises(cw.errors.TensorError, match="cuda:0, so copy it there"):
            group.handle(experts.cpu())
        handle = group.handle(experts, weights)
        with pytest.raises(cw.errors.UsageError, match="tokens has"):
            handle.dispatch(tokens[1:])
        communicator.barrier()
        with torch.cuda.stream(torch.cuda.Stream()):
            # No rank sends anything.
            handle.route(torch.full_like(experts, EXPERTS))
            handle.dispatch(tokens)
            with pytest.raises(cw.errors.UsageError, match=f"expert {EXPERTS} "):
                handle.counts()

    in_threads(RANKS, rank_main, device="cuda")


@pytest.mark.parametrize("work", ["normal", "low_latency", "gradients", "recorded"])
def test_processes(work: str) -> None:
    assert torchrun(RANKS, HERE / "moe_cuda_script.py", work).count(f"{work} ok") == RANKS


@pytest.mark.parametrize("when", ["waiting", "dispatched"])
@pytest.mark.parametrize("how", ["telling", "masking", "shrinking"])
def test_a_rank_is_killed(when: str, how: str) -> None:
    """The other one says so soon, or goes on without it."""
    said = killed(HERE / "gone_script.py", when, how)
    assert said.startswith("told: PeerLost" if how == "telling" else "finished without rank 1")

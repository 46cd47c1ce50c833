"""Mixture of experts on arrays of numpy and buffers; torch's are in tests_torch."""

from __future__ import annotations

import array
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from conftest import in_threads

import crossweft as cw
from crossweft import moe
from crossweft.moe import Layout

RANKS = 3
EXPERTS = 7  # 3, 2 and 2 a rank.
TOKENS = 6
HIDDEN = 8
TOP_K = 2


def batch(rank: int, count: int = TOKENS) -> tuple[Any, Any, Any]:
    """Tokens, experts and weights of a rank, which every rank can tell."""
    random = np.random.default_rng(100 + rank)
    tokens = random.integers(-8, 8, (count, HIDDEN)).astype(np.float32)
    # Each expert of a token once, some none.
    experts = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(count)] or [np.zeros(TOP_K)])[:count]
    experts = np.where(random.random((count, TOP_K)) < 0.2, -1, experts).astype(np.int64)
    weights = (random.integers(1, 8, (count, TOP_K)) / 8).astype(np.float32)
    return tokens, experts, weights


def group(communicator: cw.Communicator, **options: Any) -> moe.Group:
    options = {"experts": EXPERTS, "max_tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "dtype": "f32"} | options
    return moe.Group(communicator, **options)


def for_expert(source: int, expert: int) -> list[tuple[int, float]]:
    _, experts, weights = batch(source)
    return [(t, weights[t, k]) for t in range(TOKENS) for k in range(TOP_K) if experts[t, k] == expert]


def expected_sums(rank: int) -> Any:
    """Of experts that multiply by their number plus one."""
    tokens, experts, weights = batch(rank)
    factors = np.where(experts < 0, 0, (experts + 1) * weights).sum(1)
    return tokens * factors[:, None].astype(np.float32)


@pytest.mark.parametrize("layout", ["expert_major", "expert_packed"])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("weighting", ["dispatched", "given", "one"])
def test_rows_by_expert(layout: Layout, staged: bool, weighting: str) -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        passes = group(communicator)
        tokens, experts, weights = batch(rank)
        handle = passes.handle(experts, weights, layout=layout, alignment=4)
        for _ in range(2):
            if staged:
                handle.dispatch_send(tokens)
                handle.wait_for_counts()
                received = handle.dispatch_complete()
            else:
                received = handle.dispatch(tokens)
            counts = handle.counts()
            own = passes.local_experts()
            assert list(own) == [[0, 1, 2], [3, 4], [5, 6]][rank]
            rows = received.tokens.reshape(-1, HIDDEN)
            row_weights, sources = received.weights.reshape(-1), received.sources.reshape(-1)
            made = rows.copy()
            if layout == "expert_major":
                assert received.tokens.shape == (len(own), RANKS * TOKENS, HIDDEN)
                assert received.sources.shape == (len(own), RANKS * TOKENS)
            else:
                assert len(rows) == counts.rows == sum(-(-n // 4) * 4 for n in counts.per_expert)
            used = 0
            for local, expert in enumerate(own):
                for source in range(RANKS):
                    begin, end = counts.bounds(local, source)
                    sent = for_expert(source, expert)
                    assert end - begin == len(sent)
                    their_tokens = batch(source)[0]
                    for row, (token, weight) in zip(range(begin, end), sent, strict=True):
                        assert (rows[row] == their_tokens[token]).all()
                        assert (sources[row], row_weights[row]) == (token, weight)
                        made[row] *= expert + 1
                        if weighting == "one":
                            made[row] *= weight
                        used += 1
            assert used == sum(counts.per_expert) and (sources >= 0).sum() == used
            given = {"dispatched": "dispatched", "given": weights, "one": None}[weighting]
            made = made.reshape(received.tokens.shape)
            if staged:
                handle.combine_send(made, weights=given)
                made[:] = np.nan
                sums = handle.combine_complete()
            else:
                sums = handle.combine(made, weights=given)
            # Small numbers over powers of two: exact in any order.
            assert (sums == expected_sums(rank)).all()

    in_threads(RANKS, rank_main)


@pytest.mark.parametrize("layout", ["flat", "rank_major"])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_rows_by_source(layout: Layout, ids: Any) -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        passes = group(communicator)
        tokens, experts, weights = batch(rank)
        handle = passes.handle(experts.astype(ids), weights, layout=layout)
        received = handle.dispatch(tokens)
        assert received.experts is not None and received.experts.dtype == ids
        own = passes.local_experts()
        counts = handle.counts()
        made = np.zeros_like(received.tokens).reshape(-1, HIDDEN)
        rows = received.tokens.reshape(-1, HIDDEN)
        local, given = received.experts.reshape(-1, TOP_K), received.weights.reshape(-1, TOP_K)
        row = 0
        for source in range(RANKS):
            if layout == "rank_major":
                row = source * TOKENS
            their_tokens, their_experts, their_weights = batch(source)
            here = [t for t in range(TOKENS) if any(e in own for e in their_experts[t])]
            assert counts.per_source[source] == len(here)
            for token in here:
                assert (rows[row] == their_tokens[token]).all()
                assert received.sources.reshape(-1)[row] == token
                for k in range(TOP_K):
                    is_here = their_experts[token, k] in own
                    assert local[row, k] == (their_experts[token, k] - own[0] if is_here else -1)
                    assert given[row, k] == (their_weights[token, k] if is_here else 0)
                    made[row] += rows[row] * given[row, k] * (local[row, k] + own[0] + 1)
                row += 1
        sums = handle.combine(made.reshape(received.tokens.shape))
        assert (sums == expected_sums(rank)).all()

    in_threads(RANKS, rank_main)


def test_another_pass_and_no_tokens() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        passes = group(communicator)
        tokens, experts, weights = batch(rank)
        handle = passes.handle(experts, weights, layout="flat")
        first = handle.dispatch(tokens)
        handle.combine(first.tokens)
        count = 0 if rank == 1 else TOKENS
        handle.route(experts[:count], weights[:count])
        received = handle.dispatch(tokens[:count])
        assert handle.counts().per_source[1] == 0
        own = passes.local_experts()
        missing = sum(any(e in own for e in experts) for experts in batch(1)[1])
        assert len(received.tokens) == len(first.tokens) - missing
        assert handle.combine(received.tokens).shape == (count, HIDDEN)

    in_threads(RANKS, rank_main)


@pytest.mark.parametrize("quantise", ["f32", "f32_powers_of_two", "ue8m0"])
def test_quantised(quantise: moe.Quantise) -> None:
    hidden = 256

    def rank_main(communicator: cw.Communicator) -> None:
        peer = 1 - communicator.rank
        passes = group(communicator, experts=2, hidden=hidden)
        # Each half is one number, so that it is its own scale times 448.
        tokens = np.repeat(np.float32([[1.75, 3.5]]) * (communicator.rank + 1), 128, axis=1).reshape(1, hidden)
        handle = passes.handle(np.int32([[peer]]), layout="flat")
        received = handle.dispatch(tokens, quantise=quantise)
        assert received.scales is not None
        assert received.tokens.dtype == np.uint8 and received.tokens.shape == (1, hidden)
        theirs = np.float32([1.75, 3.5]) * (peer + 1)
        if quantise == "ue8m0":
            assert received.scales.dtype == np.int32
            exponents = received.scales.view(np.uint8)[0, :2].astype(np.int32)
            scales = np.exp2(exponents - 127)
        else:
            scales = received.scales[0]
        if quantise == "f32":
            assert np.allclose(scales * 448, theirs)
        else:
            assert (scales == np.exp2(np.ceil(np.log2(theirs / 448)))).all()
        # Quantised already: the same arrives.
        again = passes.handle(np.int32([[peer]]), layout="flat")
        back = again.dispatch(received.tokens, scales=received.scales)
        assert back.scales is not None
        mine = passes.handle(np.int32([[communicator.rank]]), layout="flat").dispatch(tokens, quantise=quantise)
        assert (back.tokens == mine.tokens).all() and (back.scales == mine.scales).all()

    in_threads(2, rank_main)


def test_buffers_without_shape() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        passes = group(communicator, experts=2, max_tokens=2, hidden=4)
        with pytest.raises(cw.UsageError, match="top_k"):
            passes.handle(array.array("i", [1 - rank, rank]))
        handle = passes.handle(array.array("i", [1 - rank, rank]), top_k=1, layout="flat")
        tokens = array.array("f", [rank + 1.0] * 4 + [rank + 10.0] * 4)
        received = handle.dispatch(tokens)
        assert received.tokens == array.array("f", [[10] * 4 + [2] * 4, [1] * 4 + [11] * 4][rank])
        assert received.sources == array.array("i", [[1, 0], [0, 1]][rank])
        assert handle.combine(received.tokens) == tokens

    in_threads(2, rank_main)


def test_room_of_ones_own() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        passes = group(communicator, experts=2)
        tokens = np.ones((4, HIDDEN), np.float32)
        handle = passes.handle(np.int32([[0], [1], [0], [1]]), layout="flat")
        out = handle.empty(3, like=tokens)
        with pytest.raises(cw.CapacityError, match="4 rows were received, the output has room for 3"):
            handle.dispatch(tokens, out=out)
        out = handle.empty(like=tokens)
        assert handle.dispatch_complete(out) is out
        assert out.experts is not None
        assert (out.tokens[:4] == 1).all() and (out.experts[:4] == 0).all() and (out.experts[4:] == -1).all()
        sums = np.empty_like(tokens)
        assert handle.combine(out.tokens, out=sums) is sums and (sums == 1).all()
        # Or as much as is needed, of the format that was sent.
        tokens = np.ones((4, 16), np.float32)
        handle = group(communicator, experts=2, hidden=16).handle(np.int32([[0], [1], [0], [1]]), layout="flat")
        handle.dispatch(tokens)
        with pytest.raises(cw.CapacityError):
            handle.dispatch(tokens, quantise="f32", out=handle.empty(3, like=tokens, scales="f32"))
        received = handle.dispatch_complete()
        assert received.tokens.shape == (4, 16) and received.tokens.dtype == np.uint8
        assert received.scales is not None and received.scales.shape == (4, 1)

    in_threads(2, rank_main)


def test_errors_say_what_to_do() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        with pytest.raises(cw.UsageError, match="multiple of 16"):
            group(communicator, hidden=3)
        passes = group(communicator)
        tokens, experts, weights = batch(0)
        with pytest.raises(cw.UsageError, match="expert"):
            passes.handle(experts + EXPERTS)
        with pytest.raises(cw.TensorError, match="experts are of u8; they can be of i32 or i64"):
            passes.handle(np.abs(experts).astype(np.uint8))
        with pytest.raises(cw.TensorError, match="weights has elements of f64"):
            passes.handle(experts, weights.astype(np.float64))
        # Not the bits of numbers.
        with pytest.raises(cw.TensorError, match="weights has elements of i32, not f32"):
            passes.handle(experts, weights.astype(np.int32))
        with pytest.raises(cw.UsageError, match="no layout"):
            passes.handle(experts, layout="diagonal")  # type: ignore[arg-type]
        handle = passes.handle(experts, weights)
        with pytest.raises(cw.UsageError, match="nothing to combine"):
            handle.combine(handle.empty(like=tokens).tokens)
        with pytest.raises(cw.UsageError, match="no dispatch was sent"):
            handle.dispatch_complete()
        with pytest.raises(cw.TensorError, match="tokens has elements of f64"):
            handle.dispatch(tokens.astype(np.float64))
        with pytest.raises(cw.UsageError, match="no scales `nvfp4`"):
            handle.dispatch(tokens, quantise="nvfp4")  # type: ignore[arg-type]
        out = handle.empty(like=tokens)
        out.tokens.flags.writeable = False
        with pytest.raises(cw.TensorError, match="read-only"):
            handle.dispatch(tokens, out=out)
        # None of that has sent anything.
        received = handle.dispatch(tokens)
        with pytest.raises(cw.TensorError, match="overlap"):
            handle.combine(received.tokens, out=received.tokens.reshape(-1)[: tokens.size])
        handle.combine(received.tokens)
        with pytest.raises(cw.UsageError, match="no rank 9"):
            passes.local_experts(9)

    in_threads(1, rank_main)


def test_tensors_of_another_shape_are_refused() -> None:
    """They would be read with the wrong stride, be there bytes enough."""

    def rank_main(communicator: cw.Communicator) -> None:
        passes = group(communicator, experts=2, hidden=16)
        experts, weights = np.int32([[0, 1], [1, -1], [0, -1]]), np.full((3, 2), 0.5, np.float32)
        tokens = np.repeat(np.float32([[1], [2], [3]]), 16, axis=1)
        handle = passes.handle(experts, weights, layout="flat")
        for wrong in (np.ones((6, 8), np.float32), np.ones((1, 48), np.float32)):
            with pytest.raises(cw.TensorError, match=r"shape of the tokens is \(\d, \d+\), .* 16 elements of 4 bytes"):
                handle.dispatch(wrong)
            with pytest.raises(cw.TensorError, match="tokens"):
                handle.dispatch_send(wrong)
        # As bytes, or without a shape of rows, they are what they are.
        handle.dispatch(tokens.view(np.uint8))
        received = handle.dispatch(tokens.reshape(-1))
        sums = handle.combine(received.tokens)
        wide = np.pad(received.tokens, ((0, 0), (0, 16)))
        for call in (handle.combine, handle.combine_send):
            with pytest.raises(cw.TensorError, match=r"rows is \(\d, 32\)"):
                call(wide)
        with pytest.raises(cw.TensorError, match=r"output is \(6, 8\)"):
            handle.combine(received.tokens, out=np.empty((6, 8), np.float32))
        out = handle.empty(like=tokens)
        for name, columns in (("tokens", 8), ("experts", 1), ("weights", 4)):
            changed = moe.Received(**{**vars(out), name: getattr(out, name).reshape(-1, columns)})
            with pytest.raises(cw.TensorError, match=f"room for {name} is"):
                handle.dispatch(tokens, out=changed)
        with pytest.raises(cw.TensorError, match=r"weights is \(2, 3\)"):
            passes.handle(experts, weights.T.copy())
        with pytest.raises(cw.TensorError, match=r"experts is \(3, 2\)"):
            passes.handle(experts, top_k=1)
        # None of that has sent anything.
        assert (handle.combine(received.tokens) == sums).all()

        by_expert = passes.handle(experts, weights, layout="expert_major")
        rows = by_expert.dispatch(tokens).tokens
        own = len(passes.local_experts())
        sums = by_expert.combine(rows, weights=weights)
        assert (by_expert.combine(rows.reshape(-1, 16), weights=weights) == sums).all()
        with pytest.raises(cw.TensorError, match=rf"it must be \({own}, {2 * TOKENS}, 16\)"):
            by_expert.combine(np.pad(rows, ((0, 0), (0, 4), (0, 0))))
        with pytest.raises(cw.TensorError, match=r"weights is \(2, 3\)"):
            by_expert.combine(rows, weights=weights.T.copy())
        quantised = by_expert.empty(like=tokens, scales="f32")
        quantised.scales = np.empty((own, TOKENS, 2), np.float32)
        with pytest.raises(cw.TensorError, match=r"room for scales is .* 1 elements of 4 bytes"):
            by_expert.dispatch(tokens, quantise="f32", out=quantised)
        with pytest.raises(cw.TensorError, match=r"scales is \(3, 2\)"):
            by_expert.dispatch(np.zeros((3, 16), np.uint8), scales=np.ones((3, 2), np.float32))

    in_threads(2, rank_main)


def test_ranks_that_differ_are_told() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        with pytest.raises(cw.Mismatch) as raised:
            group(communicator, experts=EXPERTS + communicator.rank)
        assert raised.value.peer is not None

    in_threads(2, rank_main)

    def calls(communicator: cw.Communicator) -> None:
        passes = group(communicator, experts=4, hidden=16)
        handle = passes.handle(np.int32([[0]]), layout="flat")
        tokens = np.ones((1, 16), np.float32)
        with pytest.raises(cw.Mismatch, match=f"rank {1 - communicator.rank} is in"):
            handle.dispatch(tokens, quantise="f32" if communicator.rank else None)
        with pytest.raises(cw.Poisoned):
            passes.handle(np.int32([[0]]), layout="flat").dispatch(tokens)

    in_threads(2, calls)


def test_a_rank_that_does_not_come() -> None:
    left = threading.Event()

    def rank_main(communicator: cw.Communicator) -> None:
        # Long enough for those that come.
        passes = group(communicator, experts=3, timeout=5.0)
        if communicator.rank == 2:
            assert left.wait(60)
            return
        handle = passes.handle(np.int32([[0], [2]]), layout="flat")
        try:
            with pytest.raises(cw.Timeout) as raised:
                handle.dispatch(np.ones((2, HIDDEN), np.float32))
            # Others may have been late as well.
            assert raised.value.missing is not None and 2 in raised.value.missing
        finally:
            if communicator.rank == 0:
                left.set()

    in_threads(3, rank_main)


def test_masked_ranks_are_left_out() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        passes = group(communicator, experts=3, masking=True)
        assert passes.masked == [False] * 3
        with pytest.raises(cw.UsageError, match="cannot be masked"):
            passes.set_masked(rank, True)
        if rank == 2:
            return  # and leaves
        handle = passes.handle(np.int32([[0, 2], [1, 0]]), layout="expert_major")
        tokens = np.full((2, HIDDEN), rank + 1, np.float32)
        received = handle.dispatch(tokens)
        assert passes.masked == [False, False, True]
        assert handle.counts().per_source == [2, 2, 0] if rank == 0 else [1, 1, 0]
        # What the lost rank's expert would have added is missing.
        assert (handle.combine(received.tokens) == tokens * np.float32([[1], [2]])).all()

    in_threads(3, rank_main)


def test_fewer_experts_than_ranks() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        passes = group(communicator, experts=2)
        own = passes.local_experts()
        assert list(own) == [[0], [1], []][communicator.rank]
        assert [list(passes.local_experts(rank)) for rank in range(3)] == [[0], [1], []]
        layouts: list[Layout] = ["expert_major", "expert_packed", "rank_major", "flat"]
        for layout in layouts:
            tokens, _, _ = batch(communicator.rank)
            handle = passes.handle(np.int32([[0, 1]] * TOKENS), layout=layout)
            received = handle.dispatch(tokens)
            assert handle.counts().per_source == [TOKENS if len(own) else 0] * 3
            assert (handle.combine(received.tokens) == 2 * tokens).all()

    in_threads(RANKS, rank_main)


PROCESS = """
import sys, numpy as np, crossweft as cw
from crossweft import moe
rank, ranks = int(sys.argv[1]), int(sys.argv[2])
communicator = cw.Communicator(rank, ranks, cw.UniqueId.from_text(sys.argv[3]))
group = moe.Group(communicator, experts=ranks, max_tokens=4, hidden=32, top_k=2, dtype="f32")
tokens = np.full((4, 32), rank + 1, np.float32)
handle = group.handle(np.int64([[rank, (rank + 1) % ranks]] * 4), np.float32([[0.25, 0.5]] * 4))
for _ in range(20):
    received = handle.dispatch(tokens)
    combined = handle.combine(received.tokens * (rank + 1), weights="dispatched")
    expected = tokens * (0.25 * (rank + 1) + 0.5 * ((rank + 1) % ranks + 1))
    assert (combined == expected).all(), (combined, expected)
if len(sys.argv) > 4:
    try:
        print("ready", flush=True)
        if rank == 0:
            handle.dispatch(tokens)
        else:
            sys.stdin.read()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    print("ok")
"""


def test_processes() -> None:
    unique_id = cw.UniqueId()
    command = [sys.executable, "-c", PROCESS]
    ranks = [
        subprocess.Popen([*command, str(rank), "3", str(unique_id)], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["ok\n"] * 3


def test_ctrl_c_ends_a_dispatch() -> None:
    unique_id = cw.UniqueId()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), "2", str(unique_id), "wait"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Whoever started the tests may have had it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    ranks[0].send_signal(signal.SIGINT)
    assert ranks[0].communicate(timeout=60)[0] == "interrupted\n"
    ranks[1].communicate("", timeout=60)

"""AllReduceCommunicator, its ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from conftest import in_threads

import crossweft as cw
from crossweft.torch import AllReduceCommunicator
from crossweft.torch._rms_norm import normalise

RANKS = 3
REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.int64]


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def reduced(op: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What torch says of all ranks' numbers."""
    everybody = torch.stack([numbers(rank, *shape, dtype=torch.float64) for rank in range(RANKS)])
    of = {
        "sum": lambda: everybody.sum(0),
        "prod": lambda: everybody.prod(0),
        "min": lambda: everybody.amin(0),
        "max": lambda: everybody.amax(0),
    }
    return of[op]().to(dtype)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_all_reduce(op: str, dtype: torch.dtype) -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        torch_communicator = AllReduceCommunicator(communicator)
        for shape in [(1,), (7, 5), (64, 129)]:
            tensor = numbers(communicator.rank, *shape, dtype=dtype)
            expected = reduced(op, *shape, dtype=dtype)
            result = torch_communicator.all_reduce(tensor, op)
            assert torch.equal(result, expected) and result is not tensor
            assert torch.equal(tensor, numbers(communicator.rank, *shape, dtype=dtype)), "the input stays"
            out = torch.empty_like(tensor)
            assert torch_communicator.all_reduce(tensor, op, out=out) is out and torch.equal(out, expected)
            version = tensor._version
            assert torch_communicator.all_reduce_(tensor, op) is tensor and torch.equal(tensor, expected)
            assert tensor._version > version, "autograd knows that it was written"

    in_threads(RANKS, rank_main)


def test_operations_of_torch() -> None:
    dist = torch.distributed
    premul = dist._make_nccl_premul_sum(2.0)

    def rank_main(communicator: cw.Communicator) -> None:
        torch_communicator = AllReduceCommunicator(communicator)
        tensor = numbers(communicator.rank, 100)
        total = reduced("sum", 100)
        for op, expected in [
            (dist.ReduceOp.SUM, total),
            (dist.ReduceOp(dist.ReduceOp.SUM), total),
            (dist.ReduceOp.AVG, total / RANKS),
            (dist.ReduceOp.PRODUCT, reduced("prod", 100)),
            (premul, 2 * total),
        ]:
            torch.testing.assert_close(torch_communicator.all_reduce(tensor, op), expected)
        assert torch_communicator.why_not(tensor, dist.ReduceOp.BAND) == "there is no operation BAND"
        with pytest.raises(cw.TensorError, match="no operation BAND"):
            torch_communicator.all_reduce(tensor, dist.ReduceOp.BAND)
        assert torch_communicator.why_not(tensor, None) == "there is no operation NONE"

    in_threads(RANKS, rank_main)


def test_tensors_that_are_not_contiguous() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        torch_communicator = AllReduceCommunicator(communicator)
        rank, total = communicator.rank, reduced("sum", 6, 10)
        transposed = numbers(rank, 6, 10).t()
        assert torch_communicator.should_all_reduce(transposed), "dense"
        result = torch_communicator.all_reduce(transposed)
        assert torch.equal(result, total.t()) and result.stride() == transposed.stride()
        out = torch.empty(10, 6)
        assert torch.equal(torch_communicator.all_reduce(transposed, out=out), total.t()), "out lies otherwise"
        torch_communicator.all_reduce_(transposed)
        assert torch.equal(transposed, total.t())

        whole = numbers(rank, 6, 10)
        columns = whole[:, 2:7]
        assert not torch_communicator.should_all_reduce(columns)
        assert torch.equal(torch_communicator.all_reduce(columns), total[:, 2:7])
        torch_communicator.all_reduce_(columns)
        assert torch.equal(whole[:, 2:7], total[:, 2:7])
        assert torch.equal(whole[:, :2], numbers(rank, 6, 10)[:, :2]), "what lies beside stays"
        paths = {(count.path, count.largest, count.calls) for count in torch_communicator.report().calls}
        assert paths == {("direct", 240, 2), ("staged", 240, 1), ("staged", 120, 2)}

    in_threads(RANKS, rank_main)


def test_refusals_are_counted_and_say_why() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        torch_communicator = AllReduceCommunicator(communicator, max_bytes=400, name=f"of rank {communicator.rank}")
        refused = {
            torch.ones(101): "it has more than max_bytes (400) bytes",
            torch.ones(2, dtype=torch.complex64): "its elements are of torch.complex64",
            torch.ones(2, device="meta"): "it is on meta, the communicator on cpu",
            torch.ones(2, 2).to_sparse(): "its layout is torch.sparse_coo",
            # Its memory has ones, which would be summed.
            torch._neg_view(torch.ones(3)): "it is a negative view, whose memory has the opposite numbers; give "
            "tensor.resolve_neg()",
        }
        for tensor, reason in refused.items():
            assert torch_communicator.why_not(tensor) == reason
            assert not torch_communicator.should_all_reduce(tensor)
            with pytest.raises(cw.TensorError) as error:
                torch_communicator.all_reduce(tensor)
            assert reason in str(error.value) and error.value.rank == communicator.rank
        with pytest.raises(cw.TensorError, match="and no negative view"):
            torch_communicator.all_reduce(torch.ones(3), out=torch._neg_view(torch.ones(3)))
        # Of one rank alone.
        rows = [101, 1, 1]
        splits = [rows[communicator.rank]] * RANKS
        sent = torch.full((sum(splits),), float(communicator.rank))
        received = torch_communicator.all_to_all(sent, input_splits=splits, output_splits=rows)
        assert received.tolist() == [0.0] * 101 + [1.0, 2.0]
        assert torch_communicator.should_all_reduce(torch.ones(100))
        torch_communicator.disabled = True
        assert torch_communicator.why_not(torch.ones(100)) == "the communicator is disabled"
        reasons = {refusal.reason: refusal.calls for refusal in torch_communicator.report().refused}
        assert reasons == dict.fromkeys(refused.values(), 2)

    in_threads(RANKS, rank_main)


def test_ranks_agree_on_what_is_taken() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        with pytest.raises(cw.Mismatch, match=r"different max_bytes: \[100, 101, 102\]") as error:
            AllReduceCommunicator(communicator, max_bytes=100 + communicator.rank)
        assert error.value.rank == communicator.rank

    in_threads(RANKS, rank_main)


def test_reports_say_what_was_chosen() -> None:
    def rank_main(communicator: cw.Communicator) -> str:
        torch_communicator = AllReduceCommunicator(communicator, name=f"tp of rank {communicator.rank}")
        for _ in range(5):
            torch_communicator.all_reduce_(torch.ones(64))
        torch_communicator.all_reduce_(torch.ones(60), "max")
        torch_communicator.all_reduce_(torch.ones(1 << 18))
        counts = torch_communicator.report().calls
        found = {(count.op, count.smallest, count.largest): (count.calls, count.algorithms) for count in counts}
        explained = communicator.explain("all-reduce", 256)["chosen"]
        assert found["sum", 256, 256] == (5, (explained,))
        assert found["max", 240, 240][0] == 1
        explained = communicator.explain("all-reduce", 1 << 20)["chosen"]
        assert found["sum", 1 << 20, 1 << 20] == (1, (explained,))
        communicator.barrier()
        name = torch_communicator.name
        own = [each for each in cw.report() if each.name == name]
        assert own == [torch_communicator.report()]
        return str(own[0])

    text = in_threads(RANKS, rank_main)[0]
    assert text.startswith(f"tp of rank 0: rank 0 of {RANKS} on cpu\n")
    assert "all_reduce sum of f32, 256 bytes: 5 direct, " in text


def test_gather_scatter_and_exchange() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        torch_communicator = AllReduceCommunicator(communicator)
        rank = communicator.rank
        everybody = [numbers(each, RANKS * 2, 5) for each in range(RANKS)]
        own = everybody[rank]
        assert torch.equal(torch_communicator.all_gather(own), torch.cat(everybody))
        assert torch.equal(torch_communicator.all_gather(own.t()), torch.cat([each.t() for each in everybody]))
        scalar = torch.tensor(float(rank))
        assert torch_communicator.all_gather(scalar).tolist() == [0, 1, 2]
        rows = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(torch_communicator.reduce_scatter(own), sum(everybody)[rows])
        out = torch.empty(5, 2).t()
        assert torch.equal(torch_communicator.reduce_scatter(own, "max", out), torch.stack(everybody).amax(0)[rows])
        expected = torch.cat([each[rows] for each in everybody])
        assert torch.equal(torch_communicator.all_to_all(own), expected)
        splits = [1, 2, 3]
        first = sum(splits[:rank])
        received = torch_communicator.all_to_all(own, input_splits=splits, output_splits=[splits[rank]] * RANKS)
        assert torch.equal(received, torch.cat([each[first : first + splits[rank]] for each in everybody]))
        sent = own.clone()
        assert torch.equal(torch_communicator.broadcast(sent, 1), everybody[1])
        columns = own.clone()[:, 1:3]
        assert torch.equal(torch_communicator.broadcast(columns, 2), everybody[2][:, 1:3])
        for call in (torch_communicator.reduce_scatter, torch_communicator.all_to_all):
            with pytest.raises(cw.TensorError, match="has no 3 blocks"):
                call(torch.ones(4, 3))
        with pytest.raises(cw.TensorError, match=r"out is \(2,\) of torch.float32"):
            torch_communicator.all_gather(own, torch.empty(2))

    in_threads(RANKS, rank_main)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_all_reduce_rms_norm(dtype: torch.dtype) -> None:
    tokens, hidden, epsilon = 5, 256, 1e-5
    weight = (torch.arange(hidden) % 7 / 4).to(dtype)
    residual = numbers(99, tokens, hidden, dtype=dtype)
    total = reduced("sum", tokens, hidden, dtype=dtype)

    def rank_main(communicator: cw.Communicator) -> torch.Tensor:
        torch_communicator = AllReduceCommunicator(communicator)
        own, kept = numbers(communicator.rank, tokens, hidden, dtype=dtype), residual.clone()
        quantised, scales = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn), torch.empty(tokens, 2)
        result = torch_communicator.all_reduce_rms_norm(
            own, weight, residual=kept, epsilon=epsilon, quantised=quantised, scale=scales, per="group"
        )
        assert torch.equal(kept, total + residual)
        # Three bits of mantissa.
        back = (quantised.float().view(tokens, 2, 128) * scales[:, :, None]).view(tokens, hidden)
        torch.testing.assert_close(back, result.float(), rtol=1 / 16, atol=1e-2)
        plain = torch_communicator.all_reduce_rms_norm(own, weight, epsilon=epsilon)
        x = total.float()
        expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()
        torch.testing.assert_close(plain, expected.to(dtype))
        with pytest.raises(cw.TensorError, match=r"weight is \(512,\), the tensor \(4, 256\)"):
            torch_communicator.all_reduce_rms_norm(own[:4], weight.repeat(2))
        return result

    x = (total + residual).float()
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()
    results = in_threads(RANKS, rank_main)
    torch.testing.assert_close(results[0], expected.to(dtype))
    assert all(torch.equal(result, results[0]) for result in results), "the same bits on every rank"


@pytest.mark.parametrize("hidden", [16, 12])
def test_rms_norm_refuses_other_tensors_fused_or_not(hidden: int) -> None:
    def tensor(dtype: torch.dtype = torch.float32, tokens: int = 2) -> torch.Tensor:
        return torch.ones(tokens, hidden).to(dtype)

    weight, residual = torch.ones(hidden), tensor()

    def rank_main(communicator: cw.Communicator) -> None:
        norm = AllReduceCommunicator(communicator).all_reduce_rms_norm
        refusals: list[tuple[str, Callable[[], Any]]] = [
            ("float32, float16 and bfloat16", lambda: norm(tensor(torch.int32), weight.to(torch.int32))),
            ("weight is of torch.bfloat16", lambda: norm(tensor(), weight.bfloat16())),
            ("residual is of torch.bfloat16", lambda: norm(tensor(), weight, residual=tensor(torch.bfloat16))),
            ("quantised is of torch.int8", lambda: norm(tensor(), weight, quantised=tensor(torch.int8), scale=1.0)),
            ("weight is not contiguous", lambda: norm(tensor(), torch._neg_view(weight))),
            ("residual is not contiguous", lambda: norm(tensor(), weight, residual=torch._neg_view(tensor()))),
            ("the same memory", lambda: norm(tensor(), weight, residual=residual, out=residual)),
        ]
        for words, call in refusals:
            with pytest.raises(cw.TensorError, match=words):
                call()
        assert norm(tensor(), weight).shape == (2, hidden)

    in_threads(2, rank_main)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per", ["token", "group", None])
def test_rms_norm_by_torch_is_that_of_the_fused_call(dtype: torch.dtype, per: Literal["token", "group"] | None) -> None:
    tokens, hidden = 7, 264
    weight, residual = (torch.arange(hidden) % 7 / 4).to(dtype), numbers(99, tokens, hidden, dtype=dtype)
    shapes = {"token": (tokens,), "group": (tokens, 3), None: ()}

    def rank_main(communicator: cw.Communicator) -> None:
        ours = AllReduceCommunicator(communicator)
        own = numbers(communicator.rank, tokens, hidden, dtype=dtype)
        # A token whose values saturate, and one of zeros.
        own[1] *= 100
        own[2] = 0
        made = []
        for by_torch in (False, True):
            kept, out = residual.clone(), torch.empty_like(own)
            kept[2] = 0
            quantised = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn)
            scale = 1e-3 if per is None else torch.empty(shapes[per])
            rest = {"residual": kept, "epsilon": 1e-5, "quantised": quantised, "scale": scale, "per": per or "token"}
            if by_torch:
                # What takes the fused call's place where there is none.
                normalise(ours.all_reduce(own), weight, out, **rest)
            else:
                ours.all_reduce_rms_norm(own, weight, out=out, **rest)
            made.append([kept, out, quantised, torch.as_tensor(scale)])
        (residuals, *fused), (other, *unfused) = made
        assert torch.equal(residuals, other)
        for expected, found in zip(fused, unfused, strict=True):
            # A last bit of the type, which may be one of f8e4m3; scales follow it.
            precision = torch.finfo(expected.dtype if expected.shape == (tokens, hidden) else dtype).eps
            torch.testing.assert_close(found.float(), expected.float(), rtol=2 * precision, atol=1e-6)
        with pytest.raises(cw.UsageError, match="belong together"):
            normalise(own, weight, out, **{**rest, "scale": None})
        with pytest.raises(cw.TensorError, match=r"tensors are \(7, 264\) and \(6, 264\)"):
            normalise(own, weight, out, **{**rest, "residual": kept[1:]})

    in_threads(RANKS, rank_main)


def test_what_is_prepared_is_found() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        ours = AllReduceCommunicator(communicator, max_bytes=1 << 20)
        operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
        ours.prepare((RANKS, 100), torch.float32, operations=operations)
        tensor = numbers(communicator.rank, RANKS, 100)
        assert torch.equal(ours.all_reduce(tensor), reduced("sum", RANKS, 100))
        ours.check()
        for shape, dtype in [((1 << 20,), torch.float32), ((1,), torch.complex64)]:
            with pytest.raises(cw.UsageError, match="no tensor of"):
                ours.prepare(shape, dtype)

    in_threads(RANKS, rank_main)


def test_pools_are_for_cuda_tensors() -> None:
    with AllReduceCommunicator(cw.Communicator(0, 1, cw.UniqueId())) as ours:
        for make in (ours.mem_pool, lambda nbytes: cw.torch.mem_pool(ours, nbytes)):
            with pytest.raises(cw.UsageError, match="mem_pool is for CUDA tensors, and this"):
                make(1 << 20)
        with pytest.raises(cw.UsageError, match="this communicator is on the CPU"):
            ours.communicator.make_pool(1 << 20)
        assert ours.communicator.pool is None
        explained = ours.communicator.explain("all-reduce", 1 << 20, symmetric=True)
        assert explained["place"] == "one_symmetric"

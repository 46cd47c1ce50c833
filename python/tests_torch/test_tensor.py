"""Tensors of torch, as memory."""

from __future__ import annotations

import pytest
import torch

import crossweft as cw
from crossweft._crossweft import describe


def test_torch() -> None:
    inputs = [torch.arange(6, dtype=torch.bfloat16), torch.ones(6, dtype=torch.bfloat16)]
    for out in cw.Plan.all_reduce("one-shot", 2).run_local(inputs):
        assert torch.equal(out, inputs[0] + inputs[1])
    found = describe(inputs[0])
    assert found["dtype"] == "bf16" and found["protocol"].startswith("dlpack")
    assert describe(torch.zeros(4, dtype=torch.float8_e4m3fn))["dtype"] == "f8e4m3"
    with pytest.raises(cw.TensorError, match="contiguous"):
        describe(torch.zeros(4, 4).t()[1:])


def test_negative_views_are_refused() -> None:
    communicator = cw.Communicator(0, 1, cw.UniqueId())
    view = torch._neg_view(torch.ones(3))
    with pytest.raises(cw.TensorError, match="resolve_neg"):
        communicator.all_reduce(view)
    with pytest.raises(cw.TensorError, match="resolve_neg"):
        communicator.send(view, 0)

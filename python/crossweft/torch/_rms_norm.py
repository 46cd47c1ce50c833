"""What follows an all-reduce in a transformer, by torch, where no kernel does all of it."""

from __future__ import annotations

import math
from typing import Literal

import torch

from ..errors import TensorError, UsageError

#: The largest number of f8e4m3.
LARGEST = 448.0
#: Elements that share a scale.
GROUP = 128


def normalise(
    total: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None,
    epsilon: float,
    quantised: torch.Tensor | None,
    scale: float | torch.Tensor | None,
    per: Literal["token", "group"],
) -> None:
    """Residual addition, RMS normalisation and quantisation of tokens, as ``Communicator.all_reduce_rms_norm`` does
    them: in 32 bits, rounded to the type after the addition and in the end. Raises UsageError, TensorError."""
    for each in (residual, quantised):
        if each is not None and each.shape != total.shape:
            raise TensorError(f"all_reduce_rms_norm: tensors are {tuple(total.shape)} and {tuple(each.shape)}")
    if (quantised is None) != (scale is None):
        raise UsageError("quantised and scale belong together: give both or none")
    # Where tensors of inference mode may be written too.
    with torch.inference_mode():
        if residual is not None:
            total = residual.add_(total)
        x = total.float()
        factor = (x.square().mean(-1, keepdim=True) + epsilon).sqrt().reciprocal()
        out.copy_(x * factor * weight.float())
        if quantised is not None and scale is not None:
            # torch's conversion does not saturate.
            quantised.copy_(_divided(out.float(), scale, per).clamp(-LARGEST, LARGEST))


def _divided(x: torch.Tensor, scale: float | torch.Tensor, per: Literal["token", "group"]) -> torch.Tensor:
    """Tokens divided by their scales, which are written where they are a tensor."""
    if not isinstance(scale, torch.Tensor):
        return x / scale
    if per == "token":
        largest = _magnitude(x).amax(-1)
        scale.copy_((largest / LARGEST).clamp(min=1 / (LARGEST * 512)).view(scale.shape))
        return x / scale.view(largest.shape).unsqueeze(-1)
    hidden = x.shape[-1]
    groups = torch.nn.functional.pad(x, (0, -hidden % GROUP)).unflatten(-1, (-1, GROUP))
    largest = _magnitude(groups).amax(-1)
    scale.copy_((largest.clamp(min=1e-10) / LARGEST).view(scale.shape))
    return (groups / scale.view(largest.shape).unsqueeze(-1)).flatten(-2)[..., :hidden]


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """NaNs do not count."""
    return x.abs().nan_to_num(nan=0.0, posinf=math.inf)

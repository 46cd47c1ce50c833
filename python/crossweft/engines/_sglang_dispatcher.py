"""What SGLang's layers of experts send tokens through, in a module of its own because it cannot be loaded without
SGLang.

SGLang's own dispatcher for DeepEP, with crossweft's ``Buffer`` in the place of DeepEP's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe.token_dispatcher import deepep

from ..compat import deep_ep
from ._communicator import time_limit
from ._plugin import UnsupportedEngine


class CrossweftDispatcher(deepep.DeepEPDispatcher):  # type: ignore[misc]
    """A ``BaseDispatcher``, of ``--moe-a2a-backend deepep``."""

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """As SGLang's. Raises UnsupportedEngine for fp4."""
        super().set_quant_config(quant_config)
        for impl in (getattr(self, "_low_latency_dispatcher", None), getattr(self, "_normal_dispatcher", None)):
            if impl is not None and (impl.use_nvfp4 or impl.use_mxfp4 or impl.use_mxfp8):
                raise UnsupportedEngine(f"crossweft sends bf16 and fp8, not {impl.deepep_output_dtype.name}")

    def set_overlap_args(self, combine_overlap_args: Any, meta_overlap_args: dict[str, Any]) -> None:
        """Raises UnsupportedEngine: a combine does not begin before its rows are there."""
        raise UnsupportedEngine(
            "crossweft's combine cannot begin before its rows are there; use no single-batch overlap"
        )


def place() -> Callable[[], None]:
    """What lets SGLang's dispatchers find crossweft where they look for DeepEP, whether they have looked already or
    not. Nothing is changed before it is called. Raises UnsupportedEngine, ImportError."""
    limit = time_limit()
    names: dict[str, Any] = {"Buffer": deep_ep.Buffer, "Config": deep_ep.Config}
    if not hasattr(deepep, "use_deepep"):
        raise UnsupportedEngine(f"{deepep.__name__} does not say whether it has found deep_ep (use_deepep)")
    if not deepep.use_deepep:
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

        # What it has not come to, as it has found no DeepEP.
        names |= {"sglang_per_token_group_quant_fp8": sglang_per_token_group_quant_fp8}
        names |= {"use_deepep": True, "_deepep_import_error": None}

    def take() -> None:
        deep_ep.install(shadow=True)
        vars(deepep).update(names)
        deep_ep.Buffer.default_timeout = limit

    return take

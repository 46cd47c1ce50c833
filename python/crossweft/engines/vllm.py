"""crossweft in vLLM: a plugin for its loader.

``CROSSWEFT_VLLM`` says where: ``tp`` (or ``1``) for tensor-parallel groups on CUDA devices, which get a communicator
that takes what crossweft can and leaves the rest to vLLM's; ``ep`` for expert parallelism, where ``--all2all-backend
deepep_high_throughput`` and ``deepep_low_latency`` then send tokens through crossweft instead of DeepEP, which need not
be installed; ``all`` for both. Unless it is set, nothing is changed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from ._plugin import UnsupportedEngine, asked_for, check_contract, check_version, refuse

#: Under vLLM's own, which is the only one that it shows.
logger = logging.getLogger("vllm.crossweft")

#: Says whether crossweft is used.
SWITCH = "CROSSWEFT_VLLM"
#: What it may ask for.
CHOICES = {"1": ("tp",), "on": ("tp",), "tp": ("tp",), "ep": ("ep",), "all": ("tp", "ep")}
#: Versions that tests run with.
TESTED = ("0.33.0",)
#: What takes the place of :data:`THEIRS`, as vLLM names classes.
OURS = "crossweft.engines._vllm_communicator.CrossweftCommunicator"
THEIRS = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
#: What vLLM calls of a communicator, and crossweft takes.
CONTRACT = ("__init__", "all_reduce", "all_gather", "reduce_scatter", "destroy")


def register() -> bool:
    """Makes vLLM's CUDA platform name crossweft's communicator; whether it does. Called by vLLM in each process.

    Raises nothing: what it finds wrong is logged as an error, and vLLM stays as it is.
    """
    try:
        asked = asked_for(SWITCH, CHOICES)
        if not asked:
            logger.info("crossweft is installed; set %s=1 to use it", SWITCH)
            return False
        version = check_version("vllm", TESTED)
        from vllm.platforms.cuda import CudaPlatformBase

        named = CudaPlatformBase.get_device_communicator_cls()
        if named not in (OURS, THEIRS):
            raise UnsupportedEngine(f"its CUDA platform names {named}, not {THEIRS}")
        if "ep" in asked:
            _name_deep_ep()
        if named == THEIRS:
            CudaPlatformBase.get_device_communicator_cls = classmethod(_communicator_class)
    except Exception as error:
        refuse(logger, "vLLM", error)
        return False
    logger.info("crossweft is used in vLLM %s: %s", version, ", ".join(sorted(asked)))
    return True


def _name_deep_ep() -> None:
    """Lets vLLM find crossweft where it looks for DeepEP. Raises UnsupportedEngine if it has looked before."""
    from ..compat import deep_ep
    from ._communicator import time_limit

    limit = time_limit()
    layers = sys.modules.get("vllm.model_executor.layers.fused_moe.all2all_utils")
    if layers is not None and not hasattr(layers, "DeepEPLLPrepareAndFinalize"):
        raise UnsupportedEngine("its layers of experts were loaded before the plugin, and have found no deep_ep")
    has_deep_ep, forget = _finder()
    deep_ep.install(shadow=True)
    try:
        forget()
        if not has_deep_ep():
            raise UnsupportedEngine("it does not find deep_ep, which crossweft has put in its place")
    except Exception:
        deep_ep.uninstall()
        forget()
        raise
    deep_ep.Buffer.default_timeout = limit


def _finder() -> tuple[Callable[[], bool], Callable[[], None]]:
    """How vLLM looks for DeepEP, and forgets what it has found."""
    from vllm.utils import import_utils

    return import_utils.has_deep_ep, import_utils._has_module.cache_clear


def _communicator_class(platform: Any) -> str:
    """The class that vLLM is to use; its own if that is not what crossweft's was written for."""
    try:
        # Not before vLLM asks: plugins are loaded while half of it is not.
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

        from ._vllm_communicator import CrossweftCommunicator

        check_contract(CudaCommunicator, CrossweftCommunicator, CONTRACT)
    except Exception as error:
        refuse(logger, "vLLM", error)
        if "ep" in asked_for(SWITCH, CHOICES):
            from ..compat import deep_ep

            # Groups are made before layers of experts are loaded.
            deep_ep.uninstall()
            _finder()[1]()
        return THEIRS
    return OURS

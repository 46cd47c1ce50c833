"""crossweft in vLLM: a plugin for its loader.

With ``CROSSWEFT_VLLM=1`` tensor-parallel groups on CUDA devices get a communicator that takes what crossweft can and
leaves the rest to vLLM's. Unless it is set, nothing is changed.
"""

from __future__ import annotations

import logging
from typing import Any

from ._plugin import UnsupportedEngine, asked_for, check_contract, check_version, refuse

#: Under vLLM's own, which is the only one that it shows.
logger = logging.getLogger("vllm.crossweft")

#: Says whether crossweft is used.
SWITCH = "CROSSWEFT_VLLM"
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
        if not asked_for(SWITCH, {"1": ("tp",), "on": ("tp",)}):
            logger.info("crossweft is installed; set %s=1 to use it", SWITCH)
            return False
        version = check_version("vllm", TESTED)
        from vllm.platforms.cuda import CudaPlatformBase

        named = CudaPlatformBase.get_device_communicator_cls()
        if named not in (OURS, THEIRS):
            raise UnsupportedEngine(f"its CUDA platform names {named}, not {THEIRS}")
    except (ImportError, UnsupportedEngine) as error:
        refuse(logger, "vLLM", error)
        return False
    if named == THEIRS:
        CudaPlatformBase.get_device_communicator_cls = classmethod(_communicator_class)
    logger.info("crossweft is used in vLLM %s", version)
    return True


def _communicator_class(platform: Any) -> str:
    """The class that vLLM is to use; its own if that is not what crossweft's was written for."""
    try:
        # Not before vLLM asks: plugins are loaded while half of it is not.
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

        from ._vllm_communicator import CrossweftCommunicator

        check_contract(CudaCommunicator, CrossweftCommunicator, CONTRACT)
    except (ImportError, UnsupportedEngine) as error:
        refuse(logger, "vLLM", error)
        return THEIRS
    return OURS

"""What vLLM's layers of experts send tokens through, in a module of its own because it cannot be loaded without vLLM.

vLLM's own managers of the two backends that speak DeepEP, with crossweft's ``Buffer``, which they find as ``deep_ep``.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup
from vllm import envs
from vllm.distributed.device_communicators import all2all
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from ..compat.deep_ep import Buffer
from ._plugin import UnsupportedEngine, check_contract
from .vllm import logger

#: What vLLM and its managers call of one.
CONTRACT = ("__init__", "get_handle", "max_sms_used", "destroy")
#: Lets layers hand over what is to be sent in fp4.
_FP4 = "VLLM_DEEPEPLL_NVFP4_DISPATCH"


def _check_host(manager: All2AllManagerBase) -> None:
    if manager.internode or manager.tcp_store_group is not None:
        why = "its ranks are on several hosts" if manager.internode else "it may grow and shrink"
        raise UnsupportedEngine(f"the expert-parallel group cannot be crossweft's: {why}")


class HighThroughputManager(all2all.DeepEPHTAll2AllManager):  # type: ignore[misc]
    """Of ``--all2all-backend deepep_high_throughput``."""

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        _check_host(self)

    def max_sms_used(self) -> int | None:
        """Multiprocessors that a call takes; ``None`` before the first."""
        return _sms(self, 0)


class LowLatencyManager(all2all.DeepEPLLAll2AllManager):  # type: ignore[misc]
    """Of ``--all2all-backend deepep_low_latency``. Raises UnsupportedEngine if layers are told to send fp4."""

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        _check_host(self)
        if getattr(envs, _FP4, False):
            raise UnsupportedEngine(f"crossweft sends bf16 and fp8, not fp4, which {_FP4} asks for; unset it")

    def max_sms_used(self) -> int | None:
        """Multiprocessors that a call takes; ``None`` before the first."""
        return _sms(self, 1)

    def clean_buffers(self) -> None:
        """Takes all ranks in again. There is nothing to clean: calls carry their numbers."""
        if self._buffer is not None:
            self._buffer.low_latency_clean_mask_buffer()
        all2all.DeepEPLLAll2AllManager._last_mask = None


def _sms(manager: Any, which: int) -> int | None:
    buffers: list[Buffer] = list(manager.handle_cache._cache.values())
    return buffers[0].multiprocessors[which] if buffers else None


#: By the backend, whose own manager each takes the place of.
MANAGERS = {
    "deepep_high_throughput": (HighThroughputManager, all2all.DeepEPHTAll2AllManager),
    "deepep_low_latency": (LowLatencyManager, all2all.DeepEPLLAll2AllManager),
}


def replaced(theirs: All2AllManagerBase, backend: str) -> All2AllManagerBase:
    """crossweft's manager for the group of vLLM's, whose place it takes; of another backend, vLLM's own.

    Collective over the group.

    Raises UnsupportedEngine, on all ranks alike, if vLLM's is not what is known or ranks are on several hosts.
    """
    if backend not in MANAGERS:
        logger.warning("crossweft is not used for %s, but for %s", backend, " and ".join(MANAGERS))
        return theirs
    ours, known = MANAGERS[backend]
    if type(theirs) is not known:
        raise UnsupportedEngine(f"vLLM's manager of {backend} is a {type(theirs).__qualname__}")
    check_contract(known, ours, CONTRACT)
    return ours(theirs.cpu_group, theirs.tcp_store_group)

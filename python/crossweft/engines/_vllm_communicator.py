"""The communicator of vLLM's groups, in a module of its own because it cannot be loaded without vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm import envs
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.utils import StatelessProcessGroup

from ._communicator import EngineCommunicator
from ._plugin import asked_for
from .vllm import CHOICES, SWITCH, logger


class CrossweftCommunicator(CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator of a group on CUDA devices; of a tensor-parallel group, crossweft takes what it can, and an
    expert-parallel one gets its manager, if that is asked for.

    ``--disable-custom-all-reduce`` and ``VLLM_BATCH_INVARIANT`` keep it out of the former: which algorithm adds depends
    on the size.
    """

    #: vLLM's, or crossweft's.
    all2all_manager: Any

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        global_ranks: list[int] | None = None,
        global_world_size: int | None = None,
        tcp_store_group: StatelessProcessGroup | None = None,
        use_all2all: bool = False,
    ) -> None:
        """As vLLM's. Collective over the group.

        Raises UnsupportedEngine if expert parallelism is asked for and the group's ranks are on several hosts.
        """
        super().__init__(
            cpu_group,
            device,
            device_group,
            unique_name,
            global_ranks,
            global_world_size,
            tcp_store_group,
            use_all2all,
        )
        self.crossweft: EngineCommunicator | None = None
        asked = asked_for(SWITCH, CHOICES) or ("tp",)
        if "ep" in asked and self.all2all_manager is not None:
            # As vLLM imports its own: not before one is needed.
            from ._vllm_all2all import replaced

            self.all2all_manager = replaced(self.all2all_manager, self.all2all_backend)
        is_tensor_parallel = unique_name.split(":")[0] == "tp" and "tp" in asked
        if not is_tensor_parallel or self.world_size == 1 or not self.use_custom_allreduce:
            return
        if envs.VLLM_BATCH_INVARIANT or tcp_store_group is not None:
            why = "VLLM_BATCH_INVARIANT is set" if envs.VLLM_BATCH_INVARIANT else "the group may grow and shrink"
            logger.warning("crossweft is not used for %s: %s", unique_name, why)
            return
        self.crossweft = EngineCommunicator.create(cpu_group, self.device, f"vLLM's {unique_name}", logger)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, a new tensor."""
        ours = self.crossweft
        if ours is not None and ours.should_all_reduce(input_):
            return ours.all_reduce(input_)
        out: torch.Tensor = super().all_reduce(input_)
        return out

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' tensors one after another along a dimension."""
        ours = self.crossweft
        if ours is None or not ours.should_gather(None, input_):
            out: torch.Tensor = super().all_gather(input_, dim)
            return out
        dim %= input_.dim()
        blocks = ours.all_gather(input_.reshape(1, *input_.shape)).movedim(0, dim)
        return blocks.reshape(*input_.shape[:dim], self.world_size * input_.shape[dim], *input_.shape[dim + 1 :])

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's block, along a dimension, of the sum of all ranks' tensors.

        Which block is whose is as vLLM's own has it, also where there are more than two dimensions.
        """
        ours = self.crossweft
        # As vLLM lays blocks out, which copies them unless that is how they lie.
        if ours is not None and ours.should_reduce_scatter(rows := input_.movedim(0, dim)):
            return ours.reduce_scatter(rows).movedim(0, dim).contiguous()
        out: torch.Tensor = super().reduce_scatter(input_, dim)
        return out

    def destroy(self) -> None:
        """Frees everything."""
        ours, self.crossweft = self.crossweft, None
        if ours is not None:
            ours.close()
        super().destroy()

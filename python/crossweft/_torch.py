"""Communicators from ``torch.distributed`` process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._crossweft import Communicator, UniqueId

if TYPE_CHECKING:
    from ._crossweft import _Device


def communicator(group: Any, device: _Device, timeout: float, bind: str | None) -> Communicator:
    """The communicator of the ranks of ``group``, or of all ranks. Collective over the group."""
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ImportError(
            "Communicator.from_process_group needs torch, which is not installed; "
            "Communicator.from_env() and unique ids work without"
        ) from error
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not a member of the process group")
    root = rank == 0
    # Kept until everybody has joined: its owner hosts the rendezvous.
    unique_id = UniqueId(bind=bind or "loopback", timeout=timeout) if root else None
    message = [str(unique_id) if root else None]
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(message, src=source, group=group)
    if unique_id is None:
        unique_id = UniqueId.from_text(str(message[0]))
    return Communicator(rank, world_size, unique_id, device=device, timeout=timeout)

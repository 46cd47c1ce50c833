"""Communicators of ranks that ``torch.distributed`` knows. Not in :mod:`crossweft.torch`, which registers things."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._crossweft import Communicator, UniqueId
from .errors import Error, UsageError

if TYPE_CHECKING:
    from ._crossweft import _Device


def from_process_group(group: Any, device: _Device, timeout: float, bind: str | None) -> Communicator:
    """The communicator of the ranks of ``group``, of any backend, or of all ranks. Collective over the group.

    They meet in the group: for a rank that does not come, as long as the group waits, whatever ``timeout`` says.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ImportError(
            "Communicator.from_process_group needs torch, which is not installed; "
            "Communicator.from_env() and unique ids work without"
        ) from error
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise UsageError("this process is not a member of the process group")
    # Kept until everybody has joined: its owner hosts the rendezvous.
    unique_id: UniqueId | None = None
    message: list[Any] = [None]
    if rank == 0:
        try:
            unique_id = UniqueId(bind=bind or "loopback", timeout=timeout)
            message = [str(unique_id)]
        except Error as error:
            # Everybody raises it, rather than wait for what does not come.
            message = [error]
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(message, src=source, group=group)
    if isinstance(message[0], Exception):
        raise message[0]
    if unique_id is None:
        unique_id = UniqueId.from_text(str(message[0]))
    return Communicator(rank, world_size, unique_id, device=device, timeout=timeout)


def from_store(
    store: Any,
    rank: int,
    world_size: int,
    *,
    device: _Device = "cpu",
    timeout: float = 600.0,
    bind: str | None = None,
) -> Communicator:
    """The communicator of ranks that share a ``torch.distributed.Store``, and no process group. Collective.

    The key ``crossweft`` of the store must be used for nothing else, so give each job a ``PrefixStore``: while they
    join, for then it is gone again. ``bind`` is as for a process group.
    """
    key = "crossweft"
    if rank == 0:
        unique_id = UniqueId(bind=bind or "loopback", timeout=timeout)
        store.set(key, str(unique_id))
    else:
        unique_id = UniqueId.from_text(store.get(key).decode())
    communicator = Communicator(rank, world_size, unique_id, device=device, timeout=timeout)
    # What is made next of the same store must not find it. If this could not be made, others may still have to read it.
    if rank == 0:
        store.delete_key(key)
    communicator.barrier()
    return communicator

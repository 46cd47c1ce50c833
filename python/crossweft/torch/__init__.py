"""crossweft for torch.

* :class:`AllReduceCommunicator`: collectives on tensors of a process group's ranks, in place and out of place, with a
  word on which tensors are taken and why others are not.
* :func:`mem_pool`: memory for tensors that all ranks reach, so that calls on them copy nothing that they need not.
* :func:`from_store`: a communicator of ranks that have no process group.
* ``torch.ops.crossweft``: the same as custom ops for ``torch.compile``, on communicators that :func:`register` names.
* ``torch.distributed.init_process_group("crossweft")``, or ``"cpu:crossweft"`` beside others, once this is imported:
  a backend for host tensors.

``crossweft.report()`` says what became of the calls.
"""

import torch.distributed as dist

from .._torch import from_store
from ._communicator import MAX_BYTES, AllReduceCommunicator
from ._ops import Registration, register
from ._pool import SymmetricPool

__all__ = ["MAX_BYTES", "AllReduceCommunicator", "Registration", "SymmetricPool", "from_store", "mem_pool", "register"]


def mem_pool(communicator: AllReduceCommunicator, nbytes: int) -> SymmetricPool:
    """A pool for ``torch.cuda.use_mem_pool`` whose tensors all ranks of the communicator reach; see
    :meth:`AllReduceCommunicator.mem_pool`. Collective."""
    return communicator.mem_pool(nbytes)


if dist.is_available():
    from ._backend import register_backend

    register_backend()

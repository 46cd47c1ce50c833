"""crossweft for torch.

* :class:`AllReduceCommunicator`: collectives on tensors of a process group's ranks, in place and out of place, with a
  word on which tensors are taken and why others are not.
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

__all__ = ["MAX_BYTES", "AllReduceCommunicator", "Registration", "from_store", "register"]

if dist.is_available():
    from ._backend import register_backend

    register_backend()

"""Communication between the GPUs, or processes, of a job: algorithms as checked plans.

* :class:`Plan`: a communication plan; read it, check it, run it, export it.
* :func:`compile`: a plan from a program of :mod:`crossweft.language`.
* :class:`Communicator`: one rank of a job; runs plans and collectives on tensors.
* :mod:`crossweft.moe`: dispatch and combine of a mixture of experts.
* :class:`UniqueId`: how ranks without a launcher find each other.
* :mod:`crossweft.torch`: all of it for torch; imported by itself, since it needs torch.
* :func:`report`: what became of the calls made through it.
* :mod:`crossweft.errors`: what calls raise.

Tensors are anything contiguous that speaks DLPack, the buffer protocol or ``__cuda_array_interface__``: of torch,
numpy, cupy, jax, ``array.array``, ``bytearray``. None of these libraries is needed.
"""

from ._compile import compile
from ._counts import CallCount, CommunicatorReport, RefusalCount, report
from ._crossweft import (
    Communicator,
    Diagnostic,
    MessageGroup,
    Plan,
    PreparedPlan,
    Report,
    UniqueId,
    __version__,
)
from .errors import (
    Aborted,
    CapacityError,
    CheckError,
    DeviceError,
    Error,
    LaunchError,
    Mismatch,
    PeerLost,
    PlanError,
    Poisoned,
    ProgramError,
    ShadowError,
    TensorError,
    Timeout,
    UsageError,
)

__all__ = [
    "Aborted",
    "CapacityError",
    "CallCount",
    "CheckError",
    "Communicator",
    "CommunicatorReport",
    "DeviceError",
    "Diagnostic",
    "Error",
    "LaunchError",
    "MessageGroup",
    "Mismatch",
    "PeerLost",
    "Plan",
    "PlanError",
    "Poisoned",
    "PreparedPlan",
    "ProgramError",
    "RefusalCount",
    "Report",
    "ShadowError",
    "TensorError",
    "Timeout",
    "UniqueId",
    "UsageError",
    "__version__",
    "compile",
    "report",
]

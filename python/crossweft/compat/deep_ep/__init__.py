"""Expert parallelism by the names of DeepEP: ``Buffer``, ``Config``, ``EventOverlap``, ``topk_idx_t``, ``utils``.

:func:`install` makes it importable as ``deep_ep``; nothing does that by itself. It follows DeepEP 1.2's ``Buffer``, on
tensors of a CUDA device, or in host memory: there streams and events are accepted, and nothing waits for them, since
every call has done its work when it returns, or when its hook does. What differs:

* any number of ranks of one host up to 16, any hidden size whose bytes are a multiple of 16, top-k up to 32, experts
  that ranks do not share evenly;
* rows are always by source rank and then token, so that the same calls give the same bits, low-latency ones too;
* ranks that make different calls, a rank that is gone or late, and wrong arguments are exceptions of
  :mod:`crossweft.errors` that name ranks; nothing is asserted, and no device is lost;
* memory is made when a shape is first used, which all ranks do together, not by the sizes given to ``Buffer``.

Numbers in a ``Config`` are kept, and decide nothing here.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

try:
    import torch
except ImportError as error:
    raise ImportError("crossweft.compat.deep_ep needs torch, which is not installed; crossweft.moe does not") from error

from ...errors import ShadowError
from . import utils
from ._buffer import Buffer
from ._config import Config
from ._errors import Unsupported
from .utils import EventOverlap

__all__ = ["Buffer", "Config", "EventOverlap", "Unsupported", "install", "topk_idx_t", "uninstall", "utils"]

_NAME = "deep_ep"

#: What was there before.
_hidden: dict[str, ModuleType] = {}

#: What experts of tokens are.
topk_idx_t = torch.int64


def install(*, shadow: bool = False) -> None:
    """Makes ``deep_ep`` importable. Raises ShadowError if there is one and ``shadow`` does not say to hide it."""
    ours = sys.modules[__name__]
    if sys.modules.get(_NAME) is ours:
        return
    if not shadow:
        found = _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None
        if found:
            raise ShadowError("deep_ep is installed; install(shadow=True) hides it in this process")
    _hidden.update(_forget())
    sys.modules[_NAME] = ours
    sys.modules[f"{_NAME}.utils"] = utils


def uninstall() -> None:
    """Forgets what :func:`install` has made; what that has hidden is there again."""
    if sys.modules.get(_NAME) is sys.modules[__name__]:
        _forget()
        sys.modules.update(_hidden)
        _hidden.clear()


def _forget() -> dict[str, ModuleType]:
    """Takes all modules of the name away, and returns them."""
    names = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    return {name: sys.modules.pop(name) for name in names}

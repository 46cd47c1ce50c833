"""MSCCL++'s DSL by its own names, so that its programs run unchanged.

After :func:`install`, ``import mscclpp.language`` and its modules, ``mscclpp.compile`` and what programs use of them
are :mod:`crossweft.language`; everything else of MSCCL++ is not there. ``python -m crossweft.compat.mscclpp
program.py ...`` does so for one program. Nothing happens without either, and an installed mscclpp is only hidden when
``shadow=True`` says so.

``JSON()`` and ``to_json()`` give MSCCL++'s execution plans; :meth:`CollectiveProgram.compile` and ``mscclpp.compile``
give a :class:`crossweft.Plan`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ... import language
from ..._compile import compile as _compile
from ..._crossweft import Plan, __version__
from ...errors import ShadowError

__all__ = ["CollectiveProgram", "compile", "install", "uninstall"]

_NAME = "mscclpp"
#: The modules that programs import from. Like theirs, each has the names of those it builds on.
_MODULES = (
    "channel",
    "collectives",
    "general",
    "internal",
    "internal.types",
    "loop",
    "program",
    "rank",
    "thread_block_group",
    "utils",
)


class CollectiveProgram(language.CollectiveProgram):
    """A program that is written to MSCCL++'s execution plans."""

    def to_json(self, indent: int | None = 2, **arguments: Any) -> str:
        """The execution plan, as ``json.dumps`` writes it."""
        plan = json.loads(self.compile().to_mscclpp())
        plan["protocol"] = self.protocol
        plan["reuse_resources"] = self.reuse_resources
        plan["num_threads_per_block"] = self.num_threads_per_block
        plan["buffer_alignment"] = self.buffer_alignment
        plan["min_message_size"] = self.min_message_size
        plan["max_message_size"] = self.max_message_size
        return json.dumps(plan, indent=indent, **arguments)


def compile(
    algo: Callable[..., language.CollectiveProgram],
    algo_spec: language.AlgoSpec,
    rank: int | None = None,
    **arguments: Any,
) -> Plan:
    """The plan of an algorithm; it is the same on every rank."""
    return _compile(algo, algo_spec, **arguments)


def install(*, shadow: bool = False) -> None:
    """Makes ``mscclpp`` importable. Raises ShadowError if there is one and ``shadow`` does not say to hide it."""
    if _is_ours(sys.modules.get(_NAME)):
        return
    if not shadow:
        found = importlib.util.find_spec(_NAME)
        if found is not None:
            raise ShadowError(
                f"mscclpp is installed ({found.origin or 'without a file'}); "
                "install(shadow=True), or --shadow, hides it in this process"
            )
    uninstall(theirs=True)
    names = {name: getattr(language, name) for name in language.__all__}
    names["CollectiveProgram"] = CollectiveProgram
    top = _module(_NAME, {"compile": compile, "version": {"version": __version__}})
    top.__version__ = __version__  # type: ignore[attr-defined]
    inner = _module(f"{_NAME}.language", names)
    top.language = inner  # type: ignore[attr-defined]
    for path in _MODULES:
        module = _module(f"{_NAME}.language.{path}", names)
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)


def uninstall(*, theirs: bool = False) -> None:
    """Forgets what :func:`install` has made; with ``theirs``, whatever is imported under the name."""
    if theirs or _is_ours(sys.modules.get(_NAME)):
        for name in [n for n in sys.modules if n == _NAME or n.startswith(f"{_NAME}.")]:
            del sys.modules[name]


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and module.__dict__.get("compile") is compile


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "crossweft, by the names of MSCCL++.")
    module.__dict__.update(names)
    module.__all__ = list(names)  # type: ignore[attr-defined]
    # A package: what is not there is said to be missing of it.
    module.__path__ = []
    sys.modules[name] = module
    return module

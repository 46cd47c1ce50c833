"""From programs to plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._crossweft import Plan
from .language.program import AlgoSpec, CollectiveProgram


def compile(
    program: CollectiveProgram | Callable[..., CollectiveProgram],
    spec: AlgoSpec | None = None,
    **arguments: Any,
) -> Plan:
    """The plan of a program, or of what a function makes of ``spec`` and ``arguments``.

    Raises ProgramError for a line that makes no sense, and CheckError with the lines at fault if the program, all
    together, does not compute what it says, races or can deadlock.
    """
    if callable(program):
        program = program(**arguments) if spec is None else program(spec, **arguments)
    elif spec is not None or arguments:
        raise TypeError("a specification and arguments are for functions that make programs")
    if not isinstance(program, CollectiveProgram):
        raise TypeError(f"a CollectiveProgram is needed, not a {type(program).__name__}")
    return program.compile()

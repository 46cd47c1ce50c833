"""What plugins of all engines have in common: switches, versions, contracts."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

#: Set to 1, an engine of a version that was not tested is used if its classes look as expected.
UNTESTED = "CROSSWEFT_UNTESTED_ENGINE"


class UnsupportedEngine(Exception):
    """The engine is not as the plugin knows it, so nothing of it was changed."""


def asked_for(variable: str, choices: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """The parts of a plugin that a variable asks for; none if it is not set, empty, ``0`` or ``off``.

    ``choices`` are its other values, which may be given with commas between them. Raises UnsupportedEngine for others.
    """
    value = os.environ.get(variable, "").strip().lower()
    if value in ("", "0", "off"):
        return frozenset()
    asked: set[str] = set()
    for choice in filter(None, (part.strip() for part in value.split(","))):
        if choice not in choices:
            raise UnsupportedEngine(f"{variable} is {value!r}; give 0, or of {', '.join(choices)}")
        asked.update(choices[choice])
    return frozenset(asked)


def check_version(engine: str, tested: Iterable[str]) -> str:
    """The version of an engine that was tested. Raises UnsupportedEngine for another, or if there is none."""
    try:
        version = metadata.version(engine)
    except metadata.PackageNotFoundError:
        raise UnsupportedEngine(f"{engine} is not installed") from None
    release = re.match(r"\d+(\.\d+)*", version)
    if (release and release.group() in tested) or os.environ.get(UNTESTED) == "1":
        return version
    raise UnsupportedEngine(
        f"{engine} {version} was not tested with this crossweft, which knows {', '.join(tested)}; use one of these, "
        f"or set {UNTESTED}=1"
    )


def check_contract(theirs: Any, ours: Any, members: Iterable[str]) -> None:
    """That members of one class can be called as those of another. Raises UnsupportedEngine if not.

    Ours must take what theirs take: the same parameters by the same names, and others only if they have defaults.
    """
    for member in members:
        their_member, our_member = getattr(theirs, member, None), getattr(ours, member, None)
        if their_member is None or our_member is None:
            owner = theirs if their_member is None else ours
            raise UnsupportedEngine(f"{owner.__qualname__} has no {member}")
        check_signature(their_member, our_member)


def check_signature(theirs: Any, ours: Any, given: int = 0) -> None:
    """That one function can be called as another is, once its first ``given`` parameters are given.

    Raises UnsupportedEngine if not.
    """
    their_parameters = list(inspect.signature(theirs).parameters.values())
    our_parameters = list(inspect.signature(ours).parameters.values())[given:]
    head, rest = our_parameters[: len(their_parameters)], our_parameters[len(their_parameters) :]
    same = [(each.name, each.kind) for each in head] == [(each.name, each.kind) for each in their_parameters]
    optional = all(
        mine.default is not inspect.Parameter.empty
        for mine, their in zip(head, their_parameters, strict=False)
        if their.default is not inspect.Parameter.empty
    ) and all(each.default is not inspect.Parameter.empty for each in rest)
    if not (same and optional):
        raise UnsupportedEngine(
            f"{theirs.__qualname__}{inspect.signature(theirs)} is not called as {ours.__qualname__}"
            f"{inspect.signature(ours)} is"
        )


def refuse(log: logging.Logger, engine: str, error: Exception) -> None:
    """Says that an engine stays as it is. Engines treat exceptions of plugins differently: one stops at them, one goes
    on."""
    is_told = isinstance(error, (ImportError, UnsupportedEngine, ValueError))
    log.error("crossweft changes nothing in %s: %s", engine, error if is_told else f"{type(error).__name__}: {error}")

"""What plugins have in common: switches, versions, contracts, ranks that must agree."""

from __future__ import annotations

import logging
import os
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import in_processes

import crossweft
from crossweft.engines import _plugin
from crossweft.engines._communicator import EngineCommunicator, Settings, _disagreement
from crossweft.engines._plugin import UnsupportedEngine, asked_for, check_contract, check_signature, check_version

CHOICES = {"1": ("a",), "a": ("a",), "b": ("b",), "all": ("a", "b")}


@pytest.mark.parametrize(
    ("value", "parts"),
    [("", ""), ("0", ""), ("OFF", ""), ("1", "a"), ("a", "a"), (" b , a ", "ab"), ("all", "ab"), ("A", "a")],
)
def test_switches(monkeypatch: pytest.MonkeyPatch, value: str, parts: str) -> None:
    monkeypatch.setenv("SWITCH", value)
    assert asked_for("SWITCH", CHOICES) == frozenset(parts)


def test_a_switch_that_is_not_set_or_says_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWITCH", raising=False)
    assert asked_for("SWITCH", CHOICES) == frozenset()
    monkeypatch.setenv("SWITCH", "a,c")
    with pytest.raises(UnsupportedEngine, match="SWITCH is 'a,c'; give 0, or of 1, a, b, all"):
        asked_for("SWITCH", CHOICES)


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"new": "1.2.4", "same": "1.2.3", "post": "1.2.3.post1", "local": "1.2.3+cu130", "dev": "1.2.30.dev1"}
    monkeypatch.setattr(metadata, "version", lambda name: versions[name])
    for name in ("same", "post", "local"):
        assert check_version(name, ("1.2.3",)) == versions[name]
    for name in ("new", "dev"):
        with pytest.raises(UnsupportedEngine, match=r"knows 1\.2\.3; use one of these"):
            check_version(name, ("1.2.3",))
    monkeypatch.setenv(_plugin.UNTESTED, "1")
    assert check_version("new", ("1.2.3",)) == "1.2.4"


def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(UnsupportedEngine, match="no_such_engine is not installed"):
        check_version("no_such_engine", ("1",))


def test_signatures() -> None:
    def theirs(a: int, b: int = 0) -> None: ...

    def same(a: int, b: int = 1) -> None: ...

    def more(a: int, b: int = 1, c: int = 2) -> None: ...

    def given(first: int, a: int, b: int = 1) -> None: ...

    check_signature(theirs, same)
    check_signature(theirs, more)
    check_signature(theirs, given, given=1)

    def fewer(a: int) -> None: ...

    def renamed(a: int, c: int = 1) -> None: ...

    def needed(a: int, b: int) -> None: ...

    def another(a: int, b: int = 1, *, c: int) -> None: ...

    for ours in (fewer, renamed, needed, another):
        with pytest.raises(UnsupportedEngine, match="is not called as"):
            check_signature(theirs, ours)


def test_a_contract_names_what_is_missing() -> None:
    class Theirs:
        def call(self) -> None: ...

    class Ours: ...

    with pytest.raises(UnsupportedEngine, match="Ours has no call"):
        check_contract(Theirs, Ours, ["call"])
    with pytest.raises(UnsupportedEngine, match="Theirs has no other"):
        check_contract(Theirs, Ours, ["other"])


def test_settings_that_differ_are_named() -> None:
    def settings(**changed: object) -> Settings:
        same: dict[str, object] = {"crossweft": "1", "host": "h", "device": "cpu", "max_bytes": 1, "timeout": 2.0}
        same["dtypes"] = "float16"
        return Settings(**{**same, **changed})  # type: ignore[arg-type]

    assert _disagreement([settings(), settings()]) is None
    assert _disagreement([settings(), settings(max_bytes=5)]) == (
        "max_bytes is 1 on rank 0 and 5 on rank 1; give all ranks the same"
    )
    assert "rank 2 is on another host" in str(_disagreement([settings(), settings(), settings(host="i")]))
    assert _disagreement([settings(), "no number"]) == "rank 1: no number"
    assert _disagreement(["no number", settings()]) == "rank 0: no number"


def _conditions_are_heeded() -> None:
    closed = ["all shut"]
    lines: list[str] = []
    conditions = [lambda: closed[0] if closed else None]
    ours = EngineCommunicator.create(dist.group.WORLD, torch.device("cpu"), "conditions", _log_to(lines), conditions)
    assert ours is not None
    data = torch.full((5,), float(ours.rank + 1))
    assert not ours.should_all_reduce(data) and not ours.should_gather(None, data)
    assert not ours.should_reduce_scatter(data)
    closed.clear()
    assert ours.should_all_reduce(data)
    assert torch.equal(ours.all_reduce(data), torch.full((5,), 3.0))
    # Larger than what all ranks were told.
    assert not ours.should_all_reduce(torch.zeros(1000))
    # As on a GPU, where nothing can be prepared later.
    ours._prepared = (torch.bfloat16,)
    assert ours.why_not(data) == "its elements are of torch.float32, which was not prepared before graphs are captured"
    assert ours.why_not(data.bfloat16()) is None
    ours._prepared = ()
    assert ours.should_gather(None, torch.zeros(64)) and not ours.should_gather(None, torch.zeros(128))
    assert not ours.should_gather(torch.zeros(5), data)
    assert not ours.should_reduce_scatter(data) and ours.should_reduce_scatter(torch.zeros(6, 3))
    refused = {(count.operation, count.reason): count.calls for count in ours.report().refused}
    assert refused[("all_reduce", "all shut")] == 1 and refused[("all_gather", "all shut")] == 1
    assert refused[("all_reduce", "it has more than max_bytes (1000) bytes")] == 1
    assert refused[("reduce_scatter", "its rows are no 2 blocks of one size")] == 1
    assert [each.name for each in crossweft.report()] == ["conditions"]
    asked = 3
    for _ in range(1000 - asked):
        assert ours.should_all_reduce(data)
    ours.close()
    if ours.rank == 0:
        # What it is, the first of each kind, counts after a thousand questions, and in the end.
        assert lines.pop(0).startswith("crossweft is used for conditions: on cpu, for up to 1000 bytes, ready after ")
        assert (
            lines[0]
            == "crossweft, conditions: leaves all-reduces of torch.float32 of about 20 bytes to the engine: all shut"
        )
        assert lines[1].startswith("crossweft, conditions: takes all-reduces of torch.float32 of about 20 bytes, by ")
        assert "about 4000 bytes to the engine: it has more than max_bytes" in lines[2]
        assert [line.partition(",")[0] for line in lines[3:]] == ["crossweft until now"] * 2
        assert "all_reduce refused 1 times: all shut" in lines[3]
    else:
        assert lines == []


def test_conditions_are_heeded_and_refusals_counted(tmp_path: Path) -> None:
    in_processes(2, _conditions_are_heeded, tmp_path, CROSSWEFT_MAX_BYTES="1000")


def _log_to(lines: list[str]) -> logging.Logger:
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("test")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    return log


def _nobody_gets_one() -> None:
    messages: list[str] = []
    log = _log_to(messages)
    rank = dist.get_rank()
    os.environ["CROSSWEFT_MAX_BYTES"] = str(100 + rank)
    assert EngineCommunicator.create(dist.group.WORLD, torch.device("cpu"), "a", log) is None
    os.environ["CROSSWEFT_MAX_BYTES"] = "many" if rank else "100"
    assert EngineCommunicator.create(dist.group.WORLD, torch.device("cpu"), "b", log) is None
    os.environ["CROSSWEFT_MAX_BYTES"] = "100"
    os.environ["CROSSWEFT_DTYPES"] = "bfloat16,tensor"
    assert EngineCommunicator.create(dist.group.WORLD, torch.device("cpu"), "d", log) is None
    del os.environ["CROSSWEFT_DTYPES"]

    class Broken(EngineCommunicator):
        def _get_ready(self, device: torch.device) -> None:
            if self.rank == 1:
                raise MemoryError("no room")

    assert Broken.create(dist.group.WORLD, torch.device("cpu"), "c", log) is None
    assert [message.partition(" is not used for ")[2] for message in messages] == [
        "a, the engine's own collectives are: max_bytes is 100 on rank 0 and 101 on rank 1; give all ranks the same",
        "b, the engine's own collectives are: rank 1: CROSSWEFT_MAX_BYTES is 'many', which is no int above 0; "
        "the usual one is 16777216",
        "d, the engine's own collectives are: rank 0: CROSSWEFT_DTYPES: torch has no type 'tensor'; give such as "
        "bfloat16,float16,float32",
        "c, the engine's own collectives are: rank 1: MemoryError: no room",
    ]

    class Alone(Broken):
        def _get_ready(self, device: torch.device) -> None:
            super()._get_ready(device)
            self.communicator.barrier()

    # Told at once, not when its patience has come to an end.
    assert Alone.create(dist.group.WORLD, torch.device("cpu"), "e", log) is None
    _, _, why = messages[-1].partition(" is not used for e, the engine's own collectives are: rank 0: ")
    assert why.startswith("Aborted: rank 1 aborted the job") and "MemoryError: no room" in why, messages[-1]


def test_a_fault_of_one_rank_leaves_all_to_the_engine(tmp_path: Path) -> None:
    in_processes(2, _nobody_gets_one, tmp_path)

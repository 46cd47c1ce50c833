"""benches/gpu/compare.py, which compares on GPUs: what it writes, on the host beside gloo and of programs that only
print; when it runs what; and how benches/gpu/torch_rivals.py times.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TREE = Path(__file__).resolve().parents[2]
PROGRAMS = [TREE / "target" / profile / "crossweft" for profile in ("release", "debug")]

#: Prints a report as `crossweft bench` does, of two microseconds a call; notes its arguments and crossweft's variables.
CROSSWEFT = """#!{python}
import json, os, sys
words = sys.argv[1:]
variables = {{name: value for name, value in os.environ.items() if name.startswith("CROSSWEFT_")}}
print(json.dumps(["crossweft", words, variables]), file=open({log!r}, "a"))
of = dict(zip(words, words[1:]))
rows, size = [], int(of.get("--min", 1))
while size <= int(of.get("--max", 0)):
    rows.append({{"bytes": size, "wrong": 0, "time_us_p50": 8, "time_us_min": 7}})
    if not {{"--eager", "--device-time"}} & set(words):
        rows[-1] |= {{"graph_us_p50": 2, "graph_us_min": 1}}
    size *= int(of["--factor"])
print(json.dumps({{"version": "0", "chosen": "", "chosen_by": "", "rows": rows}}))
"""
#: As torch on a library.
TORCH = """#!{python}
import json, sys
print(json.dumps(["torch", sys.argv[1:], {{}}]), file=open({log!r}, "a"))
print(json.dumps({{"library": "9", "torch": "2"}}))
times = {{"library": [4, 3]}}
if "--cold" not in sys.argv:
    times |= {{"library, eager": [16, 15], "library, host": [5, 4]}}
print(json.dumps({{"collective": "all-reduce", "bytes": 1024, "times": times}}))
"""
HEAD = '{"library": "9", "torch": "2"}'
LINE = '{"collective": "all-reduce", "bytes": 1024, "times": {"library": [4.0, 3.0]}}'


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def module(name: str) -> ModuleType:
    """A script of the comparison, as a module."""
    spec = importlib.util.spec_from_file_location(name, TREE / f"benches/gpu/{name}.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def command_of(*options: object) -> list[str]:
    return [str(word) for word in (sys.executable, TREE / "benches/gpu/compare.py", *options)]


def compare(*options: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = command_of(*options)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def on_host(tmp_path: Path, **options: object) -> list[object]:
    """Options of a comparison of all-reduce alone, beside nothing."""
    usual: dict[str, object] = {"device": "cpu", "parts": "collectives", "collectives": "all-reduce", "rounds": 1}
    usual |= {"crossweft": "/none/crossweft", "python": "/none/python", "max": 1024, "out": tmp_path / "r"}
    return [word for name, value in (usual | options).items() for word in (f"--{name}", value)]


def test_what_is_measured_is_written_and_what_is_not_is_said(tmp_path: Path) -> None:
    built = [program for program in PROGRAMS if program.is_file()]
    if not built:
        pytest.skip("the program crossweft is not built")
    # The newest: the other may be of long ago.
    program = max(built, key=lambda path: path.stat().st_mtime)
    out = tmp_path / "new" / "r"
    ran = compare(
        *("--device", "cpu", "--crossweft", program, "--min", 1024, "--max", 8192, "--factor", 8, "--rounds", 2),
        *("--parts", "collectives", "primitives", "--collectives", "all-reduce", "send-recv"),
        *("--library", "Other=/none.so", "--out", out),
        CROSSWEFT_TUNING="off",
    )
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.with_suffix(".json").read_text())
    assert len(record["rounds"]) == 2
    for one in record["rounds"]:
        assert set(one) == {"all-reduce", "send-recv"}
        for times in one.values():
            assert set(times) == {"crossweft", "gloo"}
            for by_size in times.values():
                assert set(by_size) == {"1024", "8192"}
                assert all(0 < least <= median for median, least in by_size.values())
    assert record["absent"] == {"Other": "its file is not there", "primitives": "they are measured on GPUs"}
    assert record["doctor"].strip() and set(record["libraries"]) == {"gloo"}
    # As of a user who has set nothing and measured nothing.
    chosen_by = {name: chosen["chosen_by"] for name, chosen in record["chosen"].items()}
    assert set(chosen_by) == {"all-reduce", "send-recv"} and "no cache folder" in chosen_by["all-reduce"]
    table = out.with_suffix(".md").read_text()
    assert table == ran.stdout.rstrip("\n") + "\n"
    assert "| size | crossweft | gloo | gloo / crossweft |" in table and "| 8 KiB | " in table
    assert "## send-recv, one call, host's clock" in table
    assert "Absent: Other (its file is not there)." in table
    for name in ("all-reduce", "send-recv"):
        assert "gloo" in out.with_name(f"r-{name}.svg").read_text()


def test_wrong_results_are_an_exit_status_and_in_no_table(tmp_path: Path) -> None:
    report: dict[str, Any] = {"version": "0", "chosen": "", "chosen_by": "", "rows": []}
    for size, wrong in ((1024, 0), (2048, 3)):
        report["rows"].append({"bytes": size, "time_us_p50": 2.0, "time_us_min": 1.0, "wrong": wrong})
    program = script(tmp_path / "crossweft", f"#!/bin/sh\necho '{json.dumps(report)}'\nexit 1\n")
    # No library beside it.
    ran = compare(*on_host(tmp_path, crossweft=program, collectives="broadcast"))
    assert ran.returncode == 1, ran.stderr
    assert "crossweft: 3 wrong elements" in ran.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rounds"][0]["broadcast"] == {"crossweft": {"1024": [2.0, 1.0]}}
    assert record["absent"]["broadcast of 2048 B"] == "3 wrong elements"
    assert "| 1 KiB | 2.00 |" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("echo 'RuntimeError: it broke' >&2; exit 3", "ended with 3: RuntimeError: it broke"),
        ("sleep 60", "did not end in"),
    ],
)
def test_what_a_program_had_printed_counts_when_it_fails_or_hangs(tmp_path: Path, end: str, why: str) -> None:
    # The last line is cut off.
    printed = f"#!/bin/sh\necho '{HEAD}'\necho 'NCCL version 9'\necho '{LINE}'\necho '{LINE[:40]}'\n{end}\n"
    python = script(tmp_path / "python", printed)
    start = time.monotonic()
    ran = compare(*on_host(tmp_path, python=python, budget=6))
    assert ran.returncode == 0, ran.stderr
    assert time.monotonic() - start < 40
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rounds"][0]["all-reduce"] == {"gloo": {"1024": [4.0, 3.0]}}
    assert why in record["absent"]["gloo, 1 KiB, round 1"]
    # Ours is not there: it is a table without ratios.
    assert "| size | gloo |\n" in (tmp_path / "r.md").read_text()


def test_what_the_budget_leaves_out_is_named_and_the_rest_is_written(tmp_path: Path) -> None:
    report = {"version": "0", "chosen": "", "chosen_by": "", "rows": []}
    report["rows"] = [{"bytes": 1024, "time_us_p50": 2.0, "time_us_min": 1.0, "wrong": 0}]
    program = script(tmp_path / "crossweft", f"#!/bin/sh\nsleep 1.5\necho '{json.dumps(report)}'\n")
    ran = compare(*on_host(tmp_path, crossweft=program, rounds=9, budget=6))
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rounds"][0]["all-reduce"] == {"crossweft": {"1024": [2.0, 1.0]}}
    [late] = [what for what, why in record["absent"].items() if why == "the 6 s of --budget were over"]
    assert late.endswith("; gloo, 1 KiB, round 9; all-reduce, crossweft, 1 KiB, round 9")
    assert "| 1 KiB | 2.00 |" in (tmp_path / "r.md").read_text() and (tmp_path / "r-all-reduce.svg").is_file()
    # Who sees it run sees how far it is.
    assert "s left] all-reduce, crossweft, 1 KiB, round 1" in ran.stderr


def test_files_survive_a_kill(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f"#!/bin/sh\necho '{HEAD}'\necho '{LINE}'\n")
    program = script(tmp_path / "crossweft", "#!/bin/sh\n[ $1 = doctor ] || { touch $0.began; exec sleep 30; }\n")
    command = command_of(*on_host(tmp_path, crossweft=program, python=python))
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "crossweft.began").exists() and time.monotonic() < until:
        time.sleep(0.05)
    running.kill()
    assert running.wait(10) == -signal.SIGKILL
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rounds"][0]["all-reduce"] == {"gloo": {"1024": [4.0, 3.0]}}
    assert "| 1 KiB | 4.00 |" in (tmp_path / "r.md").read_text()


def test_small_sizes_of_everything_come_before_large_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    names = {"python": sys.executable, "log": str(log)}
    ran = compare(
        *("--crossweft", script(tmp_path / "crossweft", CROSSWEFT.format(**names))),
        *("--python", script(tmp_path / "python", TORCH.format(**names)), "--out", tmp_path / "r"),
        *("--collectives", "all-reduce", "send-recv"),
        CROSSWEFT_TUNING="off",
        CROSSWEFT_PLANS="/none",
    )
    assert ran.returncode == 0, ran.stderr
    order = []
    for line in log.read_text().splitlines():
        who, words, variables = json.loads(line)
        assert who == "torch" or variables == {"CROSSWEFT_CACHE_DIR": ""}
        of = dict(zip(words, words[1:], strict=False))
        what = [who if who == "torch" else " ".join(words[:2]).removeprefix("bench ")]
        for option in ("--max", "--blocks", "--tokens", "--rotate"):
            what += [f"{option[2:]} {of[option]}"] if option in of else []
        order.append(" ".join([*what, *({"--eager", "--cold", "--symmetric", "--executor"} & set(words))]))
    least, most, middle, large = "max 1048576", "max 16777216", "max 268435456", "max 1073741824"

    def round_of(size: str) -> list[str]:
        return [f"torch {size} --symmetric", f"all-reduce {size}", f"send-recv {size} --eager"]

    variants = {
        f"all-reduce {least} rotate 916",
        f"all-reduce {most} rotate 15",
        f"all-reduce {most} --executor",
    }
    assert order[0].startswith("doctor")
    assert order[1:7] == 2 * round_of(most)
    assert order[7].startswith(f"torch {most}") and "--cold" in order[7] and "--symmetric" in order[7]
    assert set(order[8:11]) == variants
    assert order[11].startswith("primitives")
    tokens = {"1": 64, "8,32,128": 132, "4096": 132}
    assert order[12:15] == [f"moe blocks {blocks} tokens {count}" for count, blocks in tokens.items()]
    assert order[15:27] == 2 * round_of(middle) + 2 * round_of(large)
    assert order[27].startswith(f"torch {most}") and set(order[28:]) == variants

    record = json.loads((tmp_path / "r.json").read_text())
    assert set(record["moe"]) >= {"ll-rank-major, 1 tokens, 64 blocks", "ht-flat, 4096 tokens, 132 blocks"}
    assert record["cold_pairs"] == {
        "all-reduce": {**dict.fromkeys(("64 KiB", "256 KiB", "1 MiB"), 916), "4 MiB": 15, "16 MiB": 15}
    }
    assert "all-reduce, cold, 1 KiB to 16 KiB" in record["absent"]
    assert "cold and executor, more than 16 MiB" in record["absent"]
    assert record["timed"] == {"all-reduce": "in a CUDA graph", "send-recv": "one call, host's clock"}
    head, _, row = (tmp_path / "r.md").read_text().splitlines()[2:5]
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    # Of two microseconds and four in graphs, of eight and sixteen one by one. What takes the host is not compared.
    assert (cells["NCCL / crossweft"], cells["NCCL, eager / crossweft, eager"]) == ("2.00", "2.00")
    assert cells["NCCL, host"] == "5.00" and "NCCL, host /" not in head


def test_who_was_measured_in_one_round_stays(tmp_path: Path) -> None:
    module_ = module("compare")
    options = argparse.Namespace(device="cuda", collectives=["all-reduce"], rounds=2, ranks=2, library=[])
    vars(options).update(own_library=None, min=1024, max=4096, factor=4, out=str(tmp_path / "r"))
    comparison = module_.Comparison(options)
    first, second = (one["all-reduce"] for one in comparison.record["rounds"])
    first |= {"crossweft": {1024: [2.0, 1.0], 4096: [3.0, 1.0]}, "NCCL": {1024: [5.0, 4.0], 4096: [9.0, 1.0]}}
    # It was much slower then, and so may NCCL have been.
    second |= {"crossweft": {1024: [10.0, 1.0]}, "torch symmetric one-shot": {1024: [30.0, 4.0]}}
    comparison.write()
    lines = (tmp_path / "r.md").read_text().splitlines()
    assert lines[2].endswith("| NCCL / crossweft | torch symmetric one-shot / crossweft |")
    assert lines[4:6] == ["| 1 KiB | 6.00 | 5.00 | 30.00 | 2.50 | 3.00 |", "| 4 KiB | 3.00 | 9.00 | - | 3.00 | - |"]
    picture = (tmp_path / "r-all-reduce.svg").read_text()
    assert "NCCL" in picture and "one-shot" in picture


def test_cold_buffers_are_more_than_caches_hold() -> None:
    compare_ = module("compare")
    pairs, cold = compare_.pairs, 120_000_000
    # What the rank touches that touches least: of a pair of 1 MiB.
    touched = {"all-reduce": 2, "all-to-all": 2, "all-gather": 1.5, "reduce-scatter": 1.5, "broadcast": 1, "reduce": 1}
    touched |= {"gather": 0.5, "scatter": 0.5}
    for name, share in touched.items():
        together = pairs(name, 1 << 20, 2) * share * (1 << 20)
        assert cold <= together < cold + share * (1 << 20), name
    assert pairs("all-reduce", 1 << 20, 2, in_place=True) in (2 * pairs("all-reduce", 1 << 20, 2) - n for n in (0, 1))
    assert pairs("all-reduce", 1 << 28, 2) == 2
    sizes = [1 << shift for shift in range(10, 25, 2)]
    programs, too_small = compare_.cold_programs("all-reduce", sizes, 2)
    assert too_small == sizes[:3]
    assert programs == [(916, sizes[3:6]), (15, sizes[6:])]


class Captured:
    """torch.cuda, which notes what is called, and where: in a graph, or outside."""

    def __init__(self, *, external: bool) -> None:
        self.notes: list[str] = []
        self.capturing = False
        known = {"enable_timing", "external"} if external else {"enable_timing"}

        def event(**options: bool) -> Any:
            if unknown := set(options) - known:
                raise TypeError(f"unexpected {unknown}")
            return SimpleNamespace(record=lambda _: self.note("event"), elapsed_time=lambda _: 1.0)

        @contextlib.contextmanager
        def graph(_: object, stream: object) -> Any:
            self.capturing = True
            yield
            self.capturing = False

        self.Event, self.graph, self.Stream, self.synchronize = event, graph, object, lambda: None
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: self.note("replay"))

    def note(self, what: str) -> None:
        self.notes.append(f"{what} in the graph" if self.capturing else what)


@pytest.mark.parametrize("external", [True, False])
def test_rivals_are_timed_inside_the_graph_where_torch_can(monkeypatch: pytest.MonkeyPatch, external: bool) -> None:
    rivals = module("torch_rivals")
    cuda = Captured(external=external)
    monkeypatch.setattr(rivals.torch, "cuda", cuda)
    monkeypatch.setattr(rivals.torch, "zeros", lambda *_, **__: SimpleNamespace(add_=lambda _: None))
    assert bool(rivals.no_events_in_graphs()) is not external
    cuda.notes.clear()
    calls = [lambda: cuda.note("first"), lambda: cuda.note("second")]
    replay, _, _ = rivals.recorded(calls, 4, object())
    replay()
    inside = ["first", "event", "first", "second", "first", "second", "event"]
    if external:
        assert cuda.notes == [*(f"{what} in the graph" for what in inside), "replay"]
    else:
        assert cuda.notes == [*(f"{what} in the graph" for what in inside[2:6]), "first", "event", "replay", "event"]


def test_libraries_are_timed_one_call_at_a_time_and_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = module("torch_rivals")
    monkeypatch.setattr(rivals.dist, "get_world_size", lambda: 2)
    made: list[str] = []
    monkeypatch.setattr(rivals, "call_of", lambda name, *_: made.append(name))
    monkeypatch.setattr(rivals, "in_graph", lambda *_: (1, 1))
    monkeypatch.setattr(rivals, "one_by_one", lambda *_: (2, 2))
    monkeypatch.setattr(rivals, "on_the_host", lambda *_: (3, 3))

    def what(name: str, size: int, cold: bool = False) -> dict[str, Any]:
        made.clear()
        bytes_, found = rivals.measured(name, size, SimpleNamespace(device="cuda", cold=cold))
        assert bytes_ == size
        return dict(found)

    alike = {"library": (1, 1), "library, eager": (2, 2)}
    assert what("all-gather", 1024) == alike | {"library, host": (3, 3)} and len(made) == 1
    assert what("broadcast", 4 << 20) == alike
    assert what("send-recv", 1024) == {"library": (2, 2)}
    # In place, of as many bytes as two buffers have.
    assert what("all-reduce", 1 << 20, cold=True) == {"library": (1, 1)} and len(made) == 115

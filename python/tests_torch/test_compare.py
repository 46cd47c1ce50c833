"""benches/gpu/compare.py, which compares on GPUs, on the host beside gloo: what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
PROGRAMS = [TREE / "target" / profile / "crossweft" for profile in ("release", "debug")]


def test_what_is_measured_is_written_and_what_is_not_is_said(tmp_path: Path) -> None:
    built = [program for program in PROGRAMS if program.is_file()]
    if not built:
        pytest.skip("the program crossweft is not built")
    # The newest: the other may be of long ago.
    program = max(built, key=lambda path: path.stat().st_mtime)
    command = [sys.executable, TREE / "benches/gpu/compare.py", "--device", "cpu", "--crossweft", program]
    command += [
        "--min",
        "1024",
        "--max",
        "8192",
        "--factor",
        "8",
        "--rounds",
        "2",
        "--parts",
        "collectives",
        "primitives",
    ]
    command += [
        "--collectives",
        "all-reduce",
        "send-recv",
        "--library",
        "Other=/none.so",
        "--out",
        tmp_path / "new" / "r",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "new" / "r.json").read_text())
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
    assert set(record["chosen"]) == {"all-reduce", "send-recv"}
    table = (tmp_path / "new" / "r.md").read_text()
    assert table == ran.stdout.rstrip("\n") + "\n"
    assert "| size | crossweft | gloo | gloo / crossweft |" in table and "| 8 KiB | " in table
    assert "Absent: Other (its file is not there)." in table
    for name in ("all-reduce", "send-recv"):
        assert "gloo" in (tmp_path / "new" / f"r-{name}.svg").read_text()


def test_wrong_results_are_an_exit_status_and_in_no_table(tmp_path: Path) -> None:
    report = {"version": "0", "chosen": "", "chosen_by": "", "rows": []}
    for size, wrong in ((1024, 0), (2048, 3)):
        report["rows"].append({"bytes": size, "time_us_p50": 2.0, "time_us_min": 1.0, "wrong": wrong})
    program = tmp_path / "crossweft"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(report)}'\nexit 1\n")
    program.chmod(0o755)
    command = [
        sys.executable,
        TREE / "benches/gpu/compare.py",
        "--device",
        "cpu",
        "--crossweft",
        program,
        "--rounds",
        "1",
    ]
    # No library beside it.
    command += [
        "--python",
        "/none/python",
        "--collectives",
        "broadcast",
        "--parts",
        "collectives",
        "--out",
        tmp_path / "r",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "crossweft: 3 wrong elements" in ran.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rounds"][0]["broadcast"] == {"crossweft": {"1024": [2.0, 1.0]}}
    assert record["absent"]["broadcast of 2048 B"] == "3 wrong elements"
    assert "| 1 KiB | 2.00 |" in (tmp_path / "r.md").read_text()

"""``python -m crossweft.bench.all_reduce`` as a command, and that it would notice wrong results."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from crossweft.bench import all_reduce
from crossweft.bench._clock import Times
from crossweft.bench._columns import (
    Call,
    Case,
    Column,
    CrossweftFusedNorm,
    LeftOut,
    Machine,
    Reference,
    TorchEager,
    check,
    make,
)
from crossweft.bench._nccl import NcclError, crossweft_library
from crossweft.bench._tables import Results, Row, size
from crossweft.torch import AllReduceCommunicator

QUICK = ["--rounds", "1", "--device", "cpu"]
COLUMNS = (
    "torch eager",
    "crossweft eager",
    "torch, then RMSNorm",
    "crossweft, then RMSNorm",
    "crossweft with RMSNorm fused",
)


def bench(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *launcher, *(["-m"] if launcher else []), all_reduce.MODULE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_run_of_its_own_processes(tmp_path: Path) -> None:
    plot, trace, record = (tmp_path / name for name in ("out.svg", "trace.json", "out.json"))
    files = ["--plot", str(plot), "--profile", str(trace), "--json", str(record)]
    done = bench("--ranks", "2", "--min", "1K", "--max", "16K", "--factor", "16", *QUICK, *files)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "[1/2] 1 KiB: correctness check PASS!" in lines and "[2/2] 16 KiB: correctness check PASS!" in lines
    head = next(line for line in lines if line.startswith("| size |"))
    assert set(COLUMNS) <= {name.strip() for name in head.split("|")}
    assert any(line.startswith("| 16 KiB |") for line in lines)
    assert "* crossweft graph: CUDA graphs need a CUDA device" in lines
    results = json.loads(record.read_text())
    assert [row["bytes"] for row in results["rows"]] == [1024, 16384]
    for row in results["rows"]:
        assert row["correct"] and set(COLUMNS) <= set(row["columns"])
        assert all(0 < each["min"] <= each["p50"] for each in row["columns"].values())
    drawn = xml.etree.ElementTree.fromstring(plot.read_text())
    assert len([each for each in drawn.iter() if each.tag.endswith("polyline")]) == len(results["rows"][0]["columns"])
    events = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"torch eager, 1 KiB", "crossweft eager, 16 KiB"} <= events


def test_a_run_under_torchrun_whose_output_is_json() -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = ["--bind", "--model", "--tokens", "1,3", "--hidden", "640", "--dtype", "float32", "--json", "-"]
    done = bench(*arguments, *QUICK, launcher=launcher)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [(row["tokens"], row["hidden"], row["bytes"]) for row in results["rows"]] == [(1, 640, 2560), (3, 640, 7680)]
    assert results["ranks"] == 2 and results["dtype"] == "float32"
    assert done.stderr.count("correctness check PASS!") == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_all_of_this_package_is_right(tmp_path: Path) -> None:
    record = tmp_path / "out.json"
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    sizes = ["--min", "1K", "--max", "1M", "--factor", "32"]
    done = bench("--", *sizes, "--device", "cuda", "--rounds", "1", "--json", str(record), launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("correctness check PASS!") == 3
    graphs = ("crossweft graph", "crossweft graph, symmetric")
    for row in json.loads(record.read_text())["rows"]:
        ours = {*graphs, *(name for name in COLUMNS if name.startswith("crossweft"))}
        assert row["correct"] and ours <= set(row["columns"]), row


def test_a_rank_that_fails_ends_the_run() -> None:
    done = bench("--ranks", "2", *QUICK, "--max", "1K", "--json", "/dev/full")
    assert done.returncode != 0
    assert "No space left on device" in done.stderr


def test_a_reader_that_closes_early_is_no_error() -> None:
    command = [sys.executable, "-m", all_reduce.MODULE, "--ranks", "2", *QUICK, "--max", "1K"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        error = process.stderr.read()
        assert process.wait(300) == 0, error


def test_columns_by_nccls_interface(tmp_path: Path) -> None:
    target = Path(__file__).parents[2] / "target"
    built = [target / profile / "libcrossweft_nccl.so" for profile in ("release", "debug")]
    library = next((path for path in built if path.is_file()), None)
    if library is None:
        pytest.skip("libcrossweft_nccl.so has not been built: cargo build -p crossweft-nccl")
    record = tmp_path / "out.json"
    arguments = ["--ranks", "2", "--min", "1000", "--max", "10000", "--factor", "10", "--dtype", "float16"]
    done = bench(*arguments, *QUICK, "--nccl-library", str(library), "--json", str(record))
    assert done.returncode == 0, done.stderr
    for row in json.loads(record.read_text())["rows"]:
        assert row["correct"]
        assert {"crossweft by NCCL's interface", "crossweft by NCCL's interface, registered"} <= set(row["columns"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--min", "0"], "0 is less than 1"),
        (["--min", "1X"], "'1X' is no number"),
        (["--min", "4K", "--max", "1K"], "--min 4096 is larger than --max 1024"),
        (["--timeout", "-5"], "'-5' is no number of seconds"),
        (["--timeout", "nan"], "'nan' is no number of seconds"),
        (["--json", "/no/such/folder/out.json"], "--json /no/such/folder/out.json: there is no such folder"),
        (["--plot", "/usr"], "--plot /usr: it is a folder"),
        (["--profile", "/proc/version/trace.json"], "there is no such folder"),
        (["--factor", "1"], "1 is less than 2"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--tokens", "1,x"], "--tokens"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit) as stopped:
        all_reduce.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_sizes() -> None:
    parse = all_reduce._parser().parse_args
    default = all_reduce.cases(parse([]))
    assert [case.nbytes for case in default] == [1 << power for power in range(10, 21)]
    assert (default[-1].tokens, default[-1].hidden) == (128, 4096) and default[0].shape == (1, 512)
    model = all_reduce.cases(parse(["--model"]))
    sizes = {size(case.nbytes) for case in model}
    assert {"8 KiB", "10 KiB", "14 KiB", "112 KiB", "1.25 MiB", "4 MiB", "64 MiB", "112 MiB", "128 MiB"} <= sizes
    assert len(model) == 5 * 7
    odd = all_reduce.cases(parse(["--min", "7", "--max", "7M", "--factor", "1000", "--dtype", "float32"]))
    assert [case.shape for case in odd] == [(1, 1), (1, 1750), (1, 1750000)]


def test_tables() -> None:
    case = Case(3, 5, torch.float32)
    row = Row(case, {"a": Times(1.25, 0.5)}, ["a"])
    results = Results(4, "cpu", "float32", ["a", "b"], {"c": "no reason"}, [row], by_tokens=True)
    assert results.markdown() == (
        "4 ranks on cpu, float32: p50 (min) of the slowest rank, microseconds\n\n"
        "| tokens x hidden | size | a | b |\n|---:|---:|---:|---:|\n| 3 x 5 | 60 B | 1.25 (0.5) |  |\n\n"
        "Left out:\n\n* c: no reason\n"
    )
    [record] = results.record()["rows"]
    assert record == {
        "bytes": 60,
        "tokens": 3,
        "hidden": 5,
        "correct": False,
        "columns": {"a": {"p50": 1.25, "min": 0.5}},
    }
    # One point, and none.
    xml.etree.ElementTree.fromstring(results.svg())
    xml.etree.ElementTree.fromstring(Results(4, "cpu", "float32", [], {}, [], by_tokens=False).svg())


def test_the_library_is_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NcclError, match="there is no /no/such"):
        crossweft_library("/no/such")
    (tmp_path / "one.so").touch()
    monkeypatch.setenv("CROSSWEFT_NCCL_LIBRARY", str(tmp_path / "one.so"))
    assert crossweft_library() == str(tmp_path / "one.so")


class _Wrong(Column):
    """Changes nothing."""

    name = "wrong"

    def bind(self, case: Case) -> Call | None:
        return self._in_place(case, lambda tensor: None)


class _WrongOnOneRank(_Wrong):
    name = "wrong on one rank"

    def bind(self, case: Case) -> Call | None:
        return self._in_place(case, lambda tensor: (dist.all_reduce(tensor), tensor[-1, -1:].add_(dist.get_rank())))


class _WrongNorm(CrossweftFusedNorm):
    name = "wrong norm"

    def _normalise(self, buffer: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super()._normalise(buffer, residual.zero_(), weight)


class _NotOnOneRank(TorchEager):
    name = "not on one rank"

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        if dist.get_rank() == 1:
            raise LeftOut("rank 1 has none")


def _notices(rank: int, store: str) -> None:
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    machine = Machine(torch.device("cpu"), AllReduceCommunicator(timeout=120), None)
    kinds = (TorchEager, CrossweftFusedNorm, _Wrong, _WrongOnOneRank, _WrongNorm, _NotOnOneRank)
    columns, left_out = make(machine, kinds)
    assert left_out == {"not on one rank": "rank 1 has none"}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = Case(3, 40, dtype)
        verdicts = {}
        for column in columns:
            call = column.bind(case)
            assert call is not None
            verdicts[column.name] = check(column, Reference(case, machine.device), call)
        assert verdicts == {
            "torch eager": True,
            "crossweft with RMSNorm fused": True,
            "wrong": False,
            "wrong on one rank": False,
            "wrong norm": False,
        }
    machine.ours.close()
    dist.destroy_process_group()


def test_wrong_results_are_noticed(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_notices, (str(tmp_path / "store"),), nprocs=2)

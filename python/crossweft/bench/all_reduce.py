"""All-reduce of crossweft, torch and NCCL on the same tensors, alone and before RMS normalisation.

    python -m crossweft.bench.all_reduce --ranks 2
    torchrun --nproc-per-node 8 -m crossweft.bench.all_reduce --model

Times are those of the slowest rank, microseconds: median and least over rounds in which the columns take turns. What
calls read is written anew before each of them, or, on GPUs, before each batch, whose calls take turns on several
tensors. Every result is compared with torch's before anything is timed; the exit code is 1 if one was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..torch import AllReduceCommunicator
from . import _job
from ._clock import Clock, times_of
from ._columns import Call, Case, Column, Machine, Reference, check, make
from ._tables import Results, Row, size

MODULE = "crossweft.bench.all_reduce"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: Hidden sizes of current models, tokens of a decoding step, and of a prefill.
HIDDEN = (4096, 5120, 6144, 7168, 8192)
DECODE = (1, 8, 32, 64, 128, 256)
PREFILL = 8192
#: Tensors that a GPU's calls take turns on.
ROTATION = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; give --device cpu")
    if not cases(options):
        parser.error(f"--min {options.min} is larger than --max {options.max}")
    for name in ("json", "plot", "profile"):
        _check_file(parser, name, getattr(options, name))
    if not _job.is_rank():
        ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
        return _job.start(MODULE, given, ranks, options.timeout)
    if options.bind:
        _job.bind()
    device = _job.join(options.device)
    try:
        return _Run(options, device).all()
    finally:
        dist.destroy_process_group()


def cases(options: argparse.Namespace) -> list[Case]:
    """What is measured, in order of size."""
    dtype = _DTYPES[options.dtype]
    if options.model:
        shapes = [(tokens, hidden) for hidden in options.hidden or HIDDEN for tokens in options.tokens]
        return sorted((Case(*shape, dtype) for shape in shapes), key=lambda case: case.nbytes)
    hidden = (options.hidden or HIDDEN)[0]
    chosen, nbytes = [], options.min
    while nbytes <= options.max:
        count = max(nbytes // dtype.itemsize, 1)
        tokens = count // hidden if count % hidden == 0 else 1
        chosen.append(Case(tokens, count // tokens, dtype))
        nbytes *= options.factor
    return chosen


class _Run:
    """One rank's part of a run."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options = options
        self._cases = cases(options)
        most = max((case.nbytes for case in self._cases), default=1)
        ours = AllReduceCommunicator(device=device, max_bytes=max(most, 1 << 20), name="benchmark")
        shared = device.type == "cuda" and _job.share_devices()
        self._machine = Machine(device, ours, options.nccl_library, shared)
        self._clock = Clock(self._machine)
        # The table alone goes to standard output if something reads it there.
        self._log: TextIO = sys.stderr if options.json == "-" else sys.stdout

    def all(self) -> int:
        """Measures everything and writes what was asked for."""
        columns, left_out = make(self._machine)
        for name, reason in left_out.items():
            self._say(f"left out: {name}: {reason}")
        if self._machine.shared:
            self._say("ranks share a GPU: results are checked, but times are those of taking turns on it")
        rows = []
        for number, case in enumerate(self._cases, 1):
            rows.append(self._row(f"[{number}/{len(self._cases)}] {size(case.nbytes)}", case, columns))
        results = Results(
            ranks=dist.get_world_size(),
            device=str(self._machine.device.type),
            dtype=self._options.dtype,
            columns=[column.name for column in columns],
            left_out=left_out,
            rows=rows,
            by_tokens=self._options.model,
        )
        if self._options.profile:
            self._profile(columns)
        for column in columns:
            column.close()
        self._machine.ours.close()
        if dist.get_rank() == 0:
            self._write(results)
        return int(any(row.wrong for row in rows))

    def _row(self, label: str, case: Case, columns: list[Column]) -> Row:
        calls = {column: self._bind(column, case) for column in columns}
        bound = [column for column in columns if calls[column]]
        reference = Reference(case, self._machine.device)
        wrong = [column.name for column in bound if not check(column, reference, calls[column][0])]
        if wrong:
            self._say(f"{label}: correctness check FAIL: {', '.join(wrong)}")
        else:
            self._say(f"{label}: correctness check PASS!")
        samples: dict[str, list[float]] = {column.name: [] for column in bound}
        for turn in range(self._options.rounds):
            # Each is first once.
            first = turn % max(len(bound), 1)
            for column in bound[first:] + bound[:first]:
                times = self._clock.measure(column, calls[column], case)
                samples[column.name] += self._clock.slowest(times)
        for column in bound:
            column.release()
        return Row(case, {name: times_of(times) for name, times in samples.items()}, wrong)

    def _bind(self, column: Column, case: Case) -> list[Call]:
        """The call for a case; on a GPU several, on tensors of their own."""
        first = column.bind(case)
        if first is None:
            return []
        others = ROTATION - 1 if self._machine.device.type == "cuda" else 0
        return [first, *filter(None, (column.bind(case) for _ in range(others)))]

    def _profile(self, columns: list[Column]) -> None:
        """A trace of rank 0: every column, a few calls of every case."""
        self._say(f"profile: {self._options.profile}")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._machine.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        is_first = dist.get_rank() == 0
        profile: Any = torch.profiler.profile(activities=activities) if is_first else nullcontext()
        with profile:
            for case in self._cases:
                for column in columns:
                    for call in self._bind(column, case)[:1]:
                        for turn in range(3):
                            call.refresh(turn)
                            self._clock.line_up()
                            with torch.profiler.record_function(f"{column.name}, {size(case.nbytes)}"):
                                call.run()
                    column.release()
            if self._machine.device.type == "cuda":
                torch.cuda.synchronize()
        if is_first:
            profile.export_chrome_trace(self._options.profile)

    def _write(self, results: Results) -> None:
        self._print(json.dumps(results.record(), indent=1) if self._options.json == "-" else results.markdown())
        if self._options.json and self._options.json != "-":
            Path(self._options.json).write_text(json.dumps(results.record(), indent=1) + "\n")
        if self._options.plot:
            Path(self._options.plot).write_text(results.svg())

    def _say(self, line: str) -> None:
        if dist.get_rank() == 0:
            self._print(line, self._log)

    @staticmethod
    def _print(text: str, to: TextIO | None = None) -> None:
        to = sys.stdout if to is None else to
        try:
            print(text, file=to, flush=True)
        except BrokenPipeError:
            # A reader that closed early has seen enough; what is left in the buffer must go somewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), to.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=_positive, help="start so many processes; not under a launcher")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="bfloat16")
    parser.add_argument("--min", type=_bytes, default=1 << 10, metavar="BYTES", help="smallest message (1 KiB)")
    parser.add_argument("--max", type=_bytes, default=1 << 20, metavar="BYTES", help="largest message (1 MiB)")
    parser.add_argument("--factor", type=_factor, default=2, help="from one size to the next (2)")
    parser.add_argument(
        "--model", action="store_true", help="messages of models: tokens x hidden, instead of --min, --max"
    )
    parser.add_argument("--hidden", type=_numbers, metavar="N,N", help="hidden sizes (4096 to 8192)")
    parser.add_argument(
        "--tokens", type=_numbers, default=(*DECODE, PREFILL), metavar="N,N", help="for --model (1 to 256, and 8192)"
    )
    parser.add_argument("--rounds", type=_positive, default=5, help="how often the columns take turns (5)")
    parser.add_argument("--bind", action="store_true", help="give each rank a processor of its own")
    parser.add_argument("--nccl-library", metavar="PATH", help="libcrossweft_nccl.so, if it is not found by itself")
    parser.add_argument("--json", metavar="FILE", help="write all figures; - for standard output instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="draw medians by size as SVG")
    parser.add_argument("--profile", metavar="FILE", help="write a Chrome trace of a few calls on rank 0")
    parser.add_argument("--timeout", type=_seconds, default=1800.0, metavar="SECONDS", help="for --ranks (1800)")
    return parser


def _check_file(parser: argparse.ArgumentParser, option: str, name: str | None) -> None:
    """Ends the command if no such file can be written, before anything is measured for it."""
    if name is None or (option, name) == ("json", "-"):
        return
    path = Path(name)
    if path.is_dir():
        parser.error(f"--{option} {name}: it is a folder; name a file")
    if not path.parent.is_dir():
        parser.error(f"--{option} {name}: there is no such folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        parser.error(f"--{option} {name}: it cannot be written")


def _number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def _positive(text: str) -> int:
    return _number(text, 1)


def _factor(text: str) -> int:
    return _number(text, 2)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _bytes(text: str) -> int:
    for suffix, unit in (("K", 1 << 10), ("M", 1 << 20), ("G", 1 << 30)):
        if text.upper().endswith(suffix):
            return _positive(text[:-1]) * unit
    return _positive(text)


if __name__ == "__main__":
    sys.exit(main())

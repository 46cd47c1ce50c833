#!/usr/bin/env python3
"""Compares `crossweft bench` of a collective (all-reduce by default) with what else is on this machine, in interleaved rounds.

Needs only Python. Rivals are given by path, and left out where they are not:

  cargo build --release
  python3 benches/compare/compare.py \
      --mpi "Open MPI=/path/to/venv/bin" --mpi "MPICH=/other/venv/bin" \
      --torch /path/to/python --out docs/results/cpu

Writes OUT.json (every figure, and the machine), OUT.md (the table) and OUT.svg (the plot). A table entry
is the median over the rounds of each round's median call, in microseconds. A ratio is the median over the
rounds of each round's own ratio: cores may move between rounds, which then changes both sides of it.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from report import BENCH, OURS, bytes_of, last_json, medians, plot, run, table  # noqa: E402, it lies beside this folder


def contenders(options, folder):
    """Name -> function that runs one round and returns its report."""
    sizes = [str(options.min), str(options.max), str(options.factor)]
    crossweft = [
        options.crossweft, "bench", options.collective, "--format", "json",
        "--ranks", str(options.ranks), "--min", sizes[0], "--max", sizes[1], "--factor", sizes[2],
    ]  # fmt: skip
    found = {
        OURS: lambda: last_json(run(crossweft, fine=BENCH)),
        f"{OURS}, private buffers": lambda: last_json(run([*crossweft, "--buffers", "private"], fine=BENCH)),
    }
    for entry in options.mpi:
        name, _, path = entry.partition("=")
        bin_folder = pathlib.Path(path)
        program = folder / f"mpi_collectives_{len(found)}"
        environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
        if "intel" in name.lower():
            # Its wheel does not know where it was installed.
            environment["I_MPI_ROOT"] = str(bin_folder.parent)
            environment["LD_LIBRARY_PATH"] = str(bin_folder.parent / "lib")
        try:
            source = HERE / "mpi_collectives.c"
            run([bin_folder / "mpicc", "-O2", "-o", program, source], environment)
        except (RuntimeError, OSError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        command = [bin_folder / "mpirun", "-n", str(options.ranks)]
        if "open" in name.lower():
            # Binding to cores is its default for two ranks; the rest is needed in containers.
            command += ["--oversubscribe"]
            if os.geteuid() == 0:
                command += ["--allow-run-as-root"]
        command += [program, options.collective, *sizes, "0"]
        found[name] = lambda c=command, e=environment: last_json(run(c, e))
    if options.torch and options.collective == "all-reduce":
        for backend in ("gloo", "deepspeed") if options.deepspeed else ("gloo",):
            command = [
                options.torch, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks),
                HERE / "torch_allreduce.py", backend, *sizes,
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            found[backend] = lambda c=command, e=environment: last_json(run(c, e))
    return found


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


# How often a measurement is repeated because the cores moved meanwhile.
TRIES = 6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--crossweft", default=str(HERE.parents[1] / "target/release/crossweft"))
    parser.add_argument("--mpi", action="append", default=[], metavar="NAME=BIN_FOLDER")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch: adds gloo")
    parser.add_argument("--deepspeed", action="store_true", help="that Python has DeepSpeed too")
    parser.add_argument(
        "--collective",
        default="all-reduce",
        choices=["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"],
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min", type=bytes_of, default=8, metavar="BYTES")
    parser.add_argument("--max", type=bytes_of, default=64 << 20, metavar="BYTES")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--out", default="compare", metavar="PREFIX")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        run(["cc", "-O2", "-pthread", "-o", folder / "handoff", HERE / "handoff.c"])
        names = contenders(options, folder)
        rounds = {name: [] for name in names}
        probes, versions, moved, any_wrong = [], {}, [], False

        def probe():
            return float(run([folder / "handoff"]))

        def measured(name, turn):
            """A report of a time in which the cores were as far from each other as at the round's start.
            A hypervisor moves them now and then; what one library does near by says nothing about what
            another does far away. Given up after some tries, and said so."""
            for _ in range(TRIES):
                before, report, after = probe(), names[name](), probe()
                if all(abs(math.log(p / probes[-1])) < math.log(1.5) for p in (before, after)):
                    return report
            moved.append([name, turn + 1])
            print(f"{name}: the cores moved in each of {TRIES} tries", file=sys.stderr)
            return report

        for turn in range(options.rounds):
            probes.append(probe())
            print(
                f"round {turn + 1} of {options.rounds}: a cache line takes {probes[-1]} ns one way",
                file=sys.stderr,
            )
            for name in list(names):
                try:
                    report = measured(name, turn)
                except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
                    print(f"{name} is left out: {error}", file=sys.stderr)
                    del names[name], rounds[name]
                    continue
                wrong = sum(row["wrong"] for row in report["rows"])
                if wrong:
                    any_wrong = True
                    print(f"{name}: {wrong} wrong elements", file=sys.stderr)
                versions[name] = report.get("version", "")
                rounds[name].append({row["bytes"]: row for row in report["rows"]})

    if not rounds.get(OURS):
        sys.exit("nothing was measured: give --crossweft, build it by `cargo build --release`, and at least one round")
    sizes = sorted(rounds[OURS][0])
    each = {name: [{s: r[s]["time_us_p50"] for s in sizes} for r in results] for name, results in rounds.items()}
    typical = medians(each)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "kernel": platform.release()},
        "collective": options.collective,
        "ranks": options.ranks,
        "rounds": options.rounds,
        "cache_line_one_way_ns": probes,
        "cores_moved_during": moved,
        "versions": versions,
        "median_of_p50_us": typical,
        "best_min_us": {
            name: {s: min(r[s]["time_us_min"] for r in results) for s in sizes}
            for name, results in rounds.items()
        },
        "rounds_p50_us": each,
    }
    out = pathlib.Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    text = table(each, sizes)
    out.with_suffix(".md").write_text(text)
    out.with_suffix(".svg").write_text(plot(typical, sizes, f"{options.collective}, f32"))
    print(text)
    return int(any_wrong)


if __name__ == "__main__":
    sys.exit(main())

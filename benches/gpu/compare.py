#!/usr/bin/env python3
"""Compares `crossweft bench all-reduce --device cuda` with NCCL and torch's symmetric memory, in rounds that alternate.

  python3 benches/gpu/compare.py --crossweft target/release/crossweft --ranks 2 --rounds 3 --out results

Needs a Python with torch for the rivals; `--nccl-lib FILE` puts another library with NCCL's ABI in the place of
torch's own. Writes OUT.json (every round) and OUT.md (the table). An entry is the median over the rounds of each
round's median replay of the slowest rank, microseconds a call in a CUDA graph; a ratio is the median of the rounds'
own. NVLink multicast is left alone on both sides.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
OURS = "crossweft"


def run(command, environment):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def ours(options, environment):
    command = [
        options.crossweft, "bench", "all-reduce", "--device", "cuda", "--format", "json", "--dtype", "bf16",
        "--ranks", str(options.ranks), "--min", str(options.min), "--max", str(options.max),
        "--factor", str(options.factor),
    ]  # fmt: skip
    report = run(command, environment)
    wrong = sum(row["wrong"] for row in report["rows"])
    if wrong:
        raise RuntimeError(f"crossweft: {wrong} wrong elements")
    return {OURS: {row["bytes"]: row["graph_us_p50"] for row in report["rows"]}}


def theirs(options, environment):
    if options.nccl_lib:
        environment = {**environment, "LD_PRELOAD": options.nccl_lib}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks),
        # Without the dashes, torchrun takes what follows for abbreviations of its own options.
        "--", HERE / "torch_allreduce.py", "--min", str(options.min), "--max", str(options.max),
        "--factor", str(options.factor),
    ]  # fmt: skip
    report = run(command, environment)
    found = {}
    for row in report["rows"]:
        for name, times in row.items():
            if name != "bytes":
                found.setdefault(name, {})[row["bytes"]] = times[0]
    return found


def human(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def table(rounds):
    sizes = sorted(rounds[0][OURS])
    names = [OURS, *(name for name in rounds[0] if name != OURS)]
    rivals = names[1:]

    def cell(values, form):
        return form.format(statistics.median(values)) if values else "-"

    head = [*names, *(f"{name} / crossweft" for name in rivals)]
    lines = ["| size | " + " | ".join(head) + " |", "|---:|" + "---:|" * len(head)]
    for size in sizes:
        cells = [cell([r[name][size] for r in rounds if size in r[name]], "{:.2f}") for name in names]
        for name in rivals:
            ratios = [r[name][size] / r[OURS][size] for r in rounds if size in r[name]]
            cells.append(cell(ratios, "{:.2f}"))
        lines.append(f"| {human(size)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--crossweft", default="target/release/crossweft")
    parser.add_argument("--nccl-lib", help="another libnccl.so.2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min", type=int, default=1 << 10)
    parser.add_argument("--max", type=int, default=256 << 20)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--out", default="results")
    options = parser.parse_args()
    environment = {
        **os.environ,
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("CROSSWEFT_MULTICAST", None)
    rounds = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        this = ours(options, environment)
        try:
            this.update(theirs(options, environment))
        except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
            print(f"the rivals are left out: {error}", file=sys.stderr)
        rounds.append(this)
    out = pathlib.Path(options.out)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "what": "all-reduce, bf16 sum, in a CUDA graph; microseconds of the slowest rank, p50 of each round",
        "ranks": options.ranks,
        "rounds": rounds,
    }
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    text = table(rounds)
    out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

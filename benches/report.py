"""What the comparisons in this folder share: running programs, tables and plots."""

import contextlib
import html
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import tempfile

COLOURS = ["#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#e377c2", "#bcbd22"]
#: With this begin the names of what is not a rival.
OURS = "crossweft"
#: How `crossweft bench` ends whose results are not wrong, and whose are.
BENCH = (0, 1)
#: Twice the second-level cache of an H200, which is said to have 50 to 60 MB.
COLD = 2 * 60_000_000
#: What `crossweft bench --rotate` takes at most.
MOST_PAIRS = 1024


class Ended(RuntimeError):
    """A program that has failed, or had no more time: why, and what it had printed until then."""

    def __init__(self, why, printed):
        super().__init__(why)
        self.printed = printed


def run(command, environment=None, limit=600, fine=(0,)):
    """What a program prints. It is ended, with all that it has started, when its time is over or this one is ended."""
    # Files, not pipes: what is in them stays, and nobody waits for those who hold them open.
    with _file() as out, _file() as errors:
        started = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        why = None
        try:
            started.wait(limit)
        except subprocess.TimeoutExpired:
            why = f"did not end in {limit:.0f} s"
        finally:
            _end(started)
        printed, said = _content(out), _content(errors)
    if why is None and started.returncode not in fine:
        # A launcher's own lines come last, and say nothing of why.
        lines = [line.strip() for line in said.splitlines() if "rror: " in line] or [said[-500:].strip()]
        why = f"ended with {started.returncode}: {lines[0]}"
    if why:
        raise Ended(f"{pathlib.Path(command[0]).name} {why}", printed)
    return printed


def _file():
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _content(file):
    file.seek(0)
    return file.read()


def _end(started):
    """Ends a program and all that it has left. Torchrun's workers are sessions of their own, which it ends if asked."""
    if started.poll() is None:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def last_json(text):
    return json.loads(text[text.index("{") :])


def json_lines(text):
    """The objects that have a line each; whatever else is printed, or cut off, is none."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found += [json.loads(line)] if line.startswith("{") else []
    return found


def bytes_of(text):
    """Bytes, as `crossweft bench` takes them: `64K`, `1M`, `1G` are powers of 1024."""
    powers = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = powers.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def sizes_of(options):
    """From `--min` to `--max`, each `--factor` times the one before."""
    sizes = [options.min]
    while sizes[-1] * options.factor <= options.max:
        sizes.append(sizes[-1] * options.factor)
    return sizes


def pairs(collective, size, ranks, in_place=False):
    """How many pairs of buffers take turns, so that a call finds none of its own in a cache: the rank that touches the
    least of them touches `COLD` bytes. `size` is of the larger buffer.
    """
    block = max(1, size // ranks)
    touched = {
        "all-reduce": size if in_place else 2 * size,
        "all-gather": size + block,
        "reduce-scatter": size + block,
        "all-to-all": 2 * size,
        "gather": block,
        "scatter": block,
    }
    # One pair is no turn, however large.
    return max(2, -(-COLD // touched.get(collective, size)))


def human(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def microseconds(value):
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def medians(rounds):
    """Name -> size -> median of the rounds; `rounds` is name -> one size -> time for each round."""
    return {
        name: {
            size: statistics.median(each[size] for each in found if size in each)
            for size in sorted({size for each in found for size in each})
        }
        for name, found in rounds.items()
    }


def table(rounds, sizes):
    """Markdown: times, and how many times ours the rivals take, the median of the rounds' own ratios. "A, variant" is
    compared with our own variant, and not at all if there is none.
    """
    typical = medians(rounds)
    pairs = {}
    for name in rounds:
        _, comma, variant = name.partition(", ")
        if not name.startswith(OURS) and OURS + comma + variant in rounds:
            pairs[name] = OURS + comma + variant
    head = [*rounds, *(f"{rival} / {ours}" for rival, ours in pairs.items())]
    lines = ["| size | " + " | ".join(head) + " |", "|---:|" + "---:|" * len(head)]
    for size in sizes:
        cells = [microseconds(typical[name][size]) if size in typical[name] else "-" for name in rounds]
        for rival, ours in pairs.items():
            both = zip(rounds[rival], rounds[ours], strict=True)
            ratios = [theirs[size] / mine[size] for theirs, mine in both if size in theirs and size in mine]
            cells.append(f"{statistics.median(ratios):.2f}" if ratios else "-")
        lines.append(f"| {human(size)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(typical, sizes, title):
    """Time over size, both logarithmic, as SVG."""
    width, height, left, bottom, top, right = 930, 480, 70, 60, 30, 300
    times = [time for of in typical.values() for time in of.values()]
    low, high = min(times) / 1.5, max(times) * 1.5

    def x(size):
        span = math.log(sizes[-1] / sizes[0]) or 1
        return left + (width - left - right) * math.log(size / sizes[0]) / span

    def y(value):
        return height - bottom - (height - bottom - top) * math.log(value / low) / math.log(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        value = 10.0**power
        if low <= value <= high:
            label = f"{value:g} us"
            parts.append(
                f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
                f'stroke="#ddd"/><text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>'
            )
    for size in sizes[:: max(1, len(sizes) // 8)]:
        parts.append(f'<text x="{x(size):.1f}" y="{height - bottom + 18}" text-anchor="middle">{human(size)}</text>')
    for i, (name, values) in enumerate(typical.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(f"{x(s):.1f},{y(values[s]):.1f}" for s in sizes if s in values)
        stroke = 3 if name == OURS else 1.5
        row = top + 16 + 20 * i
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>'
            f'<line x1="{width - right + 14}" x2="{width - right + 38}" y1="{row}" y2="{row}" '
            f'stroke="{colour}" stroke-width="{stroke}"/>'
            f'<text x="{width - right + 44}" y="{row + 4}">{html.escape(name)}</text>'
        )
    parts.append(f'<text x="{left}" y="{top - 12}">{title}: median time of the slowest rank</text></svg>')
    return "\n".join(parts) + "\n"

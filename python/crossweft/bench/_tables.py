"""Results as a table, as a plot, and for machines."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch

from .. import __version__
from ._clock import Times
from ._columns import Case

_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#ff7f0e",
    "#9467bd",
    "#8c564b",
    "#17becf",
    "#7f7f7f",
    "#e377c2",
    "#bcbd22",
    "#000000",
)


@dataclass(frozen=True)
class Row:
    """What was measured for one case."""

    case: Case
    times: Mapping[str, Times]
    #: Columns whose results were wrong.
    wrong: Sequence[str]


@dataclass(frozen=True)
class Results:
    """A whole run."""

    ranks: int
    device: str
    dtype: str
    columns: Sequence[str]
    left_out: Mapping[str, str]
    rows: Sequence[Row]
    by_tokens: bool

    def markdown(self) -> str:
        """A table: median and least, microseconds."""
        head = "tokens x hidden | size" if self.by_tokens else "size"
        lines = [
            f"{self.ranks} ranks on {self.device}, {self.dtype}: p50 (min) of the slowest rank, microseconds",
            "",
            f"| {head} | {' | '.join(self.columns)} |",
            f"|{'---:|' * (len(self.columns) + (2 if self.by_tokens else 1))}",
        ]
        for row in self.rows:
            cells = [f"{row.case.tokens} x {row.case.hidden}"] if self.by_tokens else []
            cells.append(size(row.case.nbytes))
            cells += [_cell(row.times.get(name)) for name in self.columns]
            lines.append(f"| {' | '.join(cells)} |")
        if self.left_out:
            lines += ["", "Left out:", ""]
            lines += [f"* {name}: {reason}" for name, reason in self.left_out.items()]
        return "\n".join(lines) + "\n"

    def record(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "crossweft": __version__,
            "torch": torch.__version__,
            "machine": _machine(self.device),
            "ranks": self.ranks,
            "device": self.device,
            "dtype": self.dtype,
            "unit": "us",
            "left_out": dict(self.left_out),
            "rows": [
                {
                    "bytes": row.case.nbytes,
                    "tokens": row.case.tokens,
                    "hidden": row.case.hidden,
                    "correct": not row.wrong,
                    "columns": {name: {"p50": each.p50, "min": each.least} for name, each in row.times.items()},
                }
                for row in self.rows
            ],
        }

    def svg(self) -> str:
        """Medians by size, both axes logarithmic."""
        # Of cases with the same size the last one is drawn.
        lines = {
            name: {row.case.nbytes: row.times[name].p50 for row in self.rows if name in row.times}
            for name in self.columns
        }
        return _plot({name: points for name, points in lines.items() if points}, self.markdown().splitlines()[0])


def size(nbytes: int) -> str:
    """Bytes, for people."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def _cell(times: Times | None) -> str:
    return "" if times is None else f"{times.p50:.4g} ({times.least:.4g})"


def _machine(device: str) -> dict[str, Any]:
    if device.startswith("cuda"):
        return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {"processor": models[0] if models else platform.processor(), "processors": len(models)}


def _plot(lines: Mapping[str, Mapping[int, float]], title: str) -> str:
    width, height, left, top, right, bottom = 900, 480, 70, 40, 250, 50
    sizes = sorted({nbytes for points in lines.values() for nbytes in points})
    times = [time for points in lines.values() for time in points.values()]
    if not sizes:
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"/>\n'
    x0, x1 = math.log2(sizes[0]), max(math.log2(sizes[-1]), math.log2(sizes[0]) + 1)
    y0, y1 = math.floor(math.log10(max(min(times), 1e-3))), math.ceil(math.log10(max(*times, 1e-2)))

    def x(nbytes: float) -> float:
        return left + (math.log2(nbytes) - x0) / (x1 - x0) * (width - left - right)

    def y(time: float) -> float:
        return height - bottom - (math.log10(max(time, 1e-3)) - y0) / (y1 - y0) * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/><text x="{left}" y="20">{escape(title)}</text>'
    ]
    for power in range(y0, y1 + 1):
        row = y(10**power)
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{row:.1f}" y2="{row:.1f}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{row + 4:.1f}" text-anchor="end">{10**power:g}</text>'
        )
    for nbytes in sizes[:: max(1, len(sizes) // 8)]:
        parts.append(f'<text x="{x(nbytes):.1f}" y="{height - bottom + 18}" text-anchor="middle">{size(nbytes)}</text>')
    for index, (name, points) in enumerate(lines.items()):
        colour, row = _COLOURS[index % len(_COLOURS)], top + 18 * index
        path = " ".join(f"{x(nbytes):.1f},{y(time):.1f}" for nbytes, time in sorted(points.items()))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
            f'<line x1="{width - right + 10}" x2="{width - right + 30}" y1="{row}" y2="{row}" stroke="{colour}" '
            f'stroke-width="1.6"/><text x="{width - right + 36}" y="{row + 4}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"

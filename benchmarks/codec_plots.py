"""Ratio by rate, one panel for each class of state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.codec_cases import Kind
from benchmarks.codec_measures import Measures, Spread

_OURS = ("delta", "index", "as saved")


def draw(taken: Sequence[Measures], figure: str, path: Path) -> Path:
    """Draw ratio against ``encode`` or ``decode`` rate into a file; return it."""
    plot = Figure(figsize=(11, 8), layout="constrained")
    panels = plot.subplots(2, 2)
    for panel, kind in zip(panels.flat, Kind, strict=True):
        _panel(panel, [m for m in taken if m.case.kind is kind], figure)
        panel.set_title(kind.value)
    plot.savefig(path, dpi=80)
    return path


def _panel(panel: Axes, group: Sequence[Measures], figure: str) -> None:
    if not group:
        return
    panel.axhline(
        Spread.of([m.bound for m in group]).mean, color="grey", linestyle=":", label="order-0 bound"
    )
    names = dict.fromkeys(name.split(" / ")[0] for m in group for name in m.by_name if name != "memcpy")
    for name in names:
        best = [m.best(name)[1] for m in group]
        rate = Spread.of([getattr(measure, figure) for measure in best]).mean / 1e9
        ratio = Spread.of([measure.ratio for measure in best]).mean
        ours = name.startswith(_OURS)
        panel.plot(rate, ratio, "o" if ours else "s", color="tab:red" if ours else "tab:blue")
        panel.annotate(name, (rate, ratio), fontsize=8, xytext=(4, 3), textcoords="offset points")
    panel.set_xscale("log")
    panel.margins(x=0.25)
    panel.set_xlabel(f"{figure} GB/s, one thread")
    panel.set_ylabel("ratio")
    panel.legend(fontsize=8)

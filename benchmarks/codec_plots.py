"""Ratio by rate, one panel for each class of state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.codec_cases import Kind
from benchmarks.codec_measures import Measures, Spread

#: Ours are circles, the rest squares; one color for each in all panels. Variants of them are in the tables.
_OURS = ("delta", "delta, xor", "index")
_THEIRS = (
    "ZipNN",
    "Blosc2 zstd-1 shuffle",
    "Blosc2 zstd-1 bitshuffle",
    "Blosc zstd-1 shuffle",
    "pcodec-8",
    "zstd-1",
    "zstd-3",
    "LZ4",
    "zlib-6",
)
#: The colors repeat after ten.
_FILLS = ("full", "none")


def draw(taken: Sequence[Measures], figure: str, path: Path) -> Path:
    """Draw ratio against ``encode`` or ``decode`` rate into a file; return it."""
    plot = Figure(figsize=(11, 8), layout="constrained")
    panels = plot.subplots(2, 2)
    for panel, kind in zip(panels.flat, Kind, strict=True):
        _panel(panel, [m for m in taken if m.case.kind is kind], figure)
        panel.set_title(kind.value)
    entries: dict[str, Artist] = {}
    for panel in panels.flat:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    if entries:
        plot.legend(list(entries.values()), list(entries), loc="outside right upper", fontsize=9)
    plot.savefig(path, dpi=80)
    return path


def _panel(panel: Axes, group: Sequence[Measures], figure: str) -> None:
    if not group:
        return
    bound = Spread.of([m.bound for m in group]).mean
    panel.axhline(bound, color="grey", linestyle=":", label="order-0 bound")
    measured = {name.split(" / ")[0] for m in group for name in m.by_name}
    for number, name in enumerate((*_OURS, *_THEIRS)):
        if name not in measured:
            continue
        best = [m.best(name)[1] for m in group]
        rate = Spread.of([getattr(measure, figure) for measure in best]).mean / 1e9
        ratio = Spread.of([measure.ratio for measure in best]).mean
        is_ours = name in _OURS
        label = f"fastcheck {name}" if is_ours else name
        marker = "o" if is_ours else "s"
        panel.plot(rate, ratio, marker, color=f"C{number % 10}", label=label, fillstyle=_FILLS[number // 10])
    panel.set_xscale("log")
    panel.set_xlabel(f"{figure} GB/s, one thread")
    panel.set_ylabel("ratio")
    panel.grid(visible=True, alpha=0.3)

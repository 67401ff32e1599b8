"""The plot of what `tuning.tune` found; the only part of it that needs matplotlib."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastcheck_dask.engine.tuning import RESIDUALS, Tuning

_COLOURS = ("#2f6db5", "#e08a1e", "#3a9a5b", "#6a51a3", "#c0392b", "#41a6a6")


def draw(file: Path, tuning: Tuning) -> None:
    """Draw the curve of P, and the ratios against the checkpoint before if there is one, as a PNG."""
    # A figure of its own, without pyplot: no display is needed and no backend chosen for others.
    columns = 1 if tuning.before is None else 2
    figure = Figure(figsize=(6.5 * columns, 4.2), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    _prefixes(axes[0], tuning)
    if tuning.before is not None:
        _deltas(axes[1], tuning)
    figure.savefig(file, dpi=130, format="png")


def _prefixes(axes: Axes, tuning: Tuning) -> None:
    for curve, colour in zip(tuning.curves, cycle(_COLOURS), strict=False):
        explicit = [bits for bits in curve.prefix if isinstance(bits, int)]
        ratios = [curve.prefix[bits].ratio for bits in explicit]
        axes.plot(explicit, ratios, color=colour, marker="o", markersize=4, label=curve.name)
        axes.axhline(curve.prefix["auto"].ratio, color=colour, linestyle="--", linewidth=1)
    axes.set_title(f"PrefixIndex on {tuning.tag} (dashed: auto)", loc="left")
    axes.set_xlabel("P: bits of the prefix")
    axes.set_ylabel("raw bytes / encoded bytes")
    axes.legend(frameon=False)


def _deltas(axes: Axes, tuning: Tuning) -> None:
    curves = [
        (curve, colour) for curve, colour in zip(tuning.curves, cycle(_COLOURS), strict=False) if curve.delta
    ]
    names = ("whole", *RESIDUALS)
    width = 0.8 / len(curves)
    for number, (curve, colour) in enumerate(curves):
        places = [place + width * (number - (len(curves) - 1) / 2) for place in range(len(names))]
        axes.bar(places, [curve.delta[n].ratio for n in names], width=width, color=colour, label=curve.name)
    axes.set_xticks(range(len(names)), names)
    # In the colours of the plot beside it, whose legend holds for both.
    axes.set_title(f"Delta against {tuning.before}", loc="left")
    axes.set_ylabel("raw bytes / encoded bytes")

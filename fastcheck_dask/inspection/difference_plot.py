"""The plot of what `difference.compare` found; the only part of it that needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure

from fastcheck_dask.inspection.difference import Difference

#: Tensors that are drawn: those that changed most.
_SHOWN = 40


def draw(file: Path, found: Difference) -> None:
    """Draw relative change and share of changed elements of the tensors that changed most, as a PNG."""
    changed = [c for c in found.changed if c.relative_l2 is not None]
    chosen = sorted(changed, key=lambda c: c.relative_l2 or 0.0, reverse=True)[:_SHOWN][::-1]
    # A figure of its own, without pyplot: no display is needed and no backend chosen for others.
    figure = Figure(figsize=(11, 1.5 + 0.22 * len(chosen)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [c.path for c in chosen]
    finite = [
        c.relative_l2 if c.relative_l2 is not None and math.isfinite(c.relative_l2) else 0.0 for c in chosen
    ]
    left.barh(names, finite, color="#2f6db5")
    left.set_title(f"{found.before} to {found.after}"[-60:], loc="left", fontsize=9, parse_math=False)
    left.set_xlabel("relative L2 change")
    left.tick_params(axis="y", labelsize=7)
    right.barh(names, [100 * c.changed_share for c in chosen], color="#e08a1e")
    right.set_xlabel("elements changed, %")
    figure.savefig(file, dpi=130, format="png")

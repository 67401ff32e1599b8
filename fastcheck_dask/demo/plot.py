"""The plot: losses with the kills, bytes of each save by tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fastcheck_dask.demo.results import Outcome, Recovery, moved
from fastcheck_dask.demo.scenario import TITLES

_GREY, _RED = "#c9ced6", "#c0392b"
_ATTEMPT_COLOURS = ("#2f6db5", "#e08a1e", "#3a9a5b")
_TIER_COLOURS = {"peers": "#6a51a3", "object": "#41a6a6"}
_TIER_NAMES = {"peers": "sent to peers, with parity", "object": "written to the object tier"}
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#555555",
    "legend.frameon": False,
}


def draw(file: Path, outcomes: list[Outcome]) -> None:
    """Draw the outcomes as a PNG."""
    with mpl.rc_context(_STYLE):
        # A figure of its own, without pyplot: no display is needed and no backend chosen for others.
        layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
        figure = Figure(figsize=(13, 4.1 * len(outcomes)), layout=layout)
        axes = figure.subplots(len(outcomes), 2, squeeze=False, width_ratios=(1.25, 1))
        for (left, right), outcome in zip(axes, outcomes, strict=True):
            _losses(left, outcome)
            _bytes(right, outcome)
        figure.savefig(file, dpi=130, format="png")


def _losses(axes: Axes, outcome: Outcome) -> None:
    losses = outcome.reference.all_losses
    axes.plot(range(1, len(losses) + 1), losses, color=_GREY, linewidth=6, label="without failures")
    names = ("with checkpoints", *(f"recovered from {r.source}" for r in outcome.recoveries))
    for attempt, colour, name in zip(outcome.attempts, _ATTEMPT_COLOURS, names, strict=True):
        steps = sorted(attempt.losses)
        axes.plot(steps, [attempt.losses[step] for step in steps], color=colour, linewidth=1.6, label=name)
    top = max(losses) * 1.25
    axes.set_ylim(0, top * 1.1)
    for recovery in outcome.recoveries:
        _mark_kill(axes, recovery, top)
    verdict = "differs" if outcome.faults() else "bit for bit the same"
    axes.set_title(f"{TITLES[outcome.model]} network: the interrupted run is {verdict}")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize=8.5, columnspacing=1.2)


def _mark_kill(axes: Axes, recovery: Recovery, top: float) -> None:
    """Mark where everything was killed, and how far the recovery went back."""
    nodes = recovery.killed[1:]
    which = "1 storage node" if len(nodes) == 1 else f"all {len(nodes)} nodes"
    axes.axvline(recovery.killed_at_step + 0.5, color=_RED, linestyle=(0, (4, 3)), linewidth=1.1)
    axes.axvspan(recovery.step + 0.5, recovery.killed_at_step + 0.5, color=_RED, alpha=0.08, linewidth=0)
    axes.annotate(
        f"SIGKILL: trainer,\n{which}\nback at step {recovery.step}\nin {recovery.back_seconds:.1f} s",
        (recovery.killed_at_step + 0.5, top * 1.09),
        xytext=(5, 0),
        textcoords="offset points",
        color=_RED,
        fontsize=8.5,
        va="top",
    )


def _bytes(axes: Axes, outcome: Outcome) -> None:
    shown = [[s for s in attempt.saves.values() if moved(s, "local")] for attempt in outcome.attempts]
    saves = [save for of_attempt in shown for save in of_attempt]
    raw = [save.stats["raw_bytes"] / 1e6 for save in saves]
    axes.bar([place - 0.27 for place in range(len(saves))], raw, width=0.25, color=_GREY, label="raw")
    for number, level in enumerate(("peers", "object")):
        sent = [(moved(save, level) or (0, 0.0))[0] / 1e6 for save in saves]
        places = [place + 0.27 * number for place in range(len(saves))]
        axes.bar(places, sent, width=0.25, color=_TIER_COLOURS[level], label=_TIER_NAMES[level])
    for killed in (len(shown[0]), len(shown[0]) + len(shown[1])):
        axes.axvline(killed - 0.5, color=_RED, linestyle=(0, (4, 3)), linewidth=1.1)
    axes.set_xticks(range(len(saves)), [save.tag.removeprefix("step").lstrip("0") for save in saves])
    axes.set_ylim(0, 1.4 * max(raw, default=1))
    axes.set_title("Bytes of each save (dashed: kills)")
    axes.set_xlabel("saved after step")
    axes.set_ylabel("MB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, fontsize=8.5, columnspacing=1.2)

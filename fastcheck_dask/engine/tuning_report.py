"""Show what `tuning.tune` found: tables, and what they mean."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fastcheck_dask.engine.tuning import Curve, Measured, Tuning


def show(console: Console, tuning: Tuning) -> None:
    """Show the tables of every kind and dtype of tensors, each with its conclusions."""
    console.print(f"Checkpoint {tuning.tag} (generation {tuning.generation})", highlight=False)
    for curve in tuning.curves:
        # Not the titles of the tables: those are broken at the width of the table.
        share = f"{_mb(curve.sampled_bytes)} of {_mb(curve.total_bytes)}"
        console.print(f"PrefixIndex on {curve.name} ({share})", style="bold", highlight=False)
        console.print(_prefix_table(curve))
        if curve.delta:
            console.print(f"XorDelta on {curve.name} against {tuning.before}", style="bold", highlight=False)
            console.print(_delta_table(curve))
        for line in conclusions(curve):
            console.print(f"  {line}", highlight=False)
        console.print()
    if tuning.before is None:
        console.print("There is no tensor in a checkpoint before it, so no delta was measured.")
    if tuning.other_bytes:
        console.print(
            f"{_mb(tuning.other_bytes)} of other tensors have no exponent and go as byte planes.",
            highlight=False,
        )
    if tuning.derived_bytes:
        console.print(
            f"{_mb(tuning.derived_bytes)} are casts of float32 tensors, bit for bit, and were not sent to "
            "the storage nodes; they are measured above like all others.",
            highlight=False,
        )


def conclusions(curve: Curve) -> list[str]:
    """Say in words which setting is smallest, and what "auto" does.

    Returns
    -------
    list of str
        One line each.
    """
    auto, best = curve.prefix["auto"], curve.prefix[curve.best_prefix_bits]
    against = (
        f"{_percent(best.encoded_bytes - auto.encoded_bytes, best.encoded_bytes)} smaller than that"
        if auto.encoded_bytes <= best.encoded_bytes
        else f"{_percent(auto.encoded_bytes - best.encoded_bytes, best.encoded_bytes)} larger than that"
    )
    lines = [
        f"Best P for {curve.name}: {curve.best_prefix_bits} (ratio {best.ratio:.3f}). "
        f'"auto" has ratio {auto.ratio:.3f}, {against}; its blocks: {_shares(curve.auto_blocks)}.'
    ]
    if curve.delta:
        smallest = min(curve.delta, key=lambda name: curve.delta[name].encoded_bytes)
        pairs = curve.delta["auto"].raw_bytes
        lines.append(
            f"Smallest against the checkpoint before: {smallest}. "
            f'"auto" took {_shares(curve.auto_residuals)}; '
            f"a save sends {_percent(curve.sent_as_delta_bytes, pairs)} as deltas, the rest whole."
        )
    return lines


def _prefix_table(curve: Curve) -> Table:
    table = _table("P")
    for bits, measured in curve.prefix.items():
        style = "bold" if bits in ("auto", curve.best_prefix_bits) else None
        table.add_row(str(bits), *_row(measured), style=style)
    return table


def _delta_table(curve: Curve) -> Table:
    table = _table("residual")
    for residual, measured in curve.delta.items():
        name = "none (whole)" if residual == "whole" else residual
        table.add_row(name, *_row(measured))
    return table


def _table(first: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(first, justify="right", no_wrap=True)
    for heading in ("ratio", "encode GB/s", "decode GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _row(measured: Measured) -> tuple[str, str, str]:
    return (
        f"{measured.ratio:.3f}",
        f"{measured.encode_bytes_per_second / 1e9:.2f}",
        f"{measured.decode_bytes_per_second / 1e9:.2f}",
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def _shares(counted: dict[str, int]) -> str:
    """Return shares of raw bytes by name; "nothing" where all fitted into the header."""
    whole = sum(counted.values())
    return ", ".join(f"{name} {_percent(part, whole)}" for name, part in counted.items()) or "nothing"

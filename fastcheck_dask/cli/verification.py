"""The commands ``verify`` and ``gc``: can it be restored, and what can go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fastcheck_dask.cli.arguments import checked_coordinator
from fastcheck_dask.cli.command import Command
from fastcheck_dask.cli.location import opened
from fastcheck_dask.cli.output import emit, json_option, progress, size

if TYPE_CHECKING:
    from rich.console import Console

    from fastcheck_dask.inspection.garbage import Collected
    from fastcheck_dask.inspection.joint_verification import Chosen
    from fastcheck_dask.inspection.ranks import Part
    from fastcheck_dask.inspection.repair import Sources
    from fastcheck_dask.inspection.verification import Problem, Verified
    from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder

#: Problems of one checkpoint that are shown; `--json` has all.
_SHOWN = 20


@click.command(cls=Command)
@click.argument("url")
@click.argument("tag", required=False)
@click.option("--all", "all_of_them", is_flag=True, help="Every checkpoint of the location.")
@click.option(
    "--strict", is_flag=True, help="Also find changed bits that do not matter; several times slower."
)
@click.option(
    "--repair", is_flag=True, help="Write damaged objects anew from another copy, where there is one."
)
@click.option("--from", "others", multiple=True, help="A location with another copy, for --repair.")
@click.option(
    "--coordinator",
    callback=lambda ctx, option, value: None if value is None else checked_coordinator(ctx, option, value),
    help="Knows the storage nodes that may have another copy, for --repair.",
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    url: str,
    tag: str | None,
    *,
    all_of_them: bool,
    strict: bool,
    repair: bool,
    others: tuple[str, ...],
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Read every object of a checkpoint (the newest, TAG, or --all) and say whether it can be restored.

    Of several ranks, the parts of all are read. Exit status 1 if anything is not as it was saved; after
    --repair, if anything still is not.
    """
    if all_of_them and tag is not None:
        raise click.UsageError("give a TAG or --all, not both")
    if (others or coordinator) and not repair:
        raise click.UsageError("--from and --coordinator are for --repair")
    sources = _sources(others, coordinator) if repair else None
    folder, directory = opened(url)
    repaired: list[str] = []
    if repair:
        _repair_markers(folder, repaired)
    chosen = _chosen(folder, directory, tag, all_of_them=all_of_them)
    found = []
    with progress("verifying", sum(part.marker.raw_bytes for part in chosen.parts)) as advance:
        for part in chosen.parts:
            one = _verified(part, strict, sources, repaired, advance)
            if one is not None:
                found.append(one)
    rest = chosen.problems
    document = {
        "location": folder.store.location,
        "checkpoints": found,
        "problems": rest,
        "repaired": repaired,
    }
    emit(document, as_json=as_json, show=lambda console: _show(console, found, rest, repaired))
    ctx.exit(0 if not rest and all(one.intact for one in found) else 1)


def _sources(others: tuple[str, ...], coordinator: str | None) -> Sources:
    from fastcheck_dask.inspection.repair import Sources

    folders = [opened(other)[0] for other in others]
    if coordinator is None:
        return Sources(folders)
    # Brings the network libraries along.
    from fastcheck_dask.config import settings
    from fastcheck_dask.inspection.nodes import node_sources
    from fastcheck_dask.tiers.peer import clients_for

    return node_sources(coordinator, folders, client=clients_for(settings()))


def _chosen(folder: CheckpointFolder, directory: str | None, tag: str | None, *, all_of_them: bool) -> Chosen:
    from fastcheck_dask.inspection import joint_verification as joint

    if all_of_them:
        return joint.choose_all(folder)
    return joint.choose_one(folder, tag, directory=directory)


def _repair_markers(folder: CheckpointFolder, repaired: list[str]) -> None:
    """Write the damaged commit markers anew, and then the joint ones, which those prove."""
    from fastcheck_dask.inspection.joint_verification import each_damaged_marker, repair_joint_markers
    from fastcheck_dask.inspection.repair import repair_marker

    def mend(folder: CheckpointFolder, directory: str, name: str) -> None:
        if repair_marker(folder, directory):
            repaired.append(f"{name} from the checkpoint itself")

    each_damaged_marker(folder, mend)
    repaired += [f"{path} from its copy, or the ranks' own markers" for path in repair_joint_markers(folder)]


def _verified(
    part: Part, strict: bool, sources: Sources | None, repaired: list[str], advance: Any
) -> Verified | None:
    from fastcheck_dask.inspection import verification
    from fastcheck_dask.inspection.joint_verification import seen_from_above, sources_of
    from fastcheck_dask.inspection.repair import repair
    from fastcheck_dask.tiers.checkpoint_folder import marker_path

    folder, marker = part.folder, part.marker
    found = verification.verify(folder, marker, strict=strict, advance=advance)
    if sources is not None and not found.intact:
        done = repair(folder, marker, found, sources_of(part, sources)).repaired
        repaired += [part.prefix + line if part.root is None else f"{line}, at {part.root}" for line in done]
        found = verification.verify(folder, marker, strict=strict)
    # Retention may have removed it while it was read.
    removed = not found.intact and not folder.store.exists(marker_path(marker.directory))
    return None if removed else seen_from_above(found, part)


def _show(console: Console, found: list[Verified], rest: tuple[Problem, ...], repaired: list[str]) -> None:
    for line in repaired:
        console.print(f"repaired: {line}", markup=False)
    for one in found:
        for problem in one.problems[:_SHOWN]:
            console.print(f"  {problem.fault}: {problem.name}: {problem.detail}", markup=False)
        if len(one.problems) > _SHOWN:
            console.print(f"  ... and {len(one.problems) - _SHOWN} more (--json names all)", markup=False)
        state = "intact" if one.intact else f"{len(one.problems)} of {one.objects} objects are not as saved"
        verdict = "it can be restored" if one.restorable else "it can NOT be restored from here alone"
        console.print(f"{one.directory}: {state} ({size(one.raw_bytes)}); {verdict}", markup=False)
    for problem in rest:
        console.print(f"{problem.fault}: {problem.name}: {problem.detail}", markup=False)


@click.command(cls=Command)
@click.argument("url")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option(
    "--grace",
    default="24h",
    show_default=True,
    help="What was written more recently is left alone (90min, 2d).",
)
@json_option
def gc(url: str, *, dry_run: bool, grace: str, as_json: bool) -> None:
    """Remove what saves that died have left: unfinished attempts, temporaries, manifests of nothing.

    Never anything committed, nor what was written within the grace time: the run may be going on.
    """
    from dask.utils import parse_timedelta

    from fastcheck_dask.inspection.garbage import LEAST_GRACE_SECONDS, collect_all

    try:
        seconds = float(parse_timedelta(grace))
    except (ValueError, KeyError) as error:
        raise click.BadParameter(f"a time like 24h is wanted; got {grace!r}", param_hint="--grace") from error
    if not seconds >= LEAST_GRACE_SECONDS:
        raise click.BadParameter("at least 10min are wanted: a save may be under way", param_hint="--grace")
    folder, _ = opened(url)
    found = collect_all(folder, grace_seconds=seconds, dry_run=dry_run)
    emit(found, as_json=as_json, show=lambda console: _show_collected(console, found, dry_run))


def _show_collected(console: Console, found: Collected, dry_run: bool) -> None:
    word = "would be removed" if dry_run else "removed"
    for leftover in found.removed:
        console.print(f"{word}: {leftover.kind} {leftover.name} ({size(leftover.nbytes)})", markup=False)
    for leftover, reason in found.kept:
        console.print(f"kept: {leftover.kind} {leftover.name}: {reason}", markup=False)
    console.print(f"{len(found.removed)} {word}, {size(found.nbytes)}", markup=False)

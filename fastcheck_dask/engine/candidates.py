"""Which committed checkpoints exist, newest first, and where each may be. Pure."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.errors import CheckpointNotFoundError
from fastcheck_dask.ids import directory_name
from fastcheck_dask.tiers.checkpoint_folder import CommitMarker, Survey
from fastcheck_dask.tiers.local import SlotState, SlotStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """One committed checkpoint and the places that speak of it."""

    generation: int
    tag: str
    token: str
    record: CommitRecord | None = None
    marker: CommitMarker | None = None
    #: Number of the slot that holds it on this host.
    slot: int | None = None
    #: Whether it is meant as the object tier has it, where some of its groups are older.
    older: bool = False


def candidates(
    records: Iterable[CommitRecord],
    markers: Iterable[CommitMarker],
    slots: Mapping[int, SlotStatus],
) -> list[Candidate]:
    """Merge what coordinator, object tier and shared memory know; newest first.

    Each of the three is written only after the commit, so each alone proves it. The token says whether they
    speak of the same checkpoint; two of one generation with different tokens are both kept, the
    coordinator's first, and the disagreement is logged.
    """
    found: dict[tuple[int, str], Candidate] = {}
    for record in records:
        found[record.generation, record.token] = Candidate(
            record.generation, record.tag, record.token, record=record
        )
    for marker in markers:
        key = (marker.generation, marker.token)
        known = found.get(key) or Candidate(*key[:1], marker.tag, marker.token)
        found[key] = Candidate(known.generation, known.tag, known.token, record=known.record, marker=marker)
    for number, status in slots.items():
        if status.state is SlotState.COMMITTED and status.generation is not None:
            key = (status.generation, status.token)
            known = found.get(key) or Candidate(*key[:1], status.tag, status.token)
            found[key] = Candidate(
                known.generation, known.tag, known.token, known.record, known.marker, slot=number
            )
    ordered = sorted(found.values(), key=lambda c: (c.generation, c.record is not None), reverse=True)
    for newer, older in itertools.pairwise(ordered):
        if newer.generation == older.generation:
            log.warning(
                "generation %d is %s (token %s) to the coordinator and %s (token %s) elsewhere; "
                "the coordinator decides",
                newer.generation,
                newer.tag,
                newer.token,
                older.tag,
                older.token,
            )
    _log_lost_markers(ordered)
    return ordered


def with_older(chosen: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates, each followed by what the object tier has of it if some of its groups are older.

    Only memory has such a checkpoint as it was.
    """
    found = []
    for candidate in chosen:
        if candidate.marker is None or not candidate.marker.older:
            found.append(candidate)
            continue
        if candidate.slot is not None or (candidate.record is not None and candidate.record.nodes):
            found.append(candidate)
        found.append(replace(candidate, record=None, slot=None, older=True))
    return found


def not_retired(records: Iterable[CommitRecord], survey: Survey) -> list[CommitRecord]:
    """Return the commits that are not known to have been removed from the object tier for good.

    The coordinator does not forget: a generation that was persisted and has no commit marker any more, while
    a newer one has, was removed by the rules of what stays.
    """
    there = {(marker.generation, marker.token) for marker in survey.committed}
    newest = max((generation for generation, _ in there), default=-1)
    damaged = {Path(marker.path).stem for marker in survey.damaged}
    return [
        record
        for record in records
        if not record.persisted
        or record.generation >= newest
        or (record.generation, record.token) in there
        or directory_name(record.generation, record.tag) in damaged
    ]


def tags_of(records: Iterable[CommitRecord], survey: Survey) -> list[str]:
    """Return the tags of the committed checkpoints that there still are, oldest first."""
    known = {(record.generation, record.tag) for record in not_retired(records, survey)}
    known |= {(marker.generation, marker.tag) for marker in survey.committed}
    return [tag for _, tag in sorted(known)]


def _log_lost_markers(ordered: list[Candidate]) -> None:
    """Say once which newest generations the object tier should have and does not."""
    lost = []
    for candidate in ordered:
        if candidate.marker is not None:
            # Older ones may have been removed, by the rules of what stays.
            break
        if candidate.record is not None and candidate.record.persisted:
            lost.append(candidate)
    if lost:
        first = lost[0]
        more = f", nor of {len(lost) - 1} before it" if len(lost) > 1 else ""
        log.warning(
            "generation %d (%s) is persisted to the coordinator, but the object tier has no commit marker of "
            "it%s; the coordinator decides that it exists, the object tier what it can give",
            first.generation,
            first.tag,
            more,
        )


def with_tag(found: list[Candidate], tag: str) -> Candidate:
    """Return the newest candidate with a tag; `CheckpointNotFoundError` names those that there are."""
    for candidate in found:
        if candidate.tag == tag:
            return candidate
    newest = ", ".join(c.tag for c in found[:8]) or "none"
    raise CheckpointNotFoundError(
        f"no committed checkpoint has the tag {tag!r}; the newest tags are: {newest}"
    )

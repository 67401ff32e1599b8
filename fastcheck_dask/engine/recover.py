"""Bring a state back: which checkpoint, from where, and into which memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine import documents
from fastcheck_dask.engine.candidates import Candidate, candidates, with_older, with_tag
from fastcheck_dask.engine.encode import Region
from fastcheck_dask.engine.load import ChunkLoader
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.engine.manifests import manifest_from_nodes
from fastcheck_dask.engine.memories import (
    FilledSlot,
    LateFilledSlot,
    Memory,
    PlainMemory,
    StateMemory,
    slot_region,
)
from fastcheck_dask.errors import (
    CorruptDataError,
    FastCheckError,
    LayoutError,
    ShardUnavailableError,
    TierError,
    UnrecoverableError,
)
from fastcheck_dask.ids import directory_name, parse_directory_name
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import select
from fastcheck_dask.layout.targets import Filling, match
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, Survey
from fastcheck_dask.tiers.commit_marker import WHOLE, CommitMarker
from fastcheck_dask.tiers.local import LocalTier, SlotStatus
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

log = logging.getLogger(__name__)

_BEGUN = " into a state that another one was begun in"
_MIXED = "the state given as into= was overwritten in part: load into it again, or make it anew"


@dataclass(frozen=True)
class Recovered:
    """A state that was brought back."""

    state: Any = field(repr=False)
    manifest: Manifest = field(repr=False)
    report: LoadReport
    #: The slot that now holds the checkpoint although it did not before: a delta base for the agent.
    filled: int | None


@dataclass
class Into:
    """A live state to load into."""

    state: Any = field(repr=False)
    #: False: what does not fit is left alone.
    strict: bool = True
    #: Leaves that hold bits of a checkpoint, perhaps not all of them.
    written: set[str] = field(default_factory=set)

    def match(self, manifest: Manifest, include: str | list[str] | None) -> Filling:
        """Say what goes where, and note that it is going to be written.

        Raises
        ------
        LayoutError
            If it does not fit, and nothing was written.
        UnrecoverableError
            If something was written that this checkpoint would leave as it is: the state would be a mixture.
        """
        try:
            filling = match(manifest.tree, manifest.arrays, self.state, include=include, strict=self.strict)
            left = sorted(self.written - filling.live.keys())
        except LayoutError as error:
            if not self.written:
                raise
            raise UnrecoverableError(_named(manifest) + _BEGUN, (str(error),)) from error
        if left:
            why = f"it does not have, or not alike, {left[:4]}"
            raise UnrecoverableError(_named(manifest) + _BEGUN, (why,))
        self.written.update(filling.live)
        return filling


class Recovery:
    """Loads checkpoints of one run on this host."""

    def __init__(
        self,
        local: LocalTier,
        folder: CheckpointFolder | None,
        client: Callable[[str, str], PeerClient],
        *,
        check_documents: bool = True,
    ) -> None:
        #: Whether a load from the object tier also compares what lies beside the chunks.
        self._check_documents = check_documents
        self._local = local
        self._folder = folder
        self._client = client

    async def load(
        self,
        records: Sequence[CommitRecord],
        *,
        tag: str | None = None,
        include: str | list[str] | None = None,
        free_slot: int | None = None,
        token: str | None = None,
        healthy: bool = False,
        older: Collection[str] | None = (),
        into: Into | None = None,
    ) -> Recovered | None:
        """Load the newest checkpoint that can be had complete, or the one with a tag.

        Parameters
        ----------
        records : sequence of CommitRecord
            What the coordinator knows.
        tag : str, optional
            Load this one, or raise.
        include : str or list of str, optional
            Patterns of leaf paths; only what matches is loaded.
        free_slot : int, optional
            A slot that may be filled with the newest checkpoint, so that the next save is a delta.
        token : str, optional
            Of the checkpoint with that tag, where all ranks have to load the same one.
        healthy : bool
            Skip the checkpoints that are flagged.
        older : collection of str or None
            Names of the groups that may be older than the rest; None: all may.
        into : Into, optional
            A live state whose tensors are filled in place.

        Returns
        -------
        Recovered or None
            None if nothing was ever committed.

        Raises
        ------
        CheckpointNotFoundError, UnrecoverableError, LayoutError
        """
        survey, unlisted = self._survey()
        found = self._candidates(records, survey)
        wanted = found if token is None else [c for c in found if c.token == token]
        chosen = with_older(self._chosen(wanted, tag, survey, unlisted))
        if not chosen:
            self._refuse_unmarked()
            return None
        skipped = [] if tag is not None else _damaged_above(survey, chosen[0].generation)
        for candidate in chosen:
            # A slot is the base of deltas: it never holds what no storage node does.
            fill = free_slot if include is None and candidate is found[0] else None
            # What a fallback may need is given up only when the newer checkpoint is there.
            late = any(other.slot == fill for other in found)
            try:
                manifest = await self._manifest(candidate)
                _refuse(manifest, healthy=healthy, older=older)
                return await self._load_one(
                    candidate,
                    manifest,
                    include,
                    skipped,
                    into=into,
                    fill=fill,
                    late=late,
                    newest=candidate is found[0],
                )
            except (UnrecoverableError, CorruptDataError, ShardUnavailableError, TierError) as error:
                for cause in getattr(error, "causes", ()):
                    log.debug("generation %d: %s", candidate.generation, cause)
                if tag is not None and candidate is chosen[-1]:
                    if into is None or not into.written:
                        raise
                    causes = getattr(error, "causes", ()) or (str(error),)
                    raise UnrecoverableError(f"checkpoint {tag!r}", (*causes, _MIXED)) from error
                why = f"generation {candidate.generation} ({candidate.tag}): {error}"
                log.warning("skipped %s", why)
                skipped.append(why)
        mixed = [_MIXED] if into is not None and into.written else []
        raise UnrecoverableError("every committed checkpoint of the run", (*skipped, *mixed))

    def _survey(self) -> tuple[Survey, TierError | None]:
        """List the object tier; an error of it is returned, since the other tiers may do without."""
        if self._folder is None:
            return Survey((), ()), None
        try:
            return self._folder.survey(), None
        except TierError as error:
            log.warning("the checkpoints of the object tier cannot be listed: %s", error)
            return Survey((), ()), error

    @staticmethod
    def _chosen(
        found: list[Candidate], tag: str | None, survey: Survey, unlisted: TierError | None
    ) -> list[Candidate]:
        """Return what may be loaded, in order; nothing only if it is sure that nothing was ever saved."""
        known = [c for c in found if tag is None or c.tag == tag]
        if not known and tag is not None:
            _refuse_damaged(survey, tag)
        if not known and unlisted is not None:
            raise UnrecoverableError(
                "whatever the object tier holds (the other tiers know of no such checkpoint)",
                (str(unlisted),),
            ) from unlisted
        return known if tag is None else [with_tag(found, tag)]

    def _candidates(self, records: Sequence[CommitRecord], survey: Survey) -> list[Candidate]:
        statuses: dict[int, SlotStatus] = {}
        for number, slot in enumerate(self._local.slots):
            try:
                statuses[number] = slot.status
            except FastCheckError as error:
                log.warning("%s", error)
        return candidates(records, survey.committed, statuses)

    def _refuse_unmarked(self) -> None:
        """Say so, and do not let training start anew, where data lie without any record of a commit."""
        if self._folder is None:
            return
        paths = self._folder.store.list("")
        complete = [
            path.split("/")[0] for path in paths if path.count("/") == 1 and path.endswith("/zarr.json")
        ]
        names = sorted(name for name in complete if parse_directory_name(name))
        if names:
            raise UnrecoverableError(
                f"the run (complete checkpoints are there, {', '.join(names[:4])}, but no commit marker)",
                ("put .fastcheck/ back beside them, or move them away to start anew",),
            )

    async def _load_one(
        self,
        candidate: Candidate,
        manifest: Manifest,
        include: str | list[str] | None,
        skipped: list[str],
        *,
        into: Into | None,
        fill: int | None,
        late: bool,
        newest: bool,
    ) -> Recovered:
        started = time.monotonic()
        report = LoadReport(
            manifest.generation, manifest.tag, skipped=skipped, older=dict(manifest.notes.older)
        )
        if candidate.slot is not None:
            fill = None
        memory, tree, arrays = self._place(manifest, include, into=into, fill=fill, late=late)
        loader = ChunkLoader(
            manifest,
            memory.region,
            record=candidate.record,
            client=self._client,
            stored=await asyncio.to_thread(self._stored, candidate, manifest),
            report=report,
            newest=newest,
            settle=memory.settle,
        )
        try:
            keys = [chunk.key for spec in arrays for chunk in spec.chunks]
            if candidate.slot is None:
                await loader.load(keys)
            else:
                await _load_with(slot_region(self._local, candidate.slot, manifest), loader, keys, memory)
            state = memory.state(tree, arrays)
        except BaseException:
            memory.abandon()
            raise
        filled = _kept(memory, manifest)
        if report.raw_bytes.get("object"):
            of = None if include is None else documents.Included(tree, arrays)
            await self._check_beside(candidate, manifest, report, of=of)
        report.seconds = time.monotonic() - started
        _tell(report, sum(spec.nbytes for spec in arrays))
        return Recovered(state, manifest, report, filled)

    async def _check_beside(
        self,
        candidate: Candidate,
        manifest: Manifest,
        report: LoadReport,
        *,
        of: documents.Included | None,
    ) -> None:
        """Name and mend what is damaged beside the chunks, unless the load shall be fast."""
        if self._check_documents and self._folder is not None and candidate.marker is not None:
            report.damaged = await asyncio.to_thread(
                documents.check, self._folder, candidate.marker, manifest, of=of
            )

    def _stored(self, candidate: Candidate, manifest: Manifest) -> StoredCheckpoint | None:
        """Return the checkpoint in the object tier, also if its marker is lost: its chunks may be there."""
        if self._folder is None:
            return None
        marker = candidate.marker
        if marker is None:
            directory, needs = directory_name(manifest.generation, manifest.tag), WHOLE
            try:
                planned = self._folder.planned(directory, manifest.token)
                needs = WHOLE if planned is None else planned.needs
            except FastCheckError as error:
                log.warning("%s is taken for whole: %s", directory, error)
            marker = CommitMarker.of(manifest, manifest.to_bytes(), needs=needs)
        return StoredCheckpoint(self._folder, marker, manifest)

    def _place(
        self,
        manifest: Manifest,
        include: str | list[str] | None,
        *,
        into: Into | None,
        fill: int | None,
        late: bool,
    ) -> tuple[Memory, Any, list[ArraySpec]]:
        """Return the memory to load into, and the tree and arrays of what is wanted of a checkpoint."""
        if into is not None:
            filling = into.match(manifest, include)
            return StateMemory(filling, manifest, self._local, fill), filling.tree, list(filling.arrays)
        paths, tree = (None, manifest.tree) if include is None else select(manifest.tree, include)
        arrays = [spec for spec in manifest.arrays if paths is None or spec.path in paths]
        if fill is not None:
            try:
                kept = LateFilledSlot if late else FilledSlot
                return kept(self._local, fill, manifest), tree, arrays
            except TierError as error:
                log.warning("the checkpoint is not kept in shared memory: %s", error)
        return PlainMemory(manifest, arrays), tree, arrays

    async def _manifest(self, candidate: Candidate) -> Manifest:
        """Get the manifest from the nearest place that has it."""
        causes: list[str] = []
        if candidate.slot is not None:
            slot = self._local.slots[candidate.slot]
            try:
                return _checked(Manifest.from_bytes(slot.read_manifest(), where=str(slot.path)), candidate)
            except FastCheckError as error:
                causes.append(str(error))
        if candidate.record is not None:
            found = await manifest_from_nodes(candidate.record, self._client, causes=causes)
            if found is not None:
                try:
                    return _checked(found[0], candidate)
                except CorruptDataError as error:
                    causes.append(str(error))
        if candidate.marker is not None and candidate.older == bool(candidate.marker.older) and self._folder:
            try:
                return _checked(self._folder.load_manifest(candidate.marker), candidate)
            except FastCheckError as error:
                causes.append(str(error))
        if candidate.marker is None:
            causes.append("the object tier has no commit marker of it")
        raise UnrecoverableError(
            f"the manifest of generation {candidate.generation} ({candidate.tag})", tuple(causes)
        )


async def _load_with(slot_bits: Region, loader: ChunkLoader, keys: list[str], memory: Memory) -> None:
    """Load what a slot holds, and put right what is damaged there: it may be the base of the next save."""
    damaged = loader.take_local(keys, slot_bits)
    await loader.load(keys)
    for key in damaged:
        np.copyto(slot_bits(key), memory.region(key))


def _tell(report: LoadReport, nbytes: int) -> None:
    """Log what was loaded."""
    what = report.generation, report.tag
    log.info(
        "generation %d (%s) loaded from %s: %d bytes in %.3f s", *what, report.source, nbytes, report.seconds
    )
    for name, group in report.older.items():
        log.warning(
            "generation %d (%s): group %s is older, of generation %d (%s)",
            *what,
            name,
            group.generation,
            group.tag,
        )


def _named(manifest: Manifest) -> str:
    return f"generation {manifest.generation} ({manifest.tag})"


def _refuse(manifest: Manifest, *, healthy: bool, older: Collection[str] | None) -> None:
    """Raise `CorruptDataError` or `UnrecoverableError` for a checkpoint that is not wanted as it is."""
    notes = manifest.notes
    if healthy and notes.flags:
        raise CorruptDataError(f"it is flagged: {notes.describe()}")
    unasked = sorted(() if older is None else notes.older.keys() - set(older))
    if unasked:
        why = (
            f"the object tier has its group {unasked[0]} of generation {notes.older[unasked[0]].generation} "
            "only: give the manager that group, or load with older_groups=True to get a state of two steps"
        )
        raise UnrecoverableError(f"{_named(manifest)}, all of one step,", (why,))


def _damaged_above(survey: Survey, generation: int) -> list[str]:
    """Say which newer checkpoints there may be, of which only the damaged marker is known."""
    names = ((marker, parse_directory_name(Path(marker.path).stem)) for marker in survey.damaged)
    return [
        f"generation {name[0]} ({name[1]}): its commit marker cannot be read: {marker.reason}"
        for marker, name in names
        if name is not None and name[0] > generation
    ]


def _refuse_damaged(survey: Survey, tag: str) -> None:
    """Raise `CorruptDataError` if the object tier has a damaged commit marker of a tag."""
    for damaged in survey.damaged:
        parsed = parse_directory_name(Path(damaged.path).stem)
        if parsed is not None and parsed[1] == tag:
            raise CorruptDataError(f"checkpoint {tag!r}: its commit marker cannot be read: {damaged.reason}")


def _kept(memory: Memory, manifest: Manifest) -> int | None:
    """Keep what was loaded in its slot; a load does not fail because that does."""
    try:
        return memory.keep(manifest)
    except FastCheckError as error:
        log.warning("the checkpoint is not kept in shared memory: %s", error)
        return None


def _checked(manifest: Manifest, candidate: Candidate) -> Manifest:
    if (manifest.generation, manifest.token) != (candidate.generation, candidate.token):
        raise CorruptDataError(
            f"a manifest of generation {manifest.generation} was found where {candidate.generation} should be"
        )
    return manifest

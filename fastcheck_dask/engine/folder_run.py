"""A run in one folder, saved and loaded in the calling process: no agent, no nodes, no coordinator."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fastcheck_codecs import is_delta, max_encoded_nbytes

from fastcheck_dask.engine import documents
from fastcheck_dask.engine.chains import ChainPolicy, choose_base, newest_before
from fastcheck_dask.engine.encode import Bits, TaskEncoder
from fastcheck_dask.engine.encode import Payload as EncodedPayload
from fastcheck_dask.engine.plan import Content, Task, jobs_for_objects
from fastcheck_dask.engine.references import digests_of, references
from fastcheck_dask.engine.retention import Retention, retire
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    FastCheckError,
    RunInUseError,
    UnrecoverableError,
)
from fastcheck_dask.ids import directory_name, is_url, new_token, parse_directory_name
from fastcheck_dask.layout.chunks import ArraySpec, place
from fastcheck_dask.layout.health import notes_of
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import FlatState, flatten, unflatten
from fastcheck_dask.layout.zarr_tree import PRIVATE
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker, Survey
from fastcheck_dask.tiers.commit_marker import WHOLE, Needs
from fastcheck_dask.tiers.process_lock import ProcessLock
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

log = logging.getLogger(__name__)

_THREADS = 4


@dataclass(frozen=True)
class FolderSave:
    """A checkpoint that was saved."""

    marker: CommitMarker
    raw_bytes: int
    #: Encoded bytes that were written; what other checkpoints have was not.
    written_bytes: int
    deltas: int
    shared: int


@dataclass(frozen=True)
class _Held:
    """The bits of a checkpoint in memory: the base of the next one."""

    token: str
    content: Content
    bits: Bits


class FolderRun:
    """Saves and loads the checkpoints of one folder. One thread at a time; methods block.

    Parameters
    ----------
    folder : CheckpointFolder
        Where they lie.
    run : str
        Name of the run.
    policy : ChainPolicy
        When a checkpoint is stored against the one before it.
    retention : Retention
        What stays.
    chunk_bytes : int
        Largest chunk.

    Notes
    -----
    Between saves it keeps one copy of the state: deltas are made against it.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        *,
        run: str,
        policy: ChainPolicy,
        retention: Retention,
        chunk_bytes: int,
    ) -> None:
        self.folder, self._run = folder, run
        self._policy, self._retention, self._chunk_bytes = policy, retention, chunk_bytes
        self._held: _Held | None = None
        self._encoder = TaskEncoder()

    def save(
        self, state: Any, tag: str, *, whole: bool = False, metrics: Mapping[str, float] | None = None
    ) -> FolderSave:
        """Save a state; it is complete in the folder when this returns.

        Parameters
        ----------
        state : object
            As for `layout.state.flatten`.
        tag : str
            Name of the checkpoint.
        whole : bool
            Whether it shall need no other one, whatever the policy says.
        metrics : mapping, optional
            Numbers that belong to it.

        Raises
        ------
        RunInUseError
            If another process saves into the folder.
        TierError
            If the folder cannot be written; nothing of the save is visible.
        """
        flat = flatten(state, chunk_bytes=self._chunk_bytes)
        token, created = new_token(), time.time()
        content = Content(flat.arrays, place(flat.arrays), None)
        bits = _copied(flat, content)
        with self._alone():
            committed = self.folder.committed()
            generation = 1 + self.folder.newest_generation()
            directory = directory_name(generation, tag)
            self.folder.clear_uncommitted(directory)
            base = None if whole else self._base(committed, generation, created)
            needs = WHOLE if base is None else Needs(base.marker.link)
            others: tuple[StoredCheckpoint, ...] = () if base is None else (base,)
            if base is None and not whole:
                needs, others = self._references(committed, generation, tag, content=content, bits=bits)
            written, digests, nonfinite = self._write(directory, content, bits, base, others=others)
            notes = notes_of(
                metrics or {},
                flat.tree,
                chunks=content.chunks,
                digests=digests,
                nonfinite=nonfinite,
                before=self._newest_manifest(committed),
            )
            manifest = Manifest(
                self._run, generation, tag, token, created, flat.tree, flat.arrays, digests, notes=notes
            )
            self.folder.write_metadata(manifest, needs=needs)
            marker = self.folder.publish(manifest, needs=needs)
            self._held = _Held(token, content, bits)
            self._retire()
        if notes.flags:
            log.warning("generation %d (%s) is flagged: %s", generation, tag, notes.describe())
        return FolderSave(marker, manifest.raw_bytes, *written)

    def load(self, name: str | None = None) -> tuple[Any, CommitMarker] | None:
        """Load a checkpoint.

        Parameters
        ----------
        name : str, optional
            A tag, of which the newest is meant, or the name of a directory. Without it the newest one that
            can be had complete; those that were skipped are in the log.

        Returns
        -------
        (state, marker) or None
            None if nothing was ever saved.

        Raises
        ------
        CheckpointNotFoundError
            If there is none of that name.
        CorruptDataError, ShardUnavailableError
            If the one of that name, or one that it needs, is damaged.
        UnrecoverableError
            If no checkpoint can be had complete.
        """
        survey = self.folder.survey()
        if name is not None:
            marker = self._named(survey, name)
            return self._read(marker), marker
        skipped = []
        for marker in reversed(survey.committed):
            try:
                return self._read(marker), marker
            except FastCheckError as error:
                skipped.append(f"generation {marker.generation} ({marker.tag}): {error}")
                log.warning("skipped %s", skipped[-1])
        skipped += [f"{marker.path}: {marker.reason}" for marker in survey.damaged]
        if skipped:
            raise UnrecoverableError(f"every checkpoint in {self.folder.store.location}", tuple(skipped))
        return None

    def _named(self, survey: Survey, name: str) -> CommitMarker:
        """Return the newest checkpoint with a tag, or that of a directory."""
        where = self.folder.store.location
        for marker in reversed(survey.committed):
            if name in (marker.directory, marker.tag):
                return marker
        for damaged in survey.damaged:
            directory = Path(damaged.path).stem
            if name in (directory, *(parse_directory_name(directory) or ())[1:]):
                raise CorruptDataError(f"{name} in {where}: its commit marker is damaged: {damaged.reason}")
        tags = ", ".join(marker.tag for marker in survey.committed[:-9:-1]) or "none"
        raise CheckpointNotFoundError(f"{where} has no checkpoint {name!r}; the newest are: {tags}")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        location = self.folder.store.location
        if is_url(location):
            # There are no locks; of two that save at once, the second to publish is refused.
            yield
            return
        path = Path(location) / PRIVATE / "trainer.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = ProcessLock(path, role="trainer")
        if not lock.acquire():
            raise RunInUseError(
                f"{location} is used by {lock.holder() or 'another process'}; use another folder, or end that"
            )
        try:
            yield
        finally:
            lock.release()

    def _base(
        self, committed: list[CommitMarker], generation: int, created_unix: float
    ) -> StoredCheckpoint | None:
        """Return what the next checkpoint is stored against, with its bits in memory; None if nothing."""
        chosen = choose_base(
            committed, self._policy, run=self._run, generation=generation, created_unix=created_unix
        )
        if chosen is None:
            return None
        try:
            base = StoredCheckpoint(self.folder, chosen)
            if self._held is None or self._held.token != chosen.token:
                content = Content(base.manifest.arrays, place(base.manifest.arrays), None)
                self._held = _Held(chosen.token, content, self._bits(base, content))
        except FastCheckError as error:
            log.warning("generation %d is saved whole: %s", generation, error)
            return None
        return base

    def _references(
        self, committed: list[CommitMarker], generation: int, tag: str, *, content: Content, bits: Bits
    ) -> tuple[Needs, tuple[StoredCheckpoint, ...]]:
        """Return to what a checkpoint without a base refers for the chunks that did not change."""
        newest = newest_before(committed, run=self._run, generation=generation)
        if newest is None or not self._policy.max_references:
            return WHOLE, ()
        try:
            stored = StoredCheckpoint(self.folder, newest)
            stored.open_all()
            sizes = {key: chunk.nbytes for key, chunk in content.chunks.items()}
            refs = references(
                stored, partial(digests_of, content, bits), sizes, limit=self._policy.max_references
            )
            by = directory_name(generation, tag)
            return Needs(refs=refs), tuple(StoredCheckpoint.linked(self.folder, ref, by=by) for ref in refs)
        except FastCheckError as error:
            log.warning("generation %d is saved whole: %s", generation, error)
            return WHOLE, ()

    def _newest_manifest(self, committed: list[CommitMarker]) -> Manifest | None:
        try:
            return self.folder.load_manifest(committed[-1]) if committed else None
        except FastCheckError as error:
            log.warning("whether the checkpoint is healthy cannot be told by the one before: %s", error)
            return None

    def _bits(self, stored: StoredCheckpoint, content: Content) -> Bits:
        """Read all chunks into memory that is laid out as a slot is."""
        bits = np.zeros(content.placement.total_bytes, np.uint8)

        def read(key: str) -> None:
            offset, nbytes = content.piece(key)
            stored.read(key, out=bits[offset : offset + nbytes])

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="fastcheck-folder") as threads:
            list(threads.map(read, content.chunks))
        return bits

    def _write(
        self,
        directory: str,
        content: Content,
        bits: Bits,
        base: StoredCheckpoint | None,
        *,
        others: Sequence[StoredCheckpoint],
    ) -> tuple[tuple[int, int, int], dict[str, str], set[str]]:
        """Write the chunks; return bytes, deltas and shared chunks, the digests, and what is not finite."""
        before = self._held if base is not None else None

        def write(task: Task) -> tuple[EncodedPayload, int, bool]:
            out = np.empty(max_encoded_nbytes(task.nbytes), np.uint8)
            found = self._encoder.encode(
                (bits, task.current),
                None if before is None or task.base is None else (before.bits, task.base),
                dtype=task.dtype,
                nbytes=task.nbytes,
                out=out,
            )
            if any(other.manifest.digests.get(task.key) == found.digest for other in others):
                return found, 0, False
            payload = out[: found.nbytes]
            self.folder.write_chunk(directory, task.key, payload)
            return found, found.nbytes, is_delta(payload)

        jobs = jobs_for_objects(
            content, base=None if before is None else before.content, budget_bytes=self._chunk_bytes
        )
        tasks = [task for job in jobs for task in job.tasks]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="fastcheck-folder") as threads:
            results = list(threads.map(write, tasks))
        digests = {task.key: found.digest for task, (found, _, _) in zip(tasks, results, strict=True)}
        nonfinite = {task.key for task, (found, _, _) in zip(tasks, results, strict=True) if found.nonfinite}
        told = (sum(r[1] for r in results), sum(r[2] for r in results), sum(not r[1] for r in results))
        return told, digests, nonfinite

    def _read(self, marker: CommitMarker) -> Any:
        if marker.older:
            raise CorruptDataError(
                f"{marker.directory} has older groups ({', '.join(marker.older)}): load it with "
                "FastCheckManager.load(older_groups=True) to get a state of two steps"
            )
        stored = StoredCheckpoint(self.folder, marker)
        content = Content(stored.manifest.arrays, place(stored.manifest.arrays), None)
        bits = self._bits(stored, content)
        documents.check(self.folder, marker, stored.manifest)

        def hand_over(spec: ArraySpec) -> Bits:
            start = content.placement.offsets[spec.path]
            return bits[start : start + spec.nbytes].copy()

        return unflatten(stored.manifest.tree, hand_over, arrays=stored.manifest.arrays)

    def _retire(self) -> None:
        try:
            retire(self.folder, self._retention)
        except FastCheckError as error:
            log.warning("old checkpoints could not be removed: %s", error)


def _copied(flat: FlatState, content: Content) -> Bits:
    bits = np.zeros(content.placement.total_bytes, np.uint8)
    for spec, source in zip(flat.arrays, flat.sources, strict=True):
        start = content.placement.offsets[spec.path]
        copy_bits(source, bits[start : start + spec.nbytes])
    return bits

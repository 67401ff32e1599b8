"""How a checkpoint is going to lie in the object tier: what it needs, which groups are older or elsewhere."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastcheck_dask.config import Group
from fastcheck_dask.engine.chains import ChainPolicy, choose_base, newest_before
from fastcheck_dask.engine.references import Digests, references
from fastcheck_dask.engine.roots import clear_rivals, locations, open_root
from fastcheck_dask.errors import (
    CorruptDataError,
    FastCheckError,
    RootAwayError,
    ShardUnavailableError,
    TierError,
)
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.groups import has_same_content, keys_of, may_be_older, part_of, with_older
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import Apart, BaseLink, CommitMarker, Mix, Needs, Plan
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """What has to be known of a checkpoint before it is written."""

    run: str
    generation: int
    tag: str
    token: str
    created_unix: float
    tree: Any
    arrays: tuple[ArraySpec, ...]
    digests: Digests

    @classmethod
    def of(cls, manifest: Manifest) -> Draft:
        """Return the draft of what has a manifest already."""
        return cls(
            manifest.run,
            manifest.generation,
            manifest.tag,
            manifest.token,
            manifest.created_unix,
            manifest.tree,
            manifest.arrays,
            lambda _: manifest.digests,
        )

    @property
    def directory(self) -> str:
        """Name of its directory."""
        return directory_name(self.generation, self.tag)

    def part_of(self, groups: Sequence[Group], name: str) -> Manifest | None:
        """Return the manifest of a group at its root; see `layout.groups.part_of`."""
        known = self.digests(keys_of(self.tree, self.arrays, groups, [name]))
        return part_of(
            Manifest(
                self.run,
                self.generation,
                self.tag,
                self.token,
                self.created_unix,
                self.tree,
                self.arrays,
                known,
            ),
            groups,
            name,
        )


@dataclass(frozen=True)
class Planned:
    """A plan, and what it names, opened."""

    plan: Plan
    #: In the order of the plan's links.
    others: tuple[StoredCheckpoint, ...] = ()
    #: What the older groups are of.
    source: StoredCheckpoint | None = None
    #: What is written at roots of groups, before the checkpoint itself.
    parts: tuple[PlannedPart, ...] = ()

    @property
    def needs(self) -> Needs:
        """The checkpoints that it needs."""
        return self.plan.needs

    def stored_as(self, manifest: Manifest) -> Manifest:
        """Return the manifest of what goes to the object tier."""
        if self.plan.mix is None or self.source is None:
            return manifest
        return with_older(manifest, self.source.manifest, self.plan.mix.groups, self.plan.mix.older)

    def older_keys(self, draft: Draft) -> Collection[str]:
        """Return the chunks that are not written whatever they are now."""
        mix = self.plan.mix
        return () if mix is None else keys_of(draft.tree, draft.arrays, mix.groups, mix.older)


@dataclass(frozen=True)
class PlannedPart:
    """A group that is to be written at its root."""

    location: str
    folder: CheckpointFolder
    manifest: Manifest
    planned: Planned

    @property
    def directory(self) -> str:
        """Name of its directory there."""
        return directory_name(self.manifest.generation, self.manifest.tag)

    @property
    def stored(self) -> StoredCheckpoint:
        """The group as it is going to lie there."""
        marker = CommitMarker.of(self.manifest, self.manifest.to_bytes(), needs=self.planned.needs)
        return StoredCheckpoint(self.folder, marker, self.manifest, location=self.location)


class Planner:
    """Plans the checkpoints of one location. Methods block; any thread may call.

    Parameters
    ----------
    folder : CheckpointFolder
        The location.
    chains : ChainPolicy or None
        What is stored against what; None: each is whole, unless another author of it said otherwise before.
    groups : sequence of Group
        What goes there more rarely, or elsewhere.
    """

    def __init__(
        self, folder: CheckpointFolder, chains: ChainPolicy | None, groups: Sequence[Group] = ()
    ) -> None:
        self._folder, self._chains, self._groups = folder, chains, tuple(groups)

    def planned(self, draft: Draft) -> Planned:
        """Say how a checkpoint is going to lie there: as its first author said, or as the policy says.

        Raises
        ------
        TierError
            If a store cannot be written; `RootAwayError` if the root of a group does not answer.
        """
        plan = self._folder.planned(draft.directory, draft.token)
        if plan is None:
            if self._chains is None:
                return Planned(Plan())
            plan = self._folder.plan(draft.directory, draft.token, self._chosen(draft, self._chains))
        parts = self._parts(draft, plan)
        opened = [
            parts[link].stored if link in parts else self._opened(draft.directory, link, planned=True)
            for link in plan.needs.links
        ]
        others = tuple(other for other in opened if other is not None)
        source = None if plan.mix is None else self._opened(draft.directory, plan.mix.source, planned=True)
        if len(others) < len(opened) or (plan.mix is not None and source is None):
            self._folder.plan_whole(draft.directory, draft.token)
            return Planned(Plan())
        return Planned(plan, others, source, tuple(parts.values()))

    def _parts(self, draft: Draft, plan: Plan) -> dict[BaseLink, PlannedPart]:
        """Return what has to be written at roots of groups, by how the checkpoint is going to name it."""
        parts = {}
        for name, link in () if plan.apart is None else plan.apart.links:
            if (link.generation, link.token) != (draft.generation, draft.token):
                continue
            assert plan.apart is not None
            location = str(link.location)
            try:
                folder = open_root(self._folder, location)
                clear_rivals(
                    self._folder, folder, location=location, generation=draft.generation, token=draft.token
                )
                if folder.marker(link.directory) is not None:
                    continue
                part = draft.part_of(plan.apart.groups, name)
                if part is not None and _link_of(part, location) == link:
                    planned = Planner(folder, self._chains).planned(Draft.of(part))
                    parts[link] = PlannedPart(location, folder, part, planned)
            except TierError as error:
                raise RootAwayError(f"the root of group {name}, {location}: {error}") from error
        return parts

    def _chosen(self, draft: Draft, chains: ChainPolicy) -> Plan:
        """Return the plan by the policy; it names only what can be had."""
        committed = self._folder.committed()
        run, generation = draft.run, draft.generation
        base = choose_base(committed, chains, run=run, generation=generation, created_unix=draft.created_unix)
        newest = base or newest_before(committed, run=run, generation=generation)
        if newest is not None:
            self._check_roots(newest, by=draft.directory)
        stored = None if newest is None else self._opened(draft.directory, newest.link)
        older: tuple[str, ...] = ()
        if stored is not None:
            older = may_be_older(
                draft.tree, draft.arrays, generation, stored=stored.manifest, groups=self._groups
            )
        apart = self._apart(draft, stored, older)
        links = tuple(link for _, link in apart.links) if apart is not None else ()
        if stored is None:
            return Plan(Needs(refs=links), apart=apart)
        mix = Mix(stored.marker.link, self._groups, older) if older else None
        if base is not None:
            return Plan(Needs(base.link, links), mix, apart)
        refs = self._references(draft, stored, chains, older=older, apart=apart)
        # What is at its root is found there, whoever else had it before.
        return Plan(Needs(refs=(*links, *(ref for ref in refs if ref not in links))), mix, apart)

    def _references(
        self,
        draft: Draft,
        stored: StoredCheckpoint,
        chains: ChainPolicy,
        *,
        older: Collection[str],
        apart: Apart | None,
    ) -> tuple[BaseLink, ...]:
        names = {name for name, _ in apart.links} if apart is not None else set()
        elsewhere = keys_of(draft.tree, draft.arrays, self._groups, names)
        keys = keys_of(draft.tree, draft.arrays, self._groups, set(older) - names)
        if not (chains.max_references or keys):
            return ()
        sizes = {chunk.key: chunk.nbytes for spec in draft.arrays for chunk in spec.chunks}
        sizes = {key: nbytes for key, nbytes in sizes.items() if key not in elsewhere}
        return references(stored, draft.digests, sizes, limit=chains.max_references, older=keys)

    def _apart(self, draft: Draft, stored: StoredCheckpoint | None, older: Collection[str]) -> Apart | None:
        """Say where the groups with roots lie: what did not change, or is not due, is there already."""
        places = locations(self._folder.store, self._groups)
        before: Mapping[str | None, StoredCheckpoint] = {}
        if stored is not None and places:
            before = {other.link.location: other for other in stored.others}
        links = []
        for name, location in places.items():
            there = before.get(location)
            if name in older:
                if there is not None:
                    links.append((name, there.link))
                continue
            part = draft.part_of(self._groups, name)
            if part is None:
                continue
            same = there is not None and has_same_content(part, there.manifest)
            links.append((name, there.link if same and there is not None else _link_of(part, location)))
        return Apart(self._groups, tuple(links)) if links else None

    def _check_roots(self, newest: CommitMarker, *, by: str) -> None:
        """Raise `RootAwayError` if a root that groups have now is away: nothing is planned without it.

        Else a group that did not change would be written there once more. A root that no group has any more
        may be lost for good.
        """
        places = set(locations(self._folder.store, self._groups).values())
        for link in newest.refs:
            if link.location in places:
                with contextlib.suppress(CorruptDataError, ShardUnavailableError):
                    self._folder.linked(link, by=by)

    def _opened(self, directory: str, link: BaseLink, *, planned: bool = False) -> StoredCheckpoint | None:
        """Open a checkpoint that another one is to need, and everything that it needs; None if it cannot be.

        A chain that is broken already shall not get longer. If it is planned to be needed, `RootAwayError` is
        raised where a root is away: that may come back, and nothing is written elsewhere in its place.
        """
        try:
            stored = StoredCheckpoint.linked(self._folder, link, by=directory)
            stored.open_all()
        except FastCheckError as error:
            if planned and isinstance(error, RootAwayError):
                raise
            log.warning("%s is stored whole: %s", directory, error)
            return None
        return stored


def _link_of(part: Manifest, location: str) -> BaseLink:
    return replace(CommitMarker.of(part, part.to_bytes()).link, location=location)

"""How a checkpoint is going to lie in the object tier: what it needs, and which of its groups are older."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fastcheck_dask.config import Group
from fastcheck_dask.engine.chains import ChainPolicy, choose_base, newest_before
from fastcheck_dask.engine.references import Digests, references
from fastcheck_dask.errors import FastCheckError, TierError
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.groups import keys_of, may_be_older, with_older
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import BaseLink, Mix, Needs, Plan
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


@dataclass(frozen=True)
class Planned:
    """A plan, and what it names, opened."""

    plan: Plan
    #: In the order of the plan's links.
    others: tuple[StoredCheckpoint, ...] = ()
    #: What the older groups are of.
    source: StoredCheckpoint | None = None

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


class Planner:
    """Plans the checkpoints of one location. Methods block; any thread may call.

    Parameters
    ----------
    folder : CheckpointFolder
        The location.
    chains : ChainPolicy or None
        What is stored against what; None: each is whole, unless another author of it said otherwise before.
    groups : sequence of Group
        What goes there more rarely.
    """

    def __init__(
        self, folder: CheckpointFolder, chains: ChainPolicy | None, groups: Sequence[Group] = ()
    ) -> None:
        self._folder, self._chains, self._groups = folder, chains, tuple(groups)

    def planned(self, draft: Draft) -> Planned:
        """Say how a checkpoint is going to lie there: as its first author said, or as the policy says."""
        plan = self._folder.planned(draft.directory, draft.token)
        if plan is None:
            if self._chains is None:
                return Planned(Plan())
            plan = self._folder.plan(draft.directory, draft.token, self._chosen(draft, self._chains))
        opened = [self._opened(draft.directory, link) for link in plan.needs.links]
        others = tuple(other for other in opened if other is not None)
        source = None if plan.mix is None else self._opened(draft.directory, plan.mix.source)
        if len(others) < len(opened) or (plan.mix is not None and source is None):
            self._folder.plan_whole(draft.directory, draft.token)
            return Planned(Plan())
        return Planned(plan, others, source)

    def _chosen(self, draft: Draft, chains: ChainPolicy) -> Plan:
        """Return the plan by the policy; it names only what can be had."""
        committed = self._folder.committed()
        run, generation = draft.run, draft.generation
        base = choose_base(committed, chains, run=run, generation=generation, created_unix=draft.created_unix)
        newest = base or newest_before(committed, run=run, generation=generation)
        stored = None if newest is None else self._opened(draft.directory, newest.link)
        if stored is None:
            return Plan()
        older = may_be_older(
            draft.tree, draft.arrays, generation, stored=stored.manifest, groups=self._groups
        )
        mix = Mix(stored.marker.link, self._groups, older) if older else None
        if base is not None:
            return Plan(Needs(base.link), mix)
        keys = keys_of(draft.tree, draft.arrays, self._groups, older)
        if not (chains.max_references or keys):
            return Plan(mix=mix)
        sizes = {chunk.key: chunk.nbytes for spec in draft.arrays for chunk in spec.chunks}
        refs = references(stored, draft.digests, sizes, limit=chains.max_references, older=keys)
        return Plan(Needs(refs=refs), mix)

    def _opened(self, directory: str, link: BaseLink) -> StoredCheckpoint | None:
        """Open a checkpoint that another one is to need, and everything that it needs; None if it cannot be.

        A chain that is broken already shall not get longer.
        """
        try:
            marker = self._folder.marker(link.directory)
            if marker is None or marker.link != link:
                raise TierError(f"{link.directory} is gone, or another one")
            stored = StoredCheckpoint(self._folder, marker)
            stored.open_all()
        except FastCheckError as error:
            log.warning("%s is stored whole: %s", directory, error)
            return None
        return stored

"""Which checkpoints of the object tier are removed, and their removal."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, cast

from fastcheck_dask.config import Settings
from fastcheck_dask.engine.chains import needed_of
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import CommitMarker

log = logging.getLogger(__name__)

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Retention:
    """Rules of what stays; a checkpoint stays if any of them says so. Without a rule everything does."""

    #: The newest ones, this many.
    last: int | None = None
    #: Those whose generation is a multiple.
    every: int | None = None
    #: Those that are at most so many hours older than the newest.
    hours: float | None = None
    #: Metric, whether small or large values are good, and how many of the best.
    best: tuple[str, Mode, int] | None = None

    @classmethod
    def of(cls, settings: Settings) -> Retention:
        """Return the rules of the settings, of which -1 says that everything stays."""
        rules = (settings.keep_last, settings.keep_every, settings.keep_hours)
        if any(rule == -1 for rule in rules):
            return cls()
        best = settings.keep_best
        return cls(*rules, best=None if best is None else (best[0], cast(Mode, best[1]), best[2]))

    def to_text(self) -> str:
        """Return the rules as text for who has to apply them when this process is gone; empty for none."""
        return "" if self.keeps_all else json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Retention:
        """Undo :meth:`to_text`; what cannot be read keeps everything."""
        if not text:
            return cls()
        try:
            found = cls(**json.loads(text))
            best = None if found.best is None else (str(found.best[0]), found.best[1], int(found.best[2]))
            return replace(found, best=best)
        except (ValueError, TypeError, IndexError) as error:
            log.warning("nothing is removed: the rules of what stays cannot be read: %s", error)
            return cls()

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self == Retention()

    def removable(
        self, committed: Iterable[CommitMarker], *, proven: int | None = None
    ) -> list[CommitMarker]:
        """Return what no rule keeps and no other checkpoint needs; oldest first.

        Whatever the rules, the newest stays, the newest that is not flagged stays, and so does all that
        is needed by what stays. With several ranks, `proven` is the newest generation that all of them have:
        it stays, and so do all from it on.
        """
        markers = sorted(committed, key=lambda marker: marker.generation)
        if self.keeps_all or not markers:
            return []
        by_directory = {marker.directory: marker for marker in markers}
        needed: set[str] = set()
        spared = [] if proven is None else [m for m in markers if m.generation >= proven]
        for marker in [*spared, *self._kept(markers)]:
            # What is broken already is no reason to remove what it may still name.
            needed |= {other.directory for other in needed_of(marker, by_directory)}
        return [marker for marker in markers if marker.directory not in needed]

    def _kept(self, markers: Sequence[CommitMarker]) -> list[CommitMarker]:
        newest = markers[-1]
        kept = [newest, *[m for m in markers if not m.flags][-1:]]
        if self.last is not None:
            kept += markers[-self.last :]
        if self.every is not None:
            kept += [m for m in markers if m.generation % self.every == 0]
        if self.hours is not None:
            kept += [m for m in markers if newest.created_unix - m.created_unix <= self.hours * 3600]
        if self.best is not None:
            kept += self._best(markers, *self.best)
        return kept

    @staticmethod
    def _best(markers: Sequence[CommitMarker], metric: str, mode: Mode, count: int) -> list[CommitMarker]:
        # NaN is neither small nor large. Of equal ones the newer is better.
        rated = [m for m in markers if (value := m.metrics.get(metric)) is not None and value == value]
        sign = 1 if mode == "max" else -1
        return sorted(rated, key=lambda m: (sign * m.metrics[metric], m.generation))[-count:]


def retire(
    folder: CheckpointFolder, retention: Retention, *, proven: int | None = None
) -> list[CommitMarker]:
    """Remove what the rules do not keep; to be called when a newer checkpoint is complete.

    `proven` is as for :meth:`Retention.removable`.

    Returns
    -------
    list of CommitMarker
        What was removed.

    Raises
    ------
    TierError
        If the object tier refused; what was removed until then is gone entirely or will be next time.
    """
    if retention.keeps_all:
        return []
    folder.finish_removals()
    survey = folder.survey()
    if survey.damaged:
        # It may be a newer version's, and need any of the others.
        log.warning(
            "nothing is removed from %s while a commit marker cannot be read: %s",
            folder.store.location,
            survey.damaged[0].path,
        )
        return []
    removed = retention.removable(survey.committed, proven=proven)
    # The newest first: nothing goes before what needs it.
    for marker in reversed(removed):
        folder.remove(marker.directory)
        log.info("generation %d (%s) was removed from the object tier", marker.generation, marker.tag)
    return removed

"""What the object tier says of a checkpoint that all ranks have: a small file beside the ranks' folders."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any, Final

from fastcheck_dask.errors import (
    CommitConflictError,
    CorruptDataError,
    FastCheckError,
    ShardUnavailableError,
    UnknownFormatError,
)
from fastcheck_dask.ids import check_name, directory_name, joined
from fastcheck_dask.layout.manifest import parse_json
from fastcheck_dask.layout.zarr_tree import PRIVATE
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store

log = logging.getLogger(__name__)

FORMAT: Final = "fastcheck-joint"
FORMAT_VERSION: Final = 1
_FOLDER: Final = f"{PRIVATE}/joint"
_SUFFIX: Final = ".json"


@dataclass(frozen=True)
class JointMarker:
    """A checkpoint of which every rank's part is in its folder, with the rank's own commit marker."""

    number: int
    tag: str
    world_size: int
    created_unix: float
    #: By rank.
    tokens: tuple[str, ...]
    generations: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """Return the marker as canonical JSON."""
        document = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "joint marker") -> JointMarker:
        """Undo :meth:`to_bytes`.

        Raises
        ------
        UnknownFormatError
            If it is not a joint marker, or of a newer format.
        CorruptDataError
            If a field is missing or cannot be right.
        """
        document = parse_json(data, where)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise UnknownFormatError(f"{where}: not a joint marker")
        if document.get("version") != FORMAT_VERSION:
            raise UnknownFormatError(
                f"{where}: format version {document.get('version')!r}, this FastCheck reads "
                f"{FORMAT_VERSION}; upgrade it"
            )
        try:
            fields: dict[str, Any] = {name: document[name] for name in cls.__dataclass_fields__}
            fields["tokens"], fields["generations"] = tuple(fields["tokens"]), tuple(fields["generations"])
            marker = cls(**fields)
            marker._check()
        except (KeyError, TypeError, ValueError, FastCheckError) as error:
            raise CorruptDataError(f"{where}: damaged ({type(error).__name__}: {error})") from error
        return marker

    def _check(self) -> None:
        check_name(self.tag, "tag")
        for value in (self.number, self.world_size, *self.generations):
            if type(value) is not int or not 0 <= value < 2**62:
                raise ValueError(f"{value!r} is no number")
        if not all(isinstance(token, str) for token in self.tokens):
            raise TypeError("a token is no text")
        if not len(self.tokens) == len(self.generations) == self.world_size:
            raise ValueError(f"{len(self.tokens)} parts of {self.world_size} ranks")


class JointFolder:
    """The joint markers of one location, and the ranks' folders below it. Blocks; any thread may call.

    Parameters
    ----------
    location : str
        The checkpoint directory of all ranks.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._store = open_store(location)

    def markers(self) -> list[JointMarker]:
        """Return all markers that can be read, by number."""
        found = []
        for path in self._store.list(_FOLDER):
            if path.endswith(_SUFFIX) and not path.rpartition("/")[2].startswith("."):
                where = f"{path} in {self.location}"
                try:
                    found.append(JointMarker.from_bytes(self._store.read(path), where=where))
                except (CorruptDataError, ShardUnavailableError) as error:
                    log.warning("skipped a joint marker: %s", error)
        return sorted(found, key=lambda marker: marker.number)

    def publish(self, marker: JointMarker) -> bool:
        """Write a marker, if every rank's folder has its part; return whether it is there. Idempotent.

        Raises
        ------
        CommitConflictError
            If that number has another marker.
        """
        path = f"{_FOLDER}/{directory_name(marker.number, marker.tag)}{_SUFFIX}"
        if not self._store.exists(path):
            if self.lacking(marker):
                return False
            self._store.create(path, marker.to_bytes())
        present = JointMarker.from_bytes(self._store.read(path), where=f"{path} in {self.location}")
        if present.tokens != marker.tokens:
            raise CommitConflictError(f"{path} in {self.location} is the marker of another checkpoint")
        return True

    def lacking(self, marker: JointMarker) -> list[int]:
        """Return the ranks whose folder does not have its part, complete."""
        lacking = []
        for rank, (token, generation) in enumerate(zip(marker.tokens, marker.generations, strict=True)):
            found = self.folder(rank).marker(directory_name(generation, marker.tag))
            if found is None or found.token != token:
                lacking.append(rank)
        return lacking

    def folder(self, rank: int) -> CheckpointFolder:
        """Return the checkpoints of one rank."""
        return CheckpointFolder(open_store(location_of_rank(self.location, rank)))


def location_of_rank(location: str, rank: int) -> str:
    """Return where one rank's checkpoints lie in the object tier.

    >>> location_of_rank("/data/run", 3)
    '/data/run/rank-00003'
    """
    return joined(location, f"rank-{rank:05d}")

"""What the object tier says of a checkpoint that all ranks have: a small file beside the ranks' folders."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

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
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, DamagedMarker
from fastcheck_dask.tiers.object_store import open_store

log = logging.getLogger(__name__)

FORMAT: Final = "fastcheck-joint"
FORMAT_VERSION: Final = 1
_FOLDER: Final = f"{PRIVATE}/joint"
#: With rank 0, without whose part there is nothing to be proven.
_COPIES: Final = f"rank-00000/{PRIVATE}/joint-copies"
_SUFFIX: Final = ".json"
_RANK: Final = re.compile(r"rank-([0-9]{5,})\Z")


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
        """Return the marker as canonical JSON, with a digest of all the rest of it."""
        return _canonical(self._fields | {"sha256": hashlib.sha256(self._without_digest).hexdigest()})

    @property
    def _without_digest(self) -> bytes:
        """What earlier releases wrote."""
        return _canonical(self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "joint marker") -> JointMarker:
        """Undo :meth:`to_bytes`.

        Raises
        ------
        UnknownFormatError
            If it is not a joint marker, or of a newer format.
        CorruptDataError
            If a field is missing or cannot be right, or they are other bytes than were written. Earlier
            releases wrote no digest: there, a change that fits its place is not noticed.
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
        except (KeyError, TypeError, ValueError, OverflowError, FastCheckError) as error:
            raise CorruptDataError(f"{where}: damaged ({type(error).__name__}: {error})") from error
        wanted = marker.to_bytes() if "sha256" in document else marker._without_digest
        if data != wanted:
            raise CorruptDataError(
                f"{where}: damaged (it has {len(data)} bytes that are not what was written)"
            )
        return marker

    def _check(self) -> None:
        check_name(self.tag, "tag")
        for value in (self.number, self.world_size, *self.generations):
            if type(value) is not int or not 0 <= value < 2**62:
                raise ValueError(f"{value!r} is no number")
        if isinstance(self.created_unix, bool) or not math.isfinite(self.created_unix):
            raise ValueError(f"created_unix is {self.created_unix!r}")
        if not all(isinstance(token, str) for token in self.tokens):
            raise TypeError("a token is no text")
        if not len(self.tokens) == len(self.generations) == self.world_size:
            raise ValueError(f"{len(self.tokens)} parts of {self.world_size} ranks")


class JointSurvey(NamedTuple):
    """What the joint markers of a location say."""

    #: By number.
    markers: tuple[JointMarker, ...]
    damaged: tuple[DamagedMarker, ...]


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
        return list(self.survey().markers)

    def survey(self) -> JointSurvey:
        """Return all markers by number, and those that cannot be read with the reason why."""
        found, damaged = [], []
        for path in self._store.list(_FOLDER):
            name = path.rpartition("/")[2]
            if not path.endswith(_SUFFIX) or name.startswith("."):
                continue
            try:
                found.append(self._read(path))
            except ShardUnavailableError:
                # It was removed just now.
                continue
            except CorruptDataError as error:
                log.warning("skipped a joint marker: %s", error)
                damaged.append(DamagedMarker(path, str(error)))
        return JointSurvey(tuple(sorted(found, key=lambda marker: marker.number)), tuple(damaged))

    def _read(self, path: str) -> JointMarker:
        """Return the marker at a path, or the copy of one."""
        where = f"{path} in {self.location}"
        marker = JointMarker.from_bytes(self._store.read(path), where=where)
        if name_of(marker) != path.rpartition("/")[2]:
            raise CorruptDataError(f"{where}: is the marker of {marker.tag}, number {marker.number}")
        return marker

    def lost(self, sound: Iterable[JointMarker]) -> list[JointMarker]:
        """Return the markers that are damaged or gone, and nevertheless proven.

        That is so where there is a copy, and each rank's folder has exactly the part that the copy names.

        Parameters
        ----------
        sound : iterable of JointMarker
            Those that are known to be right; their copies are not read.
        """
        known = {name_of(marker) for marker in sound}
        found = []
        for path in self._store.list(_COPIES):
            if not path.endswith(_SUFFIX) or path.rpartition("/")[2] in known:
                continue
            try:
                marker = self._read(path)
                if not self.lacking(marker):
                    found.append(marker)
            except FastCheckError as error:
                log.warning("a copy of a joint marker proves nothing: %s", error)
        return sorted(found, key=lambda marker: marker.number)

    def restore(self, marker: JointMarker) -> None:
        """Write a marker that :meth:`lost` gave anew; `TierError` if that cannot be."""
        self._put(path_of(marker), marker)

    def _put(self, path: str, marker: JointMarker) -> None:
        self._store.write(path, marker.to_bytes())
        self._store.sync(path)

    def copy_fault(self, marker: JointMarker) -> str | None:
        """Say what is wrong with the copy of a marker that is there; None if nothing is.

        Earlier releases wrote neither digests nor copies.
        """
        try:
            data = self._store.read(copy_of(marker))
        except ShardUnavailableError as error:
            earlier = self._store.read(path_of(marker)) == marker._without_digest
            return None if earlier else str(error)
        if data in (marker.to_bytes(), marker._without_digest):
            return None
        return f"{len(data):,} bytes that are not those of the joint marker"

    def settle(self, marker: JointMarker) -> list[str]:
        """Write a marker that its parts prove, and its copy, where they have other bytes; return where."""
        written = []
        for path in (copy_of(marker), path_of(marker)):
            try:
                if self._store.read(path) == marker.to_bytes():
                    continue
            except ShardUnavailableError:
                pass
            self._put(path, marker)
            written.append(path)
        return written

    def publish(self, marker: JointMarker) -> bool:
        """Write a marker, if every rank's folder has its part; return whether it is there. Idempotent.

        One that is damaged is written anew.

        Raises
        ------
        CommitConflictError
            If that number has another marker.
        ShardUnavailableError, RootAwayError
            If a part of a rank needs what lies at the root of a group, and that is not there.
        """
        path = path_of(marker)
        where = f"{path} in {self.location}"
        data, present = None, None
        try:
            data = self._store.read(path)
            present = JointMarker.from_bytes(data, where=where)
        except ShardUnavailableError:
            pass
        except CorruptDataError:
            if data is None or _is_newer(data):
                raise
        if present is None:
            if self.lacking(marker):
                return False
            self._check_roots(marker)
            self._store.write(copy_of(marker), marker.to_bytes())
            if data is None:
                self._store.create(path, marker.to_bytes())
            else:
                self.restore(marker)
            present = JointMarker.from_bytes(self._store.read(path), where=where)
        if present.tokens != marker.tokens:
            raise CommitConflictError(f"{where} is the marker of another checkpoint")
        return True

    def lacking(self, marker: JointMarker) -> list[int]:
        """Return the ranks whose folder does not have its part, complete."""
        lacking = []
        for rank, (token, generation) in enumerate(zip(marker.tokens, marker.generations, strict=True)):
            found = self.folder(rank).marker(directory_name(generation, marker.tag))
            if found is None or found.token != token:
                lacking.append(rank)
        return lacking

    def _check_roots(self, marker: JointMarker) -> None:
        """Raise unless what the ranks' parts need of other locations is there."""
        for rank, generation in enumerate(marker.generations):
            folder = self.folder(rank)
            found = folder.marker(directory_name(generation, marker.tag))
            for link in () if found is None else found.refs:
                if link.location is not None:
                    folder.linked(link, by=f"{marker.tag} of rank {rank}")

    def folder(self, rank: int) -> CheckpointFolder:
        """Return the checkpoints of one rank."""
        return CheckpointFolder(open_store(location_of_rank(self.location, rank)))


def location_of_rank(location: str, rank: int) -> str:
    """Return where one rank's checkpoints lie in the object tier.

    >>> location_of_rank("/data/run", 3)
    '/data/run/rank-00003'
    """
    return joined(location, f"rank-{rank:05d}")


def rank_of_location(name: str) -> int | None:
    """Return the rank whose folder has this name; None for any other name.

    >>> rank_of_location("rank-00003"), rank_of_location("rank-3")
    (3, None)
    """
    found = _RANK.match(name)
    return int(found[1]) if found is not None and f"rank-{int(found[1]):05d}" == name else None


def path_of(marker: JointMarker) -> str:
    """Return where a joint marker lies, relative to the location."""
    return f"{_FOLDER}/{name_of(marker)}"


def copy_of(marker: JointMarker) -> str:
    """Return where the copy of a joint marker lies, relative to the location."""
    return f"{_COPIES}/{name_of(marker)}"


def name_of(marker: JointMarker) -> str:
    """Return the name of a joint marker's file."""
    return f"{directory_name(marker.number, marker.tag)}{_SUFFIX}"


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _is_newer(data: bytes) -> bool:
    try:
        document = parse_json(data, "joint marker")
    except CorruptDataError:
        return False
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return False
    version = document.get("version")
    return isinstance(version, int) and version > FORMAT_VERSION

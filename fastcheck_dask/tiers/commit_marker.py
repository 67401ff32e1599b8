"""The commit marker: the small file whose presence makes a checkpoint in the object tier visible. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from fastcheck_dask.config import Group
from fastcheck_dask.errors import CorruptDataError, FastCheckError, UnknownFormatError
from fastcheck_dask.ids import check_name, directory_name, is_url, joined
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest, parse_json
from fastcheck_dask.layout.notes import metrics_from_json, metrics_to_json

FORMAT = "fastcheck-commit"
#: A reader refuses every other. 4 refers to other locations, 3 has references or older groups, 2 a base,
#: metrics or flags; else it is 1.
FORMAT_VERSIONS = (1, 2, 3, 4)
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class BaseLink:
    """Which checkpoint another one needs."""

    generation: int
    tag: str
    token: str
    manifest_sha256: str
    #: Where it lies, as `ids.normalised` spells it; None: in the same location.
    location: str | None = None

    @property
    def directory(self) -> str:
        """Name of its directory."""
        return directory_name(self.generation, self.tag)

    @property
    def place(self) -> str:
        """Its directory, as who looks for it from the location of the other finds it."""
        return self.directory if self.location is None else joined(self.location, self.directory)

    def to_document(self) -> dict[str, Any]:
        """Return plain values; what lies in the same location says nothing of where."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_document(cls, found: Any) -> BaseLink:
        """Undo :meth:`to_document`; raises what :meth:`CommitMarker.from_bytes` translates."""
        named = {name: found[name] for name in cls.__dataclass_fields__ if name != "location"}
        link = cls(**named, location=found.get("location"))
        _check_identity(link)
        if link.location is not None:
            _check_location(link.location)
        return link


@dataclass(frozen=True)
class Needs:
    """Which other checkpoints one cannot be read without; nothing: it is whole."""

    #: What its deltas are made against; what did not change since lies there.
    base: BaseLink | None = None
    #: Where else chunks lie that did not change, oldest first.
    refs: tuple[BaseLink, ...] = ()

    @property
    def links(self) -> tuple[BaseLink, ...]:
        """All of them; a chunk lies with the first that has it."""
        return (*(() if self.base is None else (self.base,)), *self.refs)

    @property
    def shown(self) -> str | None:
        """The one that stock zarr's refusal names; None if the checkpoint is whole."""
        return self.links[0].place if self.links else None

    def to_document(self) -> dict[str, Any]:
        """Return plain values."""
        base = None if self.base is None else self.base.to_document()
        return {"base": base, "refs": [ref.to_document() for ref in self.refs]}

    @classmethod
    def from_document(cls, found: Any) -> Needs:
        """Undo :meth:`to_document`; raises what :meth:`CommitMarker.from_bytes` translates."""
        base = found.get("base")
        refs = found.get("refs", ())
        if not isinstance(refs, list | tuple):
            raise TypeError(f"refs are {refs!r:.200}")
        needs = cls(
            None if base is None else BaseLink.from_document(base),
            tuple(BaseLink.from_document(ref) for ref in refs),
        )
        if needs.base is not None and needs.base.location is not None:
            raise ValueError("a base lies in another location")
        return needs


WHOLE = Needs()


@dataclass(frozen=True)
class Mix:
    """That some groups of a checkpoint are going to be those of another one."""

    source: BaseLink
    #: All groups of the run, and the names of those that are older.
    groups: tuple[Group, ...]
    older: tuple[str, ...]

    @classmethod
    def from_document(cls, found: Any) -> Mix:
        """Read what ``asdict`` wrote; raises what :meth:`CommitMarker.from_bytes` translates."""
        groups = tuple(Group(**group) for group in found["groups"])
        return cls(BaseLink.from_document(found["source"]), groups, tuple(map(str, found["older"])))


@dataclass(frozen=True)
class Apart:
    """That some groups of a checkpoint are going to lie at roots of their own."""

    #: All groups of the run.
    groups: tuple[Group, ...]
    #: For each group that does, its name and the checkpoint that is there or is to be written.
    links: tuple[tuple[str, BaseLink], ...]

    def to_document(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "groups": [asdict(group) for group in self.groups],
            "links": {name: link.to_document() for name, link in self.links},
        }

    @classmethod
    def from_document(cls, found: Any) -> Apart:
        """Undo :meth:`to_document`; raises what :meth:`CommitMarker.from_bytes` translates."""
        groups = tuple(Group(**group) for group in found["groups"])
        links = tuple((str(name), BaseLink.from_document(link)) for name, link in found["links"].items())
        if any(link.location is None for _, link in links):
            raise ValueError("a group lies apart, and it is not said where")
        return cls(groups, links)


@dataclass(frozen=True)
class Plan:
    """How a checkpoint is going to lie in the object tier, as its first author says."""

    #: Those at roots of their own are among the references.
    needs: Needs = WHOLE
    mix: Mix | None = None
    apart: Apart | None = None


@dataclass(frozen=True)
class CommitMarker:
    """What a commit marker says: whose checkpoint it is, and which manifest is meant."""

    run: str
    generation: int
    tag: str
    #: By which the author recognises its own marker.
    token: str
    manifest_sha256: str
    raw_bytes: int
    created_unix: float
    #: Without base and references every chunk lies in its own directory, whole.
    base: BaseLink | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: Why it is not taken for healthy; see `layout.notes`.
    flags: tuple[str, ...] = ()
    #: Other checkpoints that have chunks of it.
    refs: tuple[BaseLink, ...] = ()
    #: Names of the groups that are of another step than the rest.
    older: tuple[str, ...] = ()

    @property
    def needs(self) -> Needs:
        """The checkpoints that it needs."""
        return Needs(self.base, self.refs)

    @property
    def directory(self) -> str:
        """Name of the checkpoint's directory."""
        return directory_name(self.generation, self.tag)

    @property
    def called(self) -> str:
        """How messages call it."""
        return f"generation {self.generation} ({self.tag})"

    @property
    def link(self) -> BaseLink:
        """How another checkpoint names this one."""
        return BaseLink(self.generation, self.tag, self.token, self.manifest_sha256)

    @classmethod
    def of(cls, manifest: Manifest, manifest_bytes: bytes, *, needs: Needs = WHOLE) -> CommitMarker:
        """Return the marker that publishes a manifest, stored with the help of others or whole."""
        return cls(
            run=manifest.run,
            generation=manifest.generation,
            tag=manifest.tag,
            token=manifest.token,
            manifest_sha256=digest_of_manifest(manifest_bytes),
            raw_bytes=manifest.raw_bytes,
            created_unix=manifest.created_unix,
            base=needs.base,
            metrics=manifest.notes.metrics,
            flags=manifest.notes.flags,
            refs=needs.refs,
            older=tuple(sorted(manifest.notes.older)),
        )

    def to_bytes(self) -> bytes:
        """Return the marker as canonical JSON."""
        document: dict[str, Any] = asdict(self) | self.needs.to_document()
        document["metrics"] = metrics_to_json(self.metrics)
        document = {name: v for name, v in document.items() if name not in _OPTIONAL or v}
        document["format"] = FORMAT
        elsewhere = any(ref.location is not None for ref in self.refs)
        document["version"] = 4 if elsewhere else _version(document.keys())
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "commit marker") -> CommitMarker:
        """Undo :meth:`to_bytes`.

        Raises
        ------
        UnknownFormatError
            If it is not a commit marker, or of a newer format.
        CorruptDataError
            If a field is missing or cannot be right.
        """
        document = parse_json(data, where)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise UnknownFormatError(f"{where}: not a FastCheck commit marker")
        if document.get("version") not in FORMAT_VERSIONS:
            raise UnknownFormatError(
                f"{where}: format version {document.get('version')!r}, this FastCheck reads "
                f"{', '.join(map(str, FORMAT_VERSIONS))}; upgrade it"
            )
        try:
            needs = Needs.from_document(document)
            marker = cls(
                **{name: document[name] for name in cls.__dataclass_fields__.keys() - _OPTIONAL},
                base=needs.base,
                refs=needs.refs,
                metrics=metrics_from_json(document.get("metrics", {})),
                flags=tuple(document.get("flags", ())),
                older=tuple(document.get("older", ())),
            )
            marker._check()
        except (KeyError, TypeError, ValueError, OverflowError, FastCheckError) as error:
            raise CorruptDataError(f"{where}: damaged ({type(error).__name__}: {error})") from error
        return marker

    def _check(self) -> None:
        check_name(self.run, "run")
        _check_identity(self)
        _check_natural(self.raw_bytes, "raw_bytes")
        if isinstance(self.created_unix, bool) or not math.isfinite(self.created_unix):
            raise ValueError(f"created_unix is {self.created_unix!r}")
        if not all(isinstance(word, str) for word in (*self.flags, *self.older)):
            raise TypeError(f"flags are {self.flags!r}, older groups {self.older!r}")
        for link in self.needs.links:
            # What lies at another root is a checkpoint of its own, also of the same generation.
            if link.generation >= self.generation + (link.location is not None):
                raise ValueError(f"generation {self.generation} needs {link.generation}")


def _version(fields: Set[str]) -> int:
    return 3 if fields & {"refs", "older"} else 2 if fields & _OPTIONAL else 1


_OPTIONAL = frozenset(("base", "metrics", "flags", "refs", "older"))


def _check_identity(found: CommitMarker | BaseLink) -> None:
    check_name(found.tag, "tag")
    _check_natural(found.generation, "generation")
    if not isinstance(found.token, str):
        raise TypeError(f"token is {found.token!r}")
    if not _SHA256.match(found.manifest_sha256):
        raise ValueError(f"manifest_sha256 is {found.manifest_sha256!r}")


def _check_location(location: object) -> None:
    if not isinstance(location, str) or not (location.startswith("/") or is_url(location)):
        raise ValueError(f"a location is {location!r}, neither an absolute path nor a URL")


def _check_natural(value: Any, name: str) -> None:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{name} is {value!r}")

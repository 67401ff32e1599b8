"""The commit marker: the small file whose presence makes a checkpoint in the object tier visible. Pure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from fastcheck_dask.errors import CorruptDataError, FastCheckError, UnknownFormatError
from fastcheck_dask.ids import check_name, directory_name
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest, parse_json

FORMAT = "fastcheck-commit"
FORMAT_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


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

    @property
    def directory(self) -> str:
        """Name of the checkpoint's directory."""
        return directory_name(self.generation, self.tag)

    @classmethod
    def of(cls, manifest: Manifest, manifest_bytes: bytes) -> CommitMarker:
        """Return the marker that publishes a manifest."""
        return cls(
            run=manifest.run,
            generation=manifest.generation,
            tag=manifest.tag,
            token=manifest.token,
            manifest_sha256=digest_of_manifest(manifest_bytes),
            raw_bytes=manifest.raw_bytes,
            created_unix=manifest.created_unix,
        )

    def to_bytes(self) -> bytes:
        """Return the marker as canonical JSON."""
        document = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
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
        if document.get("version") != FORMAT_VERSION:
            raise UnknownFormatError(
                f"{where}: format version {document.get('version')!r}, this FastCheck reads "
                f"{FORMAT_VERSION}; upgrade it"
            )
        try:
            marker = cls(**{name: document[name] for name in cls.__dataclass_fields__})
            marker._check()
        except (KeyError, TypeError, ValueError, OverflowError, FastCheckError) as error:
            raise CorruptDataError(f"{where}: damaged ({type(error).__name__}: {error})") from error
        return marker

    def _check(self) -> None:
        check_name(self.run, "run")
        check_name(self.tag, "tag")
        for name in ("generation", "raw_bytes"):
            value: Any = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**62:
                raise ValueError(f"{name} is {value!r}")
        if not isinstance(self.token, str):
            raise TypeError(f"token is {self.token!r}")
        if not _SHA256.match(self.manifest_sha256):
            raise ValueError(f"manifest_sha256 is {self.manifest_sha256!r}")
        if isinstance(self.created_unix, bool) or not math.isfinite(self.created_unix):
            raise ValueError(f"created_unix is {self.created_unix!r}")

"""The manifest: everything a commit publishes about a checkpoint, as JSON that is checked when read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastcheck_dask.errors import CorruptDataError, FastCheckError, UnknownFormatError
from fastcheck_dask.ids import check_name
from fastcheck_dask.layout.casts import CAST_DTYPES, SOURCE_DTYPE
from fastcheck_dask.layout.chunks import MAX_DIMENSIONS, ArraySpec, Chunk, is_contiguous
from fastcheck_dask.layout.notes import Notes
from fastcheck_dask.layout.paths import is_safe
from fastcheck_dask.layout.stripes import MAX_PARITY, Layout, Stripe, parity_nbytes

FORMAT = "fastcheck-manifest"
#: A reader refuses every other. 2 has derived arrays, 3 has notes, 4 two parity shards, 5 older groups; 1 has
#: none of them.
FORMAT_VERSIONS = (1, 2, 3, 4, 5)
#: How a derived array is made of its source; see `layout.casts`.
_RULE = "cast"
#: A manifest is parsed whole: this bounds what a damaged length can make a reader allocate.
LIMIT_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Manifest:
    """What is in one checkpoint and where its chunks lie."""

    run: str
    generation: int
    tag: str
    token: str
    created_unix: float
    #: The typed JSON of the state tree; its leaves name arrays or carry their bits (see `layout.state`).
    tree: Any
    arrays: tuple[ArraySpec, ...]
    #: Digest of the raw bits of each chunk, the parity chunks included.
    digests: Mapping[str, str] = field(repr=False)
    #: None without a peer tier.
    layout: Layout | None = None
    #: Names of the storage nodes by shard, the parity nodes last.
    nodes: tuple[str, ...] = ()
    #: Metrics, and what is suspicious.
    notes: Notes = field(default_factory=Notes)

    @cached_property
    def chunks(self) -> dict[str, Chunk]:
        """The data chunks by key, in array order."""
        return {chunk.key: chunk for spec in self.arrays for chunk in spec.chunks}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Raw bytes of each data chunk."""
        return {key: chunk.nbytes for key, chunk in self.chunks.items()}

    @cached_property
    def sources(self) -> dict[str, str]:
        """The chunks of derived arrays, and the chunk that each is the cast of; they are in no stripe."""
        by_path = {spec.path: spec for spec in self.arrays}
        return {
            chunk.key: source.key
            for spec in self.arrays
            if spec.source is not None
            for chunk, source in zip(spec.chunks, by_path[spec.source].chunks, strict=True)
        }

    @cached_property
    def raw_bytes(self) -> int:
        """Raw bytes of all arrays; what is inline in the tree does not count."""
        return sum(spec.nbytes for spec in self.arrays)

    @cached_property
    def derived_bytes(self) -> int:
        """Raw bytes of the derived arrays."""
        return sum(spec.nbytes for spec in self.arrays if spec.source is not None)

    def nbytes_of(self, key: str) -> int:
        """Return the raw bytes of a data or parity chunk."""
        if key in self.sizes:
            return self.sizes[key]
        assert self.layout is not None
        return parity_nbytes(self.layout.position[key][0], self.sizes)

    def wanted_on(self, shard: int) -> dict[str, tuple[str, int]]:
        """Return digest and raw bytes of each chunk of a shard; parity shards come after the others."""
        keys = () if self.layout is None else self.layout.keys_of(shard)
        return {key: (self.digests[key], self.nbytes_of(key)) for key in keys}

    def to_bytes(self) -> bytes:
        """Return canonical JSON: equal manifests have equal bytes."""
        document = {
            "format": FORMAT,
            "version": self._version(),
            "run": self.run,
            "generation": self.generation,
            "tag": self.tag,
            "token": self.token,
            "created_unix": self.created_unix,
            "tree": self.tree,
            "arrays": [
                {
                    "path": spec.path,
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "chunk_shape": list(spec.chunk_shape),
                    "digests": [self.digests[chunk.key] for chunk in spec.chunks],
                    **({} if spec.source is None else {"derived": {"from": spec.source, "rule": _RULE}}),
                }
                for spec in self.arrays
            ],
            "layout": self._layout_document(),
            "nodes": list(self.nodes),
            **({"notes": self.notes.to_document()} if self.notes else {}),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    def _version(self) -> int:
        """Return the smallest version that has all there is: a reader that is older can read it, too."""
        if self.notes.older:
            return 5
        if self.layout is not None and self.layout.parity > 1:
            return 4
        derived = any(spec.source is not None for spec in self.arrays)
        return 3 if self.notes else 2 if derived else 1

    def _layout_document(self) -> dict[str, Any] | None:
        if self.layout is None:
            return None
        parity = self.layout.parity
        of_stripes = [[self.digests[key] for key in s.parity_keys(parity)] for s in self.layout.stripes]
        return {
            "shards": self.layout.shards,
            # One parity shard is as the versions before 4 say it.
            "parity": parity if parity > 1 else bool(parity),
            "stripes": [
                [s.id, list(s.members), digests if parity > 1 else digests[0] if parity else None]
                for s, digests in zip(self.layout.stripes, of_stripes, strict=True)
            ],
        }

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, where: str = "manifest") -> Manifest:
        """Read a manifest.

        Raises
        ------
        UnknownFormatError
            If it is not a manifest, or of a newer format.
        CorruptDataError
            If it is too large, names something twice, or contradicts itself.
        """
        if len(data) > LIMIT_BYTES:
            raise CorruptDataError(f"{where}: {len(data):,} bytes, at most {LIMIT_BYTES:,} are read")
        document = parse_json(bytes(data), where)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise UnknownFormatError(f"{where}: not a FastCheck manifest")
        if document.get("version") not in FORMAT_VERSIONS:
            raise UnknownFormatError(
                f"{where}: format version {document.get('version')!r}, this FastCheck reads "
                f"{', '.join(map(str, FORMAT_VERSIONS))}; upgrade it"
            )
        try:
            manifest = _build(cls, document)
            manifest.check()
        except FastCheckError as error:
            raise CorruptDataError(f"{where}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptDataError(f"{where}: damaged ({type(error).__name__}: {error})") from error
        return manifest

    def check(self) -> None:
        """Raise `CorruptDataError` unless arrays, digests, stripes and nodes fit each other."""
        names = {spec.path for spec in self.arrays}
        if len(names) != len(self.arrays):
            raise CorruptDataError("an array path stands twice")
        if any(spec.path[:end] in names for spec in self.arrays for end in _slashes(spec.path)):
            raise CorruptDataError("an array lies inside another")
        self._check_derived()
        expected = set(self.chunks)
        if self.layout is not None:
            placed = [key for s in self.layout.stripes for key in s.members if key is not None]
            if sorted(placed) != sorted(expected - self.sources.keys()):
                raise CorruptDataError("the stripes do not hold every chunk exactly once")
            if len(self.nodes) != self.layout.nodes_wanted:
                raise CorruptDataError(f"{len(self.nodes)} nodes for {self.layout.nodes_wanted} shards")
            expected |= {key for s in self.layout.stripes for key in s.parity_keys(self.layout.parity)}
        elif self.nodes:
            raise CorruptDataError(f"{len(self.nodes)} nodes and no layout")
        if set(self.digests) != expected:
            raise CorruptDataError("the digests do not name every chunk exactly once")

    def _check_derived(self) -> None:
        by_path = {spec.path: spec for spec in self.arrays}
        for spec in self.arrays:
            if spec.source is None:
                continue
            source = by_path.get(spec.source)
            if source is None or spec.dtype not in CAST_DTYPES or source.dtype != SOURCE_DTYPE:
                raise CorruptDataError(f"{spec.path} cannot be the cast of {spec.source!r:.200}")
            if (spec.shape, spec.chunk_shape) != (source.shape, source.chunk_shape):
                raise CorruptDataError(f"{spec.path} has other chunks than {spec.source}, its source")


def parse_json(data: bytes, where: str) -> Any:
    """Parse JSON, refusing names that stand twice in one object, and nesting that Python cannot follow."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CorruptDataError(f"{where}: a name stands twice in one JSON object")
        return found

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(data, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise UnknownFormatError(f"{where}: not JSON ({error})") from error


def digest_of_manifest(data: bytes) -> str:
    """Return the sha256 of a manifest's bytes, as commit records carry it."""
    return hashlib.sha256(data).hexdigest()


def _slashes(path: str) -> list[int]:
    return [index for index, letter in enumerate(path) if letter == "/"]


def _natural(value: object, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62:
        return value
    raise CorruptDataError(f"{what} is {value!r}, not a natural number")


def _text(value: object, what: str) -> str:
    if isinstance(value, str):
        return value
    raise CorruptDataError(f"{what} is {value!r}, not text")


def _moment(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise CorruptDataError(f"created_unix is {value!r}, not a time")


def _parity(value: object) -> int:
    if isinstance(value, bool) or (isinstance(value, int) and value == MAX_PARITY):
        return int(value)
    raise CorruptDataError(f"parity is {value!r:.80}, not true, false or {MAX_PARITY}")


def _array(entry: dict[str, Any]) -> tuple[ArraySpec, list[str]]:
    path = _text(entry["path"], "an array path")
    shape = tuple(_natural(n, f"shape of {path}") for n in entry["shape"])
    chunk_shape = tuple(_natural(n, f"chunk shape of {path}") for n in entry["chunk_shape"])
    if len(shape) > MAX_DIMENSIONS or not is_contiguous(shape, chunk_shape):
        raise CorruptDataError(f"{path}: chunk shape {chunk_shape} does not fit shape {shape}")
    if not is_safe(path):
        raise CorruptDataError(f"{path!r} cannot be the path of an array")
    spec = ArraySpec(path, _text(entry["dtype"], "dtype"), shape, chunk_shape, _source(entry, path))
    digests = [_text(d, f"digest of {path}") for d in entry["digests"]]
    if len(digests) != spec.chunk_count:
        raise CorruptDataError(f"{path}: {len(digests)} digests do not fit shape {shape}")
    return spec, digests


def _source(entry: dict[str, Any], path: str) -> str | None:
    if "derived" not in entry:
        return None
    if entry["derived"]["rule"] != _RULE:
        raise CorruptDataError(f"{path} is derived by {entry['derived']['rule']!r:.80}, an unknown rule")
    return _text(entry["derived"]["from"], f"the source of {path}")


def _layout(described: dict[str, Any], digests: dict[str, str]) -> Layout:
    """Read the stripes; the digests of the parity chunks are added to `digests`."""
    shards, parity = _natural(described["shards"], "shards"), _parity(described["parity"])
    stripes: dict[int, Stripe] = {}
    for number, members, of_parity in described["stripes"]:
        keys = tuple(None if m is None else _text(m, "a chunk") for m in members)
        stripe = Stripe(_natural(number, "a stripe"), keys)
        if len(keys) != shards or not any(keys) or stripe.id in stripes:
            raise CorruptDataError(f"stripe {number} stands twice or has no fit members")
        stripes[stripe.id] = stripe
        found = of_parity if isinstance(of_parity, list) else [of_parity][:parity]
        for key, digest in zip(stripe.parity_keys(parity), found, strict=True):
            digests[key] = _text(digest, "a parity digest")
    if shards < 1:
        raise CorruptDataError("a layout without shards")
    return Layout(shards, parity, tuple(stripes.values()))


def _build(cls: type[Manifest], document: dict[str, Any]) -> Manifest:
    digests: dict[str, str] = {}
    arrays = []
    for entry in document["arrays"]:
        spec, of_spec = _array(entry)
        arrays.append(spec)
        digests.update(zip((c.key for c in spec.chunks), of_spec, strict=True))
    layout = None if document["layout"] is None else _layout(document["layout"], digests)
    return cls(
        # Both become parts of paths in the tiers.
        run=check_name(document["run"], "run"),
        generation=_natural(document["generation"], "generation"),
        tag=check_name(document["tag"], "tag"),
        token=_text(document["token"], "token"),
        created_unix=_moment(document["created_unix"]),
        tree=document["tree"],
        arrays=tuple(arrays),
        digests=digests,
        layout=layout,
        nodes=tuple(_text(n, "a node") for n in document["nodes"]),
        notes=Notes.from_document(document.get("notes", {})),
    )

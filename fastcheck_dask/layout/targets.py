"""A live state that a checkpoint is loaded into: what fits, and how bits get into its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout import leaves
from fastcheck_dask.layout.chunks import ArraySpec, Chunk
from fastcheck_dask.layout.leaves import Bits, Leaf
from fastcheck_dask.layout.state import tensors_of
from fastcheck_dask.layout.tree import inline_bits, is_array, matcher, select, shape_of, walk, without

#: How many names of each kind a refusal gives.
_NAMED = 4


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, as one leaf shows it."""

    spec: ArraySpec
    #: Shape of the leaf, if it repeats what is stored.
    expand: tuple[int, ...] | None
    #: The bits of a tensor that stands in the tree.
    inline: bytes | None

    def __str__(self) -> str:
        return f"{self.spec.dtype} {self.expand or self.spec.shape}"

    def fits(self, leaf: Leaf) -> bool:
        """Say whether a live tensor takes the very bits."""
        return (leaf.dtype, leaf.shape, leaf.form.expand) == (self.spec.dtype, self.spec.shape, self.expand)


class Target:
    """The live tensors that receive one stored array. Any thread may call, one for each chunk.

    Parameters
    ----------
    spec : ArraySpec
        What is stored.
    tensors : sequence of torch.Tensor or ndarray
        Different memory, one at least; each has the stored shape, or repeats it.
    """

    def __init__(self, spec: ArraySpec, tensors: Sequence[Any]) -> None:
        self._spec = spec
        #: Memory of the first tensor, if chunks are byte ranges of it.
        self._bits = leaves.writable_bits(tensors[0])
        self._tensors = tensors

    def region(self, chunk: Chunk) -> Bits | None:
        """Return the memory of a chunk; None if it has none of its own that is contiguous and on the host."""
        return None if self._bits is None else self._bits[chunk.offset : chunk.offset + chunk.nbytes]

    def put(self, chunk: Chunk, bits: Bits) -> None:
        """Write a chunk to every tensor, except where `bits` is that memory."""
        index = self._spec.index_of(chunk)
        for tensor in self._tensors if self._bits is None else self._tensors[1:]:
            leaves.put_bits(tensor, index, bits)

    def get(self, chunk: Chunk) -> Bits:
        """Return a copy of the bits of a chunk."""
        bits = np.empty(chunk.nbytes, np.uint8)
        leaves.get_bits(self._tensors[0], self._spec.index_of(chunk), bits)
        return bits


@dataclass(frozen=True)
class Filling:
    """What of a checkpoint goes where in a live state."""

    #: Of the checkpoint, without the tensors that are not taken.
    tree: Any
    #: What is stored in chunks and taken.
    arrays: tuple[ArraySpec, ...]
    #: By the path of the array.
    targets: Mapping[str, Target]
    #: The live tensor of each leaf that is taken.
    live: Mapping[str, Any]
    #: Bits that stand in the tree, and the live tensors that receive them.
    _inline: tuple[tuple[bytes, Any], ...]

    def put_inline(self) -> None:
        """Write what stands in the tree."""
        for bits, tensor in self._inline:
            leaves.put_bits(tensor, (), np.frombuffer(bytearray(bits), np.uint8))


def match(
    tree: Any,
    arrays: Iterable[ArraySpec],
    state: Any,
    *,
    include: str | list[str] | None = None,
    strict: bool = True,
) -> Filling:
    """Find out what of a checkpoint goes where in a live state; nothing is changed.

    Parameters
    ----------
    tree, arrays : JSON, iterable of ArraySpec
        Of the manifest.
    state : object
        Nested containers whose tensors, on any device and of any strides, are to be filled.
    include : str or list of str, optional
        Patterns of leaf paths; of both sides only what matches counts.
    strict : bool
        If False, what is on one side only, or has another shape or dtype, is left alone.

    Raises
    ------
    LayoutError
        If something does not fit, or cannot be written. The message has the first few names of each kind.
    UnsupportedLeafError
        If the state holds something that could not be saved.
    """
    live = tensors_of(state)
    if include is not None:
        _, tree = select(tree, include)
        matches = matcher(include)
        live = {path: tensor for path, tensor in live.items() if matches(path)}
    stored = _stored(tree, {spec.path: spec for spec in arrays})
    known = {path: leaves.describe(tensor, path) for path, tensor in live.items()}
    taken = [path for path in stored if path in known and stored[path].fits(known[path])]
    if strict:
        _refuse_misfits(stored, known)
    elif len(taken) < len(stored):
        tree = without(tree, stored.keys() - set(taken))
    _refuse_unwritable({path: live[path] for path in taken})
    return _filling(tree, {p: (stored[p], live[p], known[p]) for p in taken})


def _filling(tree: Any, taken: Mapping[str, tuple[Stored, Any, Leaf]]) -> Filling:
    specs: dict[str, ArraySpec] = {}
    #: By array and identity: leaves that are the same view of the same memory are filled once.
    tensors: dict[str, dict[Any, Any]] = {}
    inline: dict[Any, tuple[bytes, Any]] = {}
    owners: dict[Any, tuple[str, str]] = {}
    for path, (stored, tensor, leaf) in taken.items():
        name = stored.spec.path
        other, owner = owners.setdefault(leaf.identity, (path, name))
        if owner != name:
            raise LayoutError(
                f"{other} and {path} are the same memory in the state given as into=, and two tensors in the "
                "checkpoint; nothing was changed: give each its own, or load without into="
            )
        if stored.inline is not None:
            inline[leaf.identity] = stored.inline, tensor
        else:
            specs[name] = stored.spec
            tensors.setdefault(name, {})[leaf.identity] = tensor
    _refuse_overlaps({path: (tensor, leaf) for path, (_, tensor, leaf) in taken.items()})
    return Filling(
        tree,
        tuple(specs.values()),
        {name: Target(spec, tuple(tensors[name].values())) for name, spec in specs.items()},
        {path: tensor for path, (_, tensor, _) in taken.items()},
        tuple(inline.values()),
    )


def _stored(tree: Any, specs: Mapping[str, ArraySpec]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for path, node in walk(tree):
        if is_array(node):
            expand = shape_of(node["expand"], path) if "expand" in node else None
            spec, bits = inline_bits(node, path) if "bits" in node else (specs[node["path"]], None)
            found[path] = Stored(spec, expand, bits)
    return found


def _refuse_misfits(stored: Mapping[str, Stored], known: Mapping[str, Leaf]) -> None:
    missing = [path for path in known if path not in stored]
    unexpected = [path for path in stored if path not in known]
    other = [
        f"{path} (checkpoint {stored[path]}, state {leaf.dtype} {leaf.form.expand or leaf.shape}"
        f"{', repeated' if leaf.form.expand != stored[path].expand else ''})"
        for path, leaf in known.items()
        if path in stored and not stored[path].fits(leaf)
    ]
    kinds = (
        ("missing in the checkpoint", missing),
        ("unexpected, the state has no such tensor", unexpected),
        ("of another shape or dtype", other),
    )
    said = [_few(what, names) for what, names in kinds if names]
    if said:
        raise LayoutError(
            f"the checkpoint does not fit the state given as into=: {'; '.join(said)}. Nothing was changed: "
            "give a state that was made as the saved one, or strict=False to take what fits"
        )


def _few(what: str, names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} {what}: {', '.join(names[:_NAMED])}{more}"


def _refuse_unwritable(live: Mapping[str, Any]) -> None:
    names = [path for path, tensor in live.items() if not leaves.is_writable(tensor)]
    if names:
        raise LayoutError(
            f"the state given as into= cannot be filled: {_few('read-only', names)}. Nothing was changed: "
            "give arrays that can be written"
        )


def _refuse_overlaps(live: Mapping[str, tuple[Any, Leaf]]) -> None:
    """Raise if two different views have memory in common: the one that is written last would win."""
    extents = sorted(
        (*extent, path) for path, (tensor, _) in live.items() if (extent := leaves.extent_of(tensor))
    )
    open_: list[tuple[Any, int, int, str]] = []
    for device, start, end, path in extents:
        open_ = [other for other in open_ if other[0] == device and other[2] > start]
        for *_, other in open_:
            (left, left_leaf), (right, right_leaf) = live[other], live[path]
            if left_leaf.identity != right_leaf.identity and leaves.share_elements(left, right):
                raise LayoutError(
                    f"{other} and {path} share memory in the state given as into=; nothing was changed: give "
                    "each its own, or load without into="
                )
        open_.append((device, start, end, path))

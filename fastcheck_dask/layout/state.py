"""A state and its tree: flatten before a save, unflatten after a load."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fastcheck_dask.errors import CorruptDataError, UnknownFormatError, UnsupportedLeafError
from fastcheck_dask.layout import leaves, paths, values
from fastcheck_dask.layout.chunks import CHUNK_BYTES, ArraySpec, chunk_shape_for
from fastcheck_dask.layout.dtypes import itemsize_of
from fastcheck_dask.layout.leaves import Bits, Form
from fastcheck_dask.layout.tree import (
    children,
    inline_arrays,
    inline_bits,
    is_array,
    leaf_paths,
    select,
    shape_of,
)
from fastcheck_dask.layout.values import MAX_DEPTH

__all__ = [
    "FlatState",
    "flatten",
    "inline_arrays",
    "leaf_paths",
    "refill",
    "select",
    "tensors_of",
    "unflatten",
]

#: Arrays up to this size stand in the tree itself.
INLINE_BYTES = 256

_FACTORIES: dict[str | None, Callable[[], Any] | None] = {
    None: None,
    **{kind.__name__: kind for kind in (int, float, list, dict, set, str, bool)},
}


@dataclass(frozen=True)
class FlatState:
    """A state taken apart."""

    #: Typed JSON; see the module.
    tree: Any
    #: What is stored in chunks, in the order of the state.
    arrays: tuple[ArraySpec, ...]
    #: The live tensor of each entry of `arrays`, to be given to `leaves.copy_bits`.
    sources: tuple[Any, ...]


def flatten(state: Any, *, chunk_bytes: int = CHUNK_BYTES) -> FlatState:
    """Take a state apart.

    Plain values and tiny tensors are copied; all other tensors are only named, and have to be copied by the
    caller (`leaves.copy_bits`) before the training goes on. Two leaves that are the same view of the same
    memory are stored once; views that merely overlap are stored each.

    Parameters
    ----------
    state : object
        Nested containers of plain values, numpy arrays and torch tensors.
    chunk_bytes : int
        Largest chunk, in bytes.

    Returns
    -------
    FlatState

    Raises
    ------
    UnsupportedLeafError
        If anything in it could not come back exactly without running code; also cycles, and containers
        nested deeper than 200. The error names the path.
    """
    flattener = _Flattener(chunk_bytes)
    tree = flattener.visit(state, "", 0)
    return FlatState(tree, tuple(flattener.arrays), tuple(flattener.sources))


def tensors_of(state: object) -> dict[str, Any]:
    """Return the live tensors and arrays of a state by their paths; raises as `flatten` does."""
    finder = _Finder(CHUNK_BYTES)
    finder.visit(state, "", 0)
    return finder.found


@lru_cache(maxsize=4096)
def _chunk_shape(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    return chunk_shape_for(shape, itemsize, chunk_bytes)


class _Flattener:
    """One pass over a state."""

    def __init__(self, chunk_bytes: int) -> None:
        self.arrays: list[ArraySpec] = []
        self.sources: list[Any] = []
        #: The nodes of the tensors seen, without their form, by identity.
        self.stored: dict[Hashable, dict[str, Any]] = {}
        self._chunk_bytes = chunk_bytes
        self._open: set[int] = set()
        torch = leaves.loaded_torch()
        self._tensor: Any = torch.Tensor if torch is not None else ()
        self._encoders = values.encoders(torch)
        self._containers: dict[type, Callable[[Any, str, int], Any]] = {
            list: self._list,
            tuple: self._tuple,
            dict: self._dict,
            collections.OrderedDict: self._ordered,
            collections.Counter: self._counter,
            collections.defaultdict: self._defaultdict,
            collections.deque: self._deque,
        }

    def visit(self, value: Any, path: str, depth: int) -> Any:
        """Return the piece of tree for `value`."""
        kind = type(value)
        encoder = self._encoders.get(kind)
        if encoder is not None:
            return encoder(value, path or paths.ROOT)
        container = self._containers.get(kind)
        if container is None:
            if isinstance(value, (np.ndarray, self._tensor)):
                return self._array(value, path or paths.ROOT)
            raise values.refusal(value, path)
        if depth >= MAX_DEPTH:
            raise UnsupportedLeafError(
                path, f"containers nested deeper than {MAX_DEPTH}", "flatten the state"
            )
        if id(value) in self._open:
            raise UnsupportedLeafError(path, "a container that holds itself", "break the cycle")
        self._open.add(id(value))
        found = container(value, path, depth + 1)
        self._open.remove(id(value))
        return found

    def _list(self, value: Iterable[Any], path: str, depth: int) -> list[Any]:
        visit, prefix = self.visit, f"{path}/" if path else ""
        # Over a copy: the state may grow while it is read, and a shorter one must not be half new.
        return [visit(child, f"{prefix}{index}", depth) for index, child in enumerate(tuple(value))]

    def _tuple(self, value: tuple[Any, ...], path: str, depth: int) -> Any:
        return values.node("tuple", self._list(value, path, depth))

    def _deque(self, value: collections.deque[Any], path: str, depth: int) -> Any:
        return {"t": "deque", "v": self._list(value, path, depth), "maxlen": value.maxlen}

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
        visit, prefix = self.visit, f"{path}/" if path else ""
        items = list(value.items())
        keys = [key if type(key) is str and key.isascii() else _key(key, path) for key, _ in items]
        names = paths.components(keys)
        found = [visit(child, prefix + name, depth) for name, (_, child) in zip(names, items, strict=True)]
        return {"t": "dict", "k": keys, "v": found}

    def _ordered(self, value: collections.OrderedDict[Any, Any], path: str, depth: int) -> Any:
        found = self._dict(value, path, depth) | {"t": "OrderedDict"}
        # torch keeps the versions of modules in an attribute of a state_dict.
        extra = dict(vars(value))
        meta = extra.pop("_metadata", None)
        _refuse_attributes(extra, value, path)
        if meta is not None:
            inner = _Flattener(self._chunk_bytes)
            try:
                encoded = inner.visit(meta, path, depth)
            except UnsupportedLeafError:
                return found
            if not inner.stored:
                found["meta"] = encoded
        return found

    def _counter(self, value: collections.Counter[Any], path: str, depth: int) -> Any:
        _refuse_attributes(vars(value), value, path)
        return self._dict(value, path, depth) | {"t": "Counter"}

    def _defaultdict(self, value: collections.defaultdict[Any, Any], path: str, depth: int) -> Any:
        factory = value.default_factory
        for name, known in _FACTORIES.items():
            if factory is known:
                return self._dict(value, path, depth) | {"t": "defaultdict", "factory": name}
        raise values.refusal(value, path)

    def _array(self, value: Any, path: str) -> dict[str, Any]:
        leaf = leaves.describe(value, path)
        stored = self.stored.get(leaf.identity)
        if stored is None:
            stored = self.stored[leaf.identity] = self._store(value, leaf, path)
        found = {"t": leaf.form.kind, **stored}
        if leaf.form.requires_grad:
            found["grad"] = True
        if leaf.form.expand is not None:
            found["expand"] = list(leaf.form.expand)
        return found

    def _store(self, value: Any, leaf: leaves.Leaf, path: str) -> dict[str, Any]:
        nbytes = leaf.nbytes
        if nbytes > INLINE_BYTES and leaf.shape:
            chunk_shape = _chunk_shape(leaf.shape, itemsize_of(leaf.dtype), self._chunk_bytes)
            self.arrays.append(ArraySpec(path, leaf.dtype, leaf.shape, chunk_shape))
            self.sources.append(value)
            return {"path": path}
        bits = np.empty(nbytes, np.uint8)
        leaves.copy_bits(value, bits)
        text = values.to_base64(bits.data)
        return {"path": path, "dtype": leaf.dtype, "shape": list(leaf.shape), "bits": text}


class _Finder(_Flattener):
    """One pass over a state that only collects its tensors."""

    def __init__(self, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self.found: dict[str, Any] = {}

    def _array(self, value: Any, path: str) -> dict[str, Any]:
        self.found[path] = value
        return {}


def _key(key: Any, path: str) -> Any:
    try:
        return values.encode_hashable(key, path)
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(path, f"{error.got} as a key of a dict", error.advice) from error


def _refuse_attributes(extra: dict[str, Any], value: object, path: str) -> None:
    if extra:
        raise UnsupportedLeafError(
            path, f"a {type(value).__name__} with the attributes {sorted(extra)[:4]}", "save them under keys"
        )


def unflatten(tree: Any, get: Callable[[ArraySpec], Bits], *, arrays: Iterable[ArraySpec]) -> Any:
    """Put a state together again.

    Parameters
    ----------
    tree : JSON
        As `flatten` made it or `select` pruned it.
    get : callable
        Returns the raw bits of an array (ndarray of uint8, shape (nbytes,)). It is asked once for each array
        that the tree names, in order. The tensors wrap that memory if it is writable: the caller hands
        it over.
    arrays : iterable of ArraySpec
        Of the manifest.

    Returns
    -------
    object
        Leaves that were one when saved are one again. Tensors are on the CPU.

    Raises
    ------
    CorruptDataError
        If tree, arrays and bits do not fit each other; `UnknownFormatError` for what a newer version wrote.
    ConfigError
        If it needs torch, which cannot be imported.
    """
    builder = _Unflattener({spec.path: spec for spec in arrays}, get)
    return builder.visit(tree, "", 0)


class _Unflattener:
    """One pass over a tree."""

    def __init__(self, specs: dict[str, ArraySpec], get: Callable[[ArraySpec], Bits]) -> None:
        self._specs, self._get = specs, get
        #: Raw bits, plain tensors and finished leaves that were made already.
        self._bits: dict[str, tuple[ArraySpec, bytes | None, Bits]] = {}
        self._bases: dict[tuple[str, str], Any] = {}
        self._leaves: dict[tuple[str, Form], Any] = {}

    def visit(self, node: Any, path: str, depth: int) -> Any:
        """Return the value of one piece of tree."""
        kind = type(node)
        if kind is not list and kind is not dict:
            return values.decode(node)
        inner = children(node, path, depth)
        if inner is not None:
            return _build(node, [self.visit(child, p, depth + 1) for p, child in inner], self, path, depth)
        if is_array(node):
            return self._array(node, path or paths.ROOT)
        try:
            return values.decode(node)
        except UnknownFormatError as error:
            raise UnknownFormatError(f"tree at {path!r}: {error}") from error
        except CorruptDataError as error:
            raise CorruptDataError(f"tree at {path!r}: {error}") from error

    def _array(self, node: dict[str, Any], path: str) -> Any:
        grad = node.get("grad", False)
        if type(grad) is not bool:
            raise CorruptDataError(f"tree at {path!r}: a gradient flag is {grad!r}")
        expand = shape_of(node["expand"], path) if "expand" in node else None
        form = Form(node["t"], grad, expand)
        spec, bits = self._bits_of(node, path)
        if (spec.path, form) not in self._leaves:
            library = leaves.LIBRARY[form.kind]
            if (library, spec.path) not in self._bases:
                base = leaves.revive(library, bits, dtype=spec.dtype, shape=spec.shape)
                self._bases[library, spec.path] = base
            _check_expand(spec.shape, expand, path)
            self._leaves[spec.path, form] = leaves.dress(self._bases[library, spec.path], form)
        return self._leaves[spec.path, form]

    def _bits_of(self, node: dict[str, Any], path: str) -> tuple[ArraySpec, Bits]:
        name = node["path"]
        if not isinstance(name, str):
            raise CorruptDataError(f"tree at {path!r}: the path of an array is {name!r}")
        found = self._bits.get(name)
        if "bits" in node:
            spec, inline = inline_bits(node, path)
            if found is None:
                found = self._bits[name] = spec, inline, np.frombuffer(bytearray(inline), np.uint8)
            if name in self._specs or found[:2] != (spec, inline):
                raise CorruptDataError(f"tree at {path!r}: {name!r} is two different tensors")
        elif found is None:
            if name not in self._specs or node.keys() & {"dtype", "shape"}:
                raise CorruptDataError(f"tree at {path!r}: there is no array {name!r}")
            spec = self._specs[name]
            found = self._bits[name] = spec, None, self._get(spec)
        return found[0], found[2]


def refill(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Put a state together again around tensors that are there.

    Parameters
    ----------
    tree : JSON
        As for `unflatten`.
    tensors : mapping of str to tensor
        By the path of each leaf of the tree that is one.

    Raises
    ------
    CorruptDataError
        As `unflatten` does.
    """
    return _Refiller(tensors).visit(tree, "", 0)


class _Refiller(_Unflattener):
    """One pass over a tree whose tensors are there."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__({}, lambda spec: np.empty(spec.nbytes, np.uint8))
        self._tensors = tensors

    def _array(self, node: dict[str, Any], path: str) -> Any:  # noqa: ARG002
        return self._tensors[path]


def _check_expand(stored: tuple[int, ...], expand: tuple[int, ...] | None, path: str) -> None:
    if expand is None:
        return
    if len(expand) != len(stored) or any(
        whole != n and n != 1 for n, whole in zip(stored, expand, strict=True)
    ):
        raise CorruptDataError(f"tree at {path!r}: shape {stored} does not expand to {expand}")


def _build(node: Any, found: list[Any], builder: _Unflattener, path: str, depth: int) -> Any:
    """Make a container of its children."""
    if type(node) is list:
        return found
    kind = node["t"]
    if kind == "tuple":
        return tuple(found)
    if kind == "deque":
        return _build_deque(node["maxlen"], found, path)
    plain = dict(zip(map(values.decode_hashable, node["k"]), found, strict=True))
    if len(plain) != len(found):
        raise CorruptDataError(f"tree at {path!r}: a key stands twice")
    if kind == "Counter":
        return collections.Counter(plain)
    if kind == "defaultdict":
        factory = node["factory"]
        if not isinstance(factory, str | None) or factory not in _FACTORIES:
            raise UnknownFormatError(f"tree at {path!r}: unknown default factory {str(factory)[:40]!r}")
        return collections.defaultdict(_FACTORIES[factory], plain)
    if kind == "OrderedDict":
        ordered = collections.OrderedDict(plain)
        if "meta" in node:
            ordered._metadata = builder.visit(node["meta"], path, depth + 1)  # type: ignore[attr-defined]
        return ordered
    return plain


def _build_deque(maxlen: Any, found: list[Any], path: str) -> collections.deque[Any]:
    if maxlen is not None and (type(maxlen) is not int or not len(found) <= maxlen < 2**62):
        raise CorruptDataError(f"tree at {path!r}: a deque has maxlen {maxlen!r}")
    return collections.deque(found, maxlen)

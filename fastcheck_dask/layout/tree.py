"""The tree of a state, as it is stored: its structure, checked while it is read, and the choice of leaves.

A tree is typed JSON. Plain values are as `layout.values` writes them. A list is a JSON array; the other
sequences are ``{"t": "tuple", "v": [...]}``; dicts are ``{"t": "dict", "k": [...], "v": [...]}``; tensors are
``{"t": "tensor", "path": ...}``, with ``dtype``, ``shape`` and ``bits`` if they are stored inline, and else
named by an `ArraySpec`. The format is described in ``docs/formats/manifest.md``.

The input comes from storage and may be anything: every function raises `CorruptDataError` for what does not
fit, and `UnknownFormatError` for what a newer version may have written.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from fastcheck_dask.errors import CorruptDataError, LayoutError, UnknownFormatError
from fastcheck_dask.layout import leaves, paths, values
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.values import MAX_DEPTH

SEQUENCES = frozenset(("tuple", "deque"))
MAPPINGS = frozenset(("dict", "OrderedDict", "Counter", "defaultdict"))
_FIELDS = {
    "tuple": ({"t", "v"}, set()),
    "deque": ({"t", "v", "maxlen"}, set()),
    "dict": ({"t", "k", "v"}, set()),
    "OrderedDict": ({"t", "k", "v"}, {"meta"}),
    "Counter": ({"t", "k", "v"}, set()),
    "defaultdict": ({"t", "k", "v", "factory"}, set()),
    **{
        kind: (
            {"t", "path"},
            {"dtype", "shape", "bits", "grad", "expand"} - ({"grad"} if of == "numpy" else set()),
        )
        for kind, of in leaves.LIBRARY.items()
    },
}


def _kind_of(node: dict[str, Any], path: str) -> str:
    """Return the kind of a node whose fields are the ones that its kind has."""
    kind = node.get("t")
    if values.is_value(kind):
        return str(kind)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise UnknownFormatError(
            f"tree at {path!r}: unknown kind {str(kind)[:40]!r}; a newer FastCheck may know it"
        )
    needed, optional = _FIELDS[kind]
    if not needed <= node.keys() <= needed | optional:
        odd = sorted(map(str, node.keys() ^ needed))[:8]
        raise UnknownFormatError(f"tree at {path!r}: a {kind} does not fit its fields ({odd})")
    return kind


def children(node: Any, path: str, depth: int) -> list[tuple[str, Any]] | None:
    """Return the paths and children of a container that has any, None for a leaf."""
    if type(node) is list:
        names: Iterable[str] = map(str, range(len(node)))
        inner = node
    elif type(node) is dict:
        kind = _kind_of(node, path)
        if kind not in SEQUENCES and kind not in MAPPINGS:
            return None
        inner = node["v"]
        if not isinstance(inner, list):
            raise CorruptDataError(f"tree at {path!r}: the contents of a {kind} are not a list")
        names = map(str, range(len(inner))) if kind in SEQUENCES else _names(node["k"], len(inner), path)
    else:
        return None
    if depth >= MAX_DEPTH:
        raise CorruptDataError(f"tree at {path!r}: nested deeper than {MAX_DEPTH}")
    prefix = f"{path}/" if path else ""
    return [(prefix + name, child) for name, child in zip(names, inner, strict=True)]


def _names(keys: Any, count: int, path: str) -> list[str]:
    if not isinstance(keys, list) or len(keys) != count:
        raise CorruptDataError(f"tree at {path!r}: {count} values do not fit the keys")
    try:
        return paths.components(keys)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"tree at {path!r}: a key is damaged ({error})") from error


def walk(node: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield path and node of each leaf, empty containers included, in order."""
    inner = children(node, path, depth)
    if not inner:
        yield path or paths.ROOT, node
        return
    for child_path, child in inner:
        if type(child) is list or type(child) is dict:
            yield from walk(child, child_path, depth + 1)
        else:
            yield child_path, child


def leaf_paths(tree: Any) -> list[str]:
    """Return the path of each leaf, plain values and empty containers included, in order.

    Raises
    ------
    CorruptDataError
        If the tree is damaged; `UnknownFormatError` if a newer version wrote it.
    """
    return [path for path, _ in walk(tree)]


def inline_arrays(tree: Any) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """Yield path, dtype, shape and bits of each tensor that stands in the tree, each stored one once.

    Raises
    ------
    CorruptDataError
        If the tree is damaged.
    """
    seen = set()
    for path, node in walk(tree):
        if is_array(node) and "bits" in node:
            spec, bits = inline_bits(node, path)
            if spec.path not in seen:
                seen.add(spec.path)
                yield spec.path, spec.dtype, spec.shape, bits


def is_array(node: Any) -> bool:
    """Say whether a leaf that `children` or `walk` checked is a tensor or an array."""
    return type(node) is dict and node["t"] in leaves.LIBRARY


def shape_of(value: Any, path: str) -> tuple[int, ...]:
    """Return a stored shape."""
    if isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**62 for n in value):
        return tuple(value)
    raise CorruptDataError(f"tree at {path!r}: a shape is damaged")


def inline_bits(node: dict[str, Any], path: str) -> tuple[ArraySpec, bytes]:
    """Return what a tensor that stands in the tree is, and its bits."""
    try:
        # Tiers write it under this path, as they do with arrays.
        if not isinstance(node["path"], str) or not paths.is_safe(node["path"]):
            raise ValueError("its path is unfit")
        shape = shape_of(node["shape"], path)
        spec = ArraySpec(node["path"], node["dtype"], shape, shape)
        bits = values.from_base64(node["bits"])
        wanted = spec.nbytes
    except LayoutError as error:
        raise UnknownFormatError(f"tree at {path!r}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"tree at {path!r}: an inline tensor is damaged ({error})") from error
    if len(bits) != wanted:
        raise CorruptDataError(f"tree at {path!r}: {len(bits)} bytes inline, {wanted} expected")
    return spec, bits


def select(tree: Any, patterns: str | Iterable[str]) -> tuple[set[str], Any]:
    """Choose leaves by their paths.

    Parameters
    ----------
    tree : JSON
        Of a whole state.
    patterns : str or iterable of str
        As `fnmatch.fnmatchcase` reads them, against whole leaf paths; "*" crosses "/".

    Returns
    -------
    set of str
        Paths of the arrays that the chosen leaves need.
    JSON
        The tree of the chosen leaves: entries of dicts without one are gone, positions of sequences without
        one are None.

    Raises
    ------
    LayoutError
        If no leaf matches.
    """
    arrays: set[str] = set()
    pruned = _prune(tree, "", 0, matches=matcher(patterns), arrays=arrays)
    if pruned is _GONE:
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        some = [path for path, _ in itertools.islice(walk(tree), 5)]
        count = len(leaf_paths(tree))
        raise LayoutError(
            f"nothing in the checkpoint matches {wanted}; of its {count} paths the first are {some}"
        )
    return arrays, pruned


def matcher(patterns: str | Iterable[str]) -> Callable[[str], object]:
    """Return what says whether a leaf path matches, as `select` has it."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    return re.compile("|".join(map(fnmatch.translate, wanted)) or r"(?!)").match


def without(tree: Any, paths: Collection[str]) -> Any:
    """Return the tree without the leaves at `paths`, as `select` leaves out what does not match."""
    pruned = _prune(tree, "", 0, matches=lambda path: path not in paths, arrays=set())
    return {"t": "dict", "k": [], "v": []} if pruned is _GONE else pruned


_GONE: Any = object()


def _prune(node: Any, path: str, depth: int, *, matches: Callable[[str], object], arrays: set[str]) -> Any:
    inner = children(node, path, depth)
    if not inner:
        if not matches(path or paths.ROOT):
            return _GONE
        if is_array(node) and "bits" not in node:
            arrays.add(node["path"])
        return node
    kept = [_prune(child, p, depth + 1, matches=matches, arrays=arrays) for p, child in inner]
    if all(child is _GONE for child in kept):
        return _GONE
    if type(node) is dict and node["t"] in MAPPINGS:
        pairs = [(key, child) for key, child in zip(node["k"], kept, strict=True) if child is not _GONE]
        return node | {"k": [key for key, _ in pairs], "v": [child for _, child in pairs]}
    filled = [None if child is _GONE else child for child in kept]
    return filled if type(node) is list else node | {"v": filled}

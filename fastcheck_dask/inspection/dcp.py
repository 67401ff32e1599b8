"""Read a folder of torch.distributed.checkpoint. Its metadata is a pickle, of which nothing is run.

The operations of the pickle are followed by a small machine of our own, which knows those that make plain
containers; where the pickle would call something, it only notes the name and the arguments.
"""

from __future__ import annotations

import io
import math
import pickletools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastcheck_dask.errors import CorruptDataError, UnknownFormatError
from fastcheck_dask.layout.dtypes import itemsize_of
from fastcheck_dask.layout.leaves import require_torch, torch_dtype
from fastcheck_dask.layout.manifest import LIMIT_BYTES

METADATA = ".metadata"
#: What the operations of a pickle push that are no more than values.
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
)
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset(("PROTO", "FRAME", "STOP"))
#: More chunks of one tensor than that are not compared pair by pair.
_CHUNK_LIMIT = 4096


@dataclass(eq=False)
class Noted:
    """Something that a pickle would have made by a call, or a name that it mentions."""

    name: str
    args: Any = ()
    state: Any = None


@dataclass
class _Machine:
    """Follows the operations of a pickle; nothing is imported and nothing called."""

    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: bytes) -> Any:
        for operation, argument, _ in pickletools.genops(data):
            self._step(operation.name, argument)
        return self.stack[-1]

    def _step(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack[-_TUPLES[name] :] = [tuple(self.stack[-_TUPLES[name] :])]
        elif name not in _IGNORED:
            method = getattr(self, f"_{name.lower()}", None)
            if method is None:
                raise UnknownFormatError(f"it has the operation {name}, which no such metadata needs")
            method(argument)

    def _mark(self, _: Any) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def _popped_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.marks.pop()
        return found

    def _tuple(self, _: Any) -> None:
        found = self._popped_mark()
        self.stack.append(tuple(found))

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        self._top(list).append(item)

    def _appends(self, _: Any) -> None:
        found = self._popped_mark()
        self._top(list).extend(found)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._top(dict)[key] = value

    def _setitems(self, _: Any) -> None:
        found = self._popped_mark()
        self._top(dict).update(zip(found[::2], found[1::2], strict=True))

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(f"something is put into a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _binput(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    _long_binput = _binput

    def _binget(self, index: int) -> None:
        self.stack.append(self.memo[index])

    _long_binget = _binget

    def _global(self, argument: str) -> None:
        self.stack.append(Noted(argument.replace(" ", ".")))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Noted(f"{module}.{name}"))

    def _reduce(self, _: Any) -> None:
        args, called = self.stack.pop(), self.stack.pop()
        self.stack.append(Noted(called.name, args))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        self._top(Noted).state = state


@dataclass(frozen=True)
class _Piece:
    """Where a part of an item lies."""

    file: Path
    start: int
    nbytes: int


def is_dcp(folder: Path) -> bool:
    """Say whether a folder looks like one of torch.distributed.checkpoint."""
    return (folder / METADATA).is_file()


def read_dcp(folder: Path, *, trust: bool = False) -> Any:
    """Return the whole state in a folder of torch.distributed.checkpoint; shards are put together.

    Parameters
    ----------
    folder : Path
        As `torch.distributed.checkpoint.save` made it.
    trust : bool
        Let torch unpickle items that are more than tensors and plain values: that runs code.

    Raises
    ------
    UnknownFormatError
        If the metadata has another form than those that torch writes.
    CorruptDataError
        If shards do not make whole tensors, a file is missing or damaged, or an item is refused.
    """
    where = str(folder / METADATA)
    try:
        if (folder / METADATA).stat().st_size > LIMIT_BYTES:
            raise CorruptDataError(f"{where}: at most {LIMIT_BYTES:,} bytes are read")
        described = _Machine().run((folder / METADATA).read_bytes()).state
        items = described["state_dict_metadata"]
        places = _places(folder, described["storage_data"])
        flat = {name: _item(name, item, places, trust=trust) for name, item in items.items()}
        return _nested(flat, described.get("planner_data") or {})
    except CorruptDataError as error:
        kind = UnknownFormatError if isinstance(error, UnknownFormatError) else CorruptDataError
        raise kind(f"{where}: {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OSError, EOFError) as error:
        raise CorruptDataError(f"{where}: damaged ({type(error).__name__}: {error})") from error


def _places(folder: Path, storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], _Piece]:
    found = {}
    for index, info in storage.items():
        relative = info.state["relative_path"]
        if Path(relative).name != relative or relative.startswith("."):
            raise CorruptDataError(f"it names a file outside of the folder ({str(relative)[:80]!r})")
        if info.state.get("transform_descriptors"):
            raise UnknownFormatError(
                f"its files were transformed by {info.state['transform_descriptors']}; save it again without"
            )
        offset = index.state.get("offset")
        piece = _Piece(folder / relative, int(info.state["offset"]), int(info.state["length"]))
        if piece.start < 0 or piece.nbytes < 0 or piece.start + piece.nbytes > piece.file.stat().st_size:
            raise CorruptDataError(f"{piece.file} is shorter than it says")
        found[index.state["fqn"], None if offset is None else _size(offset)] = piece
    return found


def _size(noted: Noted) -> tuple[int, ...]:
    size = tuple(noted.args[0])
    if noted.name != "torch.Size" or not all(type(n) is int and 0 <= n < 2**62 for n in size):
        raise CorruptDataError(f"a size is {str(size)[:80]}")
    return size


def _item(name: str, item: Noted, places: dict[Any, _Piece], *, trust: bool) -> Any:
    if item.name.endswith(".BytesStorageMetadata"):
        return _loaded(name, places[name, None], trust=trust)
    if not item.name.endswith(".TensorStorageMetadata"):
        raise UnknownFormatError(f"{name} is a {item.name}")
    torch = require_torch()
    dtype_name = item.state["properties"].state[0].name.removeprefix("torch.")
    size, width = _size(item.state["size"]), itemsize_of(dtype_name)
    chunks = [(_size(c.state["offsets"]), _size(c.state["sizes"])) for c in item.state["chunks"]]
    _check_cover(name, size, chunks)
    for offsets, sizes in chunks:
        # Before anything is allocated: what is stored is not compressed.
        if math.prod(sizes) * width > places[name, offsets].nbytes:
            raise CorruptDataError(
                f"{name}: a shard of shape {sizes} in {places[name, offsets].nbytes:,} bytes"
            )
    whole = torch.empty(size, dtype=torch_dtype(dtype_name))
    for offsets, sizes in chunks:
        shard = _loaded(name, places[name, offsets], trust=False)
        if (
            not isinstance(shard, torch.Tensor)
            or shard.dtype is not whole.dtype
            or tuple(shard.shape) != sizes
        ):
            raise CorruptDataError(f"{name}: a shard is not the tensor of shape {sizes} that it should be")
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = shard
    return whole


def _check_cover(
    name: str, size: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Raise unless the chunks are inside, do not overlap and leave no gap."""
    if len(chunks) > _CHUNK_LIMIT or any(len(o) != len(size) or len(s) != len(size) for o, s in chunks):
        raise CorruptDataError(f"{name}: {len(chunks)} shards do not fit shape {size}")
    if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(size):
        raise CorruptDataError(f"{name}: its shards do not add up to shape {size}")
    if not size or not chunks:
        return
    first = np.array([o for o, _ in chunks])
    last = first + np.array([s for _, s in chunks])
    apart = (last[:, None] <= first[None]) | (last[None] <= first[:, None])
    overlap = ~apart.any(axis=2) & ~np.eye(len(chunks), dtype=bool)
    if (last > np.array(size)).any() or overlap.any():
        raise CorruptDataError(f"{name}: its shards overlap or lie outside of shape {size}")


def _loaded(name: str, piece: _Piece, *, trust: bool) -> Any:
    with open(piece.file, "rb") as file:
        file.seek(piece.start)
        data = io.BytesIO(file.read(piece.nbytes))
    try:
        return require_torch().load(data, map_location="cpu", weights_only=not trust)
    except Exception as error:  # what torch raises for damaged data has no common root
        raise CorruptDataError(
            f"{name} in {piece.file.name} cannot be read without running code, or is damaged "
            f"({' '.join(str(error).split())[:200]}); if you trust whoever made it as you trust a program, "
            "--trust runs it"
        ) from error


def _nested(flat: dict[str, Any], paths: dict[str, Any]) -> Any:
    """Put items where they stood in the state: numbers in a path are positions in lists."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        path = tuple(paths.get(name, (name,)))
        if not path or not all(type(part) in (str, int) for part in path):
            raise CorruptDataError(f"{name} has the path {str(path)[:80]}")
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if type(node) is not dict:
                raise CorruptDataError(f"{name} lies inside another item")
        if path[-1] in node:
            raise CorruptDataError(f"{name} stands twice")
        node[path[-1]] = value
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if type(node) is not dict:
        return node
    inner = {key: _with_lists(child) for key, child in node.items()}
    if inner and all(type(key) is int for key in inner):
        if sorted(inner) != list(range(len(inner))):
            raise CorruptDataError(f"a list lacks positions ({str(sorted(inner))[:80]})")
        return [inner[index] for index in range(len(inner))]
    return inner

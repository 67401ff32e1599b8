"""Names of leaves: how the keys of a state become zarr node names, unique, stable and safe as file names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

#: The path of a state that is itself one leaf.
ROOT = "%root"
#: Longest component, in UTF-8 bytes; file systems stop at 255.
LIMIT_BYTES = 200

# "%" followed by two hex digits is an escape. What is not a string key carries "%" and a word that begins
# with no hex digit ("%int", "%none", "%h..."), so it never equals the component of a string key.
_UNSAFE = re.compile(r"[/%\\:\x00-\x1f\x7f\ud800-\udfff]")
_PLAIN = re.compile(r"(?!__)[A-Za-z0-9_-][A-Za-z0-9_.-]{1,63}\Z|[A-Zabd-z0-9_-]\Z")
_RESERVED = frozenset(("c", "zarr.json"))


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def _shortened(component: str, identity: str) -> str:
    """Cut a long component and tell it from others of the same beginning by a hash of `identity`."""
    encoded = component.encode()
    if len(encoded) <= LIMIT_BYTES:
        return component
    head = encoded[: LIMIT_BYTES - 24].decode("utf-8", "ignore")
    # Half an escape must not be left at the cut.
    head = re.sub(r"%[0-9A-F]?\Z", "", head)
    return f"{head}%h{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


@lru_cache(maxsize=65536)
def escape(name: str) -> str:
    r"""Return the component of a string key; different names have different components.

    >>> escape("layers.0.weight"), escape("a/b"), escape(""), escape("c"), escape("..")
    ('layers.0.weight', 'a%2Fb', '%empty', '%63', '%2E.')
    """
    if _PLAIN.match(name) and name != "zarr.json":
        return name
    if not name:
        return "%empty"
    if name in _RESERVED or name.startswith((".", "__")):
        escaped = _percent(name[0]) + _UNSAFE.sub(lambda found: _percent(found[0]), name[1:])
    else:
        escaped = _UNSAFE.sub(lambda found: _percent(found[0]), name)
    return _shortened(escaped, name)


def components(keys: Sequence[Any]) -> list[str]:
    """Return a component for each key of one dict, all different.

    Parameters
    ----------
    keys : sequence
        The keys as the tree encodes them (see `layout.values`): text and small whole numbers as
        themselves, all others as nodes.

    Notes
    -----
    A string key depends on itself alone. A whole number is its decimal unless a string key of the same dict
    is that text; then it is ``<decimal>%int``. Every other key carries its kind after a "%".
    """
    taken: set[str] = set()
    found: list[str | None] = [None] * len(keys)
    for index, key in enumerate(keys):
        if type(key) is str:
            found[index] = escape(key)
            taken.add(found[index] or "")
    if len(taken) == len(keys):
        return [name for name in found if name is not None]
    for index, key in enumerate(keys):
        if found[index] is None:
            found[index] = _unlike(_of_other(key), type(key) is int, taken)
    return [name for name in found if name is not None]


def _unlike(name: str, is_int: bool, taken: set[str]) -> str:
    """Return `name`, changed until it differs from all in `taken`, and add it there."""
    chosen = name
    if chosen in taken and is_int:
        chosen = f"{name}%int"
    number = 2
    while chosen in taken:
        chosen = f"{name}%no{number}"
        number += 1
    taken.add(chosen)
    return chosen


def _of_other(key: Any) -> str:
    """Return the component of an encoded key that is not plain text, before it is made unique."""
    if isinstance(key, bool):
        return f"{key}%truth"
    if key is None:
        return "None%none"
    if isinstance(key, int):
        return str(key)
    if isinstance(key, float):
        return f"{key!r}%real"
    if isinstance(key, str):
        return escape(key)
    identity = json.dumps(key, sort_keys=True, separators=(",", ":"))
    kind = key.get("t") if isinstance(key, dict) else None
    if kind == "str":
        return escape(bytes.fromhex(key["v"]).decode("utf-8", "surrogatepass"))
    if kind == "tuple":
        return _shortened(",".join(map(_of_other, key["v"])) + "%tuple", identity)
    return f"%h{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def join(path: str, component: str) -> str:
    """Return the path of a child."""
    return f"{path}/{component}" if path else component


def is_safe(path: str) -> bool:
    """Say whether a stored path may name an array: relative, no step up, nothing that zarr or we reserve."""
    if not path or path.startswith("%parity"):
        return False
    return not any(
        part in _RESERVED
        or part.startswith((".", "__"))
        or not part
        or len(part.encode("utf-8", "surrogatepass")) > 255
        or re.search(r"[\\:\x00-\x1f\x7f\ud800-\udfff]", part)
        for part in path.split("/")
    )

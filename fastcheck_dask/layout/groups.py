"""Groups of leaves that go to the object tier more rarely than the rest, or elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastcheck_dask.config import Group
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.notes import Notes, OlderGroup
from fastcheck_dask.layout.tree import children, is_array, matcher, walk, without

#: Leaves by their paths.
Leaves = dict[str, Any]


def leaves_of(tree: Any, groups: Sequence[Group]) -> dict[str, Leaves]:
    """Return the leaves of each group: a leaf belongs to the first that matches.

    A tensor goes by the path under which it is stored: one that has several names (tied weights) has one
    group.
    """
    matchers = [(group.name, matcher(group.patterns)) for group in groups]
    found: dict[str, Leaves] = {group.name: {} for group in groups}
    for path, node in walk(tree):
        stored = node["path"] if is_array(node) else path
        name = next((name for name, matches in matchers if matches(stored)), None)
        if name is not None:
            found[name][path] = node
    return found


def may_be_older(
    tree: Any, arrays: Iterable[ArraySpec], generation: int, *, stored: Manifest, groups: Sequence[Group]
) -> tuple[str, ...]:
    """Say which groups of a new checkpoint need not be written, by their intervals.

    Parameters
    ----------
    tree, arrays, generation
        Of the new checkpoint.
    stored : Manifest
        The newest one in the object tier.
    groups : sequence of Group

    Returns
    -------
    tuple of str
        Names of groups that were written less than their interval ago, and have not got other leaves, shapes
        or dtypes since.
    """
    specs = [{spec.path: _form(spec) for spec in of} for of in (arrays, stored.arrays)]
    now, before = leaves_of(tree, groups), leaves_of(stored.tree, groups)
    found = []
    for group in groups:
        since = stored.notes.older.get(group.name)
        written = stored.generation if since is None else since.generation
        if generation - written < group.persist_every and _same_form(
            now[group.name], before[group.name], specs
        ):
            found.append(group.name)
    return tuple(found)


def with_older(
    manifest: Manifest, stored: Manifest, groups: Sequence[Group], older: Iterable[str]
) -> Manifest:
    """Return the manifest of what goes to the object tier: of some groups, what is there already.

    Parameters
    ----------
    manifest : Manifest
        Of the whole state of one step.
    stored : Manifest
        Of a checkpoint in the object tier.
    groups : sequence of Group
    older : iterable of str
        Names that :func:`may_be_older` gave.

    Returns
    -------
    Manifest
        `manifest` itself if those groups did not change. Else one without stripes, since no storage node has
        this state; its notes say from which generation each older group is.
    """
    now, before = leaves_of(manifest.tree, groups), leaves_of(stored.tree, groups)
    changed = [
        name
        for name in older
        if _content(now[name], manifest.digests, manifest) != _content(before[name], stored.digests, stored)
    ]
    if not changed:
        return manifest
    nodes = {path: node for name in changed for path, node in before[name].items()}
    taken = {node["path"] for node in nodes.values() if is_array(node)}
    digests = {
        key: stored.digests[key] if chunk.path in taken else manifest.digests[key]
        for key, chunk in manifest.chunks.items()
    }
    origin = OlderGroup(stored.generation, stored.tag, stored.created_unix)
    notes = replace(
        manifest.notes, older={name: stored.notes.older.get(name, origin) for name in sorted(changed)}
    )
    return replace(
        manifest,
        tree=_substituted(manifest.tree, "", 0, nodes),
        # A cast of another step's source is no cast.
        arrays=tuple(replace(spec, source=None) for spec in manifest.arrays),
        digests=digests,
        layout=None,
        nodes=(),
        notes=notes,
    )


def part_of(manifest: Manifest, groups: Sequence[Group], name: str) -> Manifest | None:
    """Return the manifest of one group of a checkpoint, as it lies at a root of its own.

    Its tree has the leaves of the group, and nothing of the others. Like the digests, it depends on nothing
    but the state, so that every author of a checkpoint makes the same; None if the group has no chunks.
    """
    leaves = leaves_of(manifest.tree, groups)[name]
    paths = {node["path"] for node in leaves.values() if is_array(node)}
    # Their sources may be of another group.
    arrays = tuple(replace(spec, source=None) for spec in manifest.arrays if spec.path in paths)
    if not any(spec.chunks for spec in arrays):
        return None
    others = {path for path, _ in walk(manifest.tree)} - leaves.keys()
    return replace(
        manifest,
        tree=without(manifest.tree, others),
        arrays=arrays,
        digests={chunk.key: manifest.digests[chunk.key] for spec in arrays for chunk in spec.chunks},
        layout=None,
        nodes=(),
        notes=Notes(),
    )


def has_same_content(one: Manifest, other: Manifest) -> bool:
    """Say whether two manifests are of the same bits and values under the same names."""
    return (one.tree, one.arrays, one.digests) == (other.tree, other.arrays, other.digests)


def keys_of(
    tree: Any, arrays: Iterable[ArraySpec], groups: Sequence[Group], older: Iterable[str]
) -> set[str]:
    """Return the keys of the chunks of some groups."""
    found = leaves_of(tree, groups)
    paths = {node["path"] for name in older for node in found[name].values() if is_array(node)}
    return {chunk.key for spec in arrays if spec.path in paths for chunk in spec.chunks}


def _form(spec: ArraySpec) -> Any:
    return spec.dtype, spec.shape, spec.chunk_shape


def _same_form(now: Leaves, before: Leaves, specs: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether two versions of a group differ in their contents only; an empty group has none."""
    if not now or now.keys() != before.keys():
        return False

    def form(node: Any, of: Mapping[str, Any]) -> Any:
        if not is_array(node):
            return None
        return {name: v for name, v in node.items() if name != "bits"}, of.get(node["path"])

    return all(form(node, specs[0]) == form(before[path], specs[1]) for path, node in now.items())


def _content(leaves: Leaves, digests: Mapping[str, str], manifest: Manifest) -> Any:
    """Return what two versions of a group are compared by."""
    paths = {node["path"] for node in leaves.values() if is_array(node)}
    chunks = {key: digests[key] for key, chunk in manifest.chunks.items() if chunk.path in paths}
    return leaves, chunks


def _substituted(node: Any, path: str, depth: int, nodes: Leaves) -> Any:
    """Return a tree with some of its leaves replaced."""
    inner = children(node, path, depth)
    if not inner:
        return nodes.get(path, node)
    below = [
        _substituted(child, child_path, depth + 1, nodes)
        if type(child) in (list, dict)
        else nodes.get(child_path, child)
        for child_path, child in inner
    ]
    return below if type(node) is list else node | {"v": below}

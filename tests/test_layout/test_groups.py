"""Groups with intervals of their own: what is older, from when it is, and that it is never a mixture."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.config import Group
from fastcheck_dask.errors import ConfigError
from fastcheck_dask.layout.groups import (
    has_same_content,
    keys_of,
    leaves_of,
    may_be_older,
    part_of,
    with_older,
)
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import flatten

GROUPS = (Group("rare", "embed/*", 3), Group("often", ["head*", "count"], 2), Group("never there", "x*", 9))


def manifest_of(generation, state, *, tag=None):
    flat = flatten(state, chunk_bytes=1024)
    digests = {}
    for spec, source in zip(flat.arrays, flat.sources, strict=True):
        bits = np.ascontiguousarray(source).view(np.uint8).ravel()
        for chunk in spec.chunks:
            digests[chunk.key] = xxhash.xxh3_128_hexdigest(bits[chunk.offset : chunk.offset + chunk.nbytes])
    tag = tag or f"s{generation}"
    return Manifest("run", generation, tag, f"token{generation}", 1.5, flat.tree, flat.arrays, digests)


def state_of(embed, head, rest, *, wide=False):
    """Return a state whose groups have large arrays, small ones and plain values of one number."""
    return {
        "embed": {
            "table": np.full(900 + 100 * wide, embed, np.float32),
            "scale": np.float32([embed]),
            "n": embed,
        },
        "head": [np.full(300, head, np.float64), {"bias": np.int64([head])}],
        "count": head,
        "rest": np.full(400, rest, np.float32),
        "step": rest,
    }


def numbers(manifest):
    """Return the numbers that the leaves of each group and the rest have, by the content of a manifest."""
    leaves = leaves_of(manifest.tree, [*GROUPS, Group("rest", "*", 1)])
    found = {}
    for name, of in leaves.items():
        paths = {node["path"] for node in of.values() if isinstance(node, dict) and "path" in node}
        chunks = {k: manifest.digests[k] for k, c in manifest.chunks.items() if c.path in paths}
        found[name] = (of, chunks)
    return found


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=12))
def test_each_group_is_wholly_of_one_step_and_never_older_than_asked_for(history):
    stored = None
    whole = {}
    for generation, (embed, head, wide) in enumerate(history, 1):
        now = manifest_of(generation, state_of(embed, head, generation, wide=wide))
        whole[generation] = numbers(now)
        mixed = now
        if stored is not None:
            older = may_be_older(now.tree, now.arrays, generation, stored=stored, groups=GROUPS)
            assert "never there" not in older
            mixed = with_older(now, stored, GROUPS, older)
            assert set(mixed.notes.older) <= set(older)
        found = numbers(mixed)
        for group in GROUPS:
            since = mixed.notes.older.get(group.name)
            of = generation if since is None else since.generation
            assert generation - of < group.persist_every
            assert found[group.name] == whole[of][group.name]
            assert since is None or (
                since.tag == f"s{of}" and found[group.name] != whole[generation][group.name]
            )
        assert found["rest"] == whole[generation]["rest"]
        again = Manifest.from_bytes(mixed.to_bytes())
        assert again == mixed
        assert again.token == now.token
        stored = mixed


def test_what_is_due_or_has_another_form_is_written():
    first = manifest_of(1, state_of(1, 1, 1))
    second = manifest_of(2, state_of(2, 2, 2))

    def older(manifest, generation=2):
        return may_be_older(manifest.tree, manifest.arrays, generation, stored=first, groups=GROUPS)

    assert older(second) == ("rare", "often")
    assert older(second, 3) == ("rare",)
    assert older(second, 4) == ()
    assert older(manifest_of(2, state_of(2, 2, 2, wide=True))) == ("often",)
    assert older(manifest_of(2, state_of(2, 2, 2) | {"header": 1})) == ("rare",)
    without = state_of(2, 2, 2)
    del without["embed"]["n"]
    assert older(manifest_of(2, without)) == ("often",)


def test_manifest_with_older_groups_is_of_version_5_and_of_no_node():
    now, stored = manifest_of(2, state_of(2, 2, 2)), manifest_of(1, state_of(1, 2, 1))
    assert with_older(now, stored, GROUPS, ()) is now
    assert with_older(now, stored, GROUPS, ("often",)) is now
    mixed = with_older(now, stored, GROUPS, ("rare", "often"))
    assert list(mixed.notes.older) == ["rare"]
    assert b'"version":5' in mixed.to_bytes()
    assert (mixed.layout, mixed.nodes) == (None, ())


def test_tied_tensors_have_the_group_of_the_name_that_is_stored():
    shared = np.full(300, 1.0)
    manifest = manifest_of(1, {"body": shared, "embed": {"table": shared, "own": np.full(300, 2.0)}})
    assert set(leaves_of(manifest.tree, GROUPS)["rare"]) == {"embed/own"}
    assert {key.split("/c/")[0] for key in keys_of(manifest.tree, manifest.arrays, GROUPS, ["rare"])} == {
        "embed/own"
    }


def test_leaf_belongs_to_the_first_group_that_matches():
    tree = manifest_of(1, {"a": 1, "b": 2}).tree
    found = leaves_of(tree, [Group("one", "a", 2), Group("all", "*", 2)])
    assert [list(leaves) for leaves in found.values()] == [["a"], ["b"]]


@pytest.mark.parametrize(
    "arguments",
    [
        ("", "a", 1),
        (3, "a", 1),
        ("g", "", 1),
        ("g", [], 1),
        ("g", ["a", 3], 1),
        ("g", None, 1),
        ("g", "a", 0),
        ("g", "a", True),
        ("g", "a", "once"),
        ("g", "a", 1.5),
    ],
)
def test_group_that_cannot_be_is_refused(arguments):
    with pytest.raises(ConfigError):
        Group(*arguments)


@given(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))
def test_part_has_all_of_its_group_and_nothing_else(embed, head, rest):
    manifest = manifest_of(3, state_of(embed, head, rest))
    for name, leaves in leaves_of(manifest.tree, GROUPS).items():
        part = part_of(manifest, GROUPS, name)
        if not leaves:
            assert part is None
            continue
        assert dict(leaves_of(part.tree, GROUPS))[name] == leaves
        assert part.digests.keys() == keys_of(manifest.tree, manifest.arrays, GROUPS, [name])
        assert all(manifest.digests[key] == digest for key, digest in part.digests.items())
        assert Manifest.from_bytes(part.to_bytes()).to_bytes() == part.to_bytes()
        # It depends on the group alone, and on all of it.
        other = part_of(manifest_of(9, state_of(embed, head, rest + 1)), GROUPS, name)
        assert has_same_content(part, other)
        changed = part_of(manifest_of(9, state_of(embed + 1, head + 1, rest)), GROUPS, name)
        assert not has_same_content(part, changed)


def test_part_of_a_group_without_chunks_is_none():
    state = {"count": 3, "head": np.float32([1]), "rest": np.ones(400)}
    assert part_of(manifest_of(1, state), GROUPS, "often") is None


def test_root_is_made_absolute_and_its_group_can_name_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Group("g", "*", root="shared/").root == str(tmp_path / "shared")
    assert Group("g", "*", root=tmp_path / "x" / ".." / "y").root == str(tmp_path / "y")
    assert Group("g", "*", root=f"file://{tmp_path}/z").root == f"{tmp_path}/z"
    assert Group("g", "*", root="s3://bucket/shared/?endpoint=http://h:1").root == (
        "s3://bucket/shared?endpoint=http%3A%2F%2Fh%3A1"
    )
    assert Group("a b", "*").root is None
    for name, root in [("a/b", "/x"), ("..", "/x"), ("g", ""), ("g", 7), ("g", "http://x/y"), ("g", b"/x")]:
        with pytest.raises(ConfigError, match="group"):
            Group(name, "*", root=root)

from __future__ import annotations

import pytest

from fastcheck_dask.coordination.changes import check_changes, judge_change, parents, with_parents
from fastcheck_dask.coordination.entries import Check, Create, Delete, Entry, EntryConflictError, Write


def test_parents_of_a_top_entry_are_none():
    assert list(parents("a")) == []


@pytest.mark.parametrize(
    ("changes", "before", "complete"),
    [
        ((Check("a/b", 0), Write("a/b", b"", 0), Delete("a/b", 0)), {}, ["a/b", "a/b", "a/b"]),
        ((Create("a/b/c", b""), Create("a/b/d", b"")), {"a": "a/b/c", "a/b": "a/b/c"}, ["a/b/c", "a/b/d"]),
        ((Create("a", b""), Create("a/b/c/d", b"")), {}, ["a", "a/b", "a/b/c", "a/b/c/d"]),
        ((Create("a/b", b""), Create("a/b/c/d", b"")), {"a": "a/b"}, ["a/b", "a/b/c", "a/b/c/d"]),
        # The wrong order: the server then says that it exists.
        ((Create("a/b", b""), Create("a", b"")), {"a": "a/b"}, ["a/b", "a"]),
    ],
)
def test_with_parents_tells_what_has_to_be_there_and_what_is_made(changes, before, complete):
    found, changed = with_parents(changes)
    assert found == before
    assert [change.path for change in changed] == complete


def test_check_changes_delete_then_create_of_the_same_entry_is_allowed():
    check_changes((Delete("a/b", None), Create("a/b", b"")))
    with pytest.raises(EntryConflictError, match="a above it"):
        check_changes((Delete("a/b", None), Delete("a", None), Create("a/b", b"")))


@pytest.mark.parametrize("change", [Write("a", b"", None), Delete("a", None), Check("a", 3)])
def test_judge_change_version_that_fits_is_allowed(change):
    judge_change(change, found=Entry(b"", 3), occupied=False)

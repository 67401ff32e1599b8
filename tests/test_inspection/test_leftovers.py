from __future__ import annotations

from fastcheck_dask.inspection.leftovers import Kind, find
from fastcheck_dask.tiers.store import Stored


def objects(*paths: str) -> list[Stored]:
    return [Stored(path, 10, 100.0 + number) for number, path in enumerate(paths)]


def test_committed_and_damaged_markers_protect_and_foreign_files_are_passed_over():
    listing = objects(
        "00000001-a/zarr.json",
        ".fastcheck/commits/00000001-a.json",
        ".fastcheck/manifests/00000001-a.json",
        ".fastcheck/plans/00000001-a.json",
        "notes.txt",
        "1-a/x",
        "00000002",
        "logs/00000003-x/y",
        ".fastcheck/manifests/notes",
        ".fastcheck/00000005-a.json",
    )
    assert find(listing, ()) == ()


def test_each_kind_is_told_from_the_others():
    listing = objects(
        "00000001-a/w/c/0",
        "00000001-a/w/zarr.json",
        "00000002-b/zarr.json",
        ".fastcheck/manifests/00000002-b.json",
        ".fastcheck/manifests/00000003-c.json",
        ".fastcheck/plans/00000001-a.json",
        ".fastcheck/plans/00000004-d.json",
    )
    found = find(listing, [Stored("00000001-a/.tmp-1", 5, 1.0)])
    assert [(f.kind, f.name, f.objects, f.nbytes, f.modified_unix) for f in found] == [
        (Kind.MANIFEST, ".fastcheck/manifests/00000003-c.json", 1, 10, 104.0),
        (Kind.PLAN, ".fastcheck/plans/00000004-d.json", 1, 10, 106.0),
        (Kind.UNFINISHED, "00000001-a", 3, 30, 105.0),
        (Kind.TEMPORARY, "00000001-a/.tmp-1", 1, 5, 1.0),
        (Kind.UNMARKED, "00000002-b", 2, 20, 103.0),
    ]

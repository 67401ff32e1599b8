"""What the doctor finds on one machine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.config import settings
from fastcheck_dask.errors import TierError
from fastcheck_dask.monitoring import doctor
from fastcheck_dask.monitoring.doctor import Finding

GIB = 2**30


def named(findings: list[Finding], what: str) -> Finding:
    (found,) = (finding for finding in findings if finding.what == what)
    return found


def test_installation_tells_versions_and_what_is_not_there() -> None:
    def version_of(name: str) -> str:
        if name == "bokeh":
            raise PackageNotFoundError(name)
        return version(name) if name in ("dask", "distributed", "zarr", "numcodecs", "numpy") else "1.2"

    found = doctor.installation(version_of)
    assert f"zarr {version('zarr')}" in named(found, "fastcheck").found
    assert named(found, "torch").found == "1.2"
    assert "fastcheck-dask[dashboard]" in named(found, "bokeh").advice
    assert all(finding.level != "problem" for finding in found)


def test_codec_kernels_that_are_not_compiled_are_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels, level in (("c", "ok"), ("numpy", "advice")):
        monkeypatch.setattr(doctor, "kernels", lambda kernels=kernels: kernels)
        assert named(doctor.installation(lambda _: "1"), "codec kernels").level == level


@pytest.mark.parametrize(("total", "level"), [(64 * GIB, "ok"), (32 * GIB, "ok"), (GIB, "advice")])
def test_local_tier(total: int, level: str) -> None:
    found = doctor.local_tier("/x", total // 2, total, memory_bytes=128 * GIB)
    assert (found.level, bool(found.advice)) == (level, level != "ok")
    assert "/x" in found.found


@pytest.mark.parametrize(
    ("available", "encoders", "level"), [(16, 15, "ok"), (16, 17, "advice"), (2, 1, "advice")]
)
def test_cores(available: int, encoders: int, level: str) -> None:
    assert doctor.cores(available, encoders).level == level


def test_machine_looks_where_the_local_tier_is_and_says_if_it_is_missing(tmp_path: Path) -> None:
    assert str(tmp_path) in doctor.machine(settings(local_dir=tmp_path))[0].found
    (missing,) = doctor.machine(settings(local_dir=tmp_path / "none"))
    assert (missing.level, "No such file" in missing.found) == ("problem", True)


def test_checkpoint_dir_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    (found,) = doctor.checkpoint_dir(str(tmp_path))
    assert found.level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_dir_that_is_missing_is_not_made(tmp_path: Path) -> None:
    (found,) = doctor.checkpoint_dir(str(tmp_path / "a" / "b"))
    assert (found.level, "can be made" in found.found) == ("ok", True)
    assert list(tmp_path.iterdir()) == []


class Store:
    """Takes what is written, or does not, and gives what it likes."""

    def __init__(self, gives: bytes | None) -> None:
        self.gives, self.deleted = gives, 0

    def write(self, _path: str, _data: Any) -> None:
        if self.gives is None:
            raise TierError("no access")

    def read(self, _path: str) -> bytes:
        assert self.gives is not None
        return self.gives

    def delete(self, _path: str) -> None:
        self.deleted += 1


@pytest.mark.parametrize(("gives", "says"), [(None, "no access"), (b"else", "other bytes")])
def test_checkpoint_dir_that_cannot_be_used_is_a_problem(gives: bytes | None, says: str) -> None:
    store = Store(gives)
    *_, found = doctor.checkpoint_dir("s3://bucket/x", lambda _: store, environment={})
    assert (found.level, says in found.found, store.deleted) == ("problem", True, 1)


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, "advice"),
        ({"AWS_REGION": "x"}, "advice"),
        ({"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hidden"}, "ok"),
    ],
)
def test_s3_credentials_are_named_and_not_shown(environment: dict[str, str], level: str) -> None:
    store = Store(b"fastcheck doctor")
    first, found = doctor.checkpoint_dir("s3://bucket/x", lambda _: store, environment=environment)
    assert (first.level, found.level) == (level, "ok")
    assert "hidden" not in repr((first, found))

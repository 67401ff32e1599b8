from __future__ import annotations

import os
import sys
from pathlib import Path

import fastcheck_codecs
import pytest

import fastcheck_dask
from fastcheck_dask.errors import CoordinationError
from fastcheck_dask.manager import agent_start
from fastcheck_dask.manager.agent_start import import_path, start_agent

ROOT = str(Path(fastcheck_dask.__file__).parents[1])
CODECS = str(Path(fastcheck_codecs.__file__).parents[1])


def test_import_path_keeps_the_trainers_order() -> None:
    places = ["/a", ROOT, "/b", CODECS, "/a"]
    assert import_path(places) == ["/a", ROOT, "/b", CODECS]


def test_import_path_ours_missing_or_shadowed_comes_first(tmp_path: Path) -> None:
    assert set(import_path(["/a"])[:2]) == {ROOT, CODECS}
    (tmp_path / "fastcheck_dask").mkdir()
    (tmp_path / "fastcheck_dask" / "__init__.py").write_text("")
    assert import_path([str(tmp_path), ROOT, CODECS])[0] == ROOT


def test_import_path_relative_places_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = import_path(["", "lib", "a:b", ROOT, CODECS])
    assert found == [str(tmp_path), str(tmp_path / "lib"), ROOT, CODECS]


def test_import_path_working_directory_removed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert import_path(["", ROOT, CODECS]) == [ROOT, CODECS]


def test_start_agent_system_refuses_raises_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    read, write = os.pipe()
    with pytest.raises(CoordinationError, match="cannot be started"):
        start_agent(write)
    os.close(read)
    os.close(write)
    assert agent_start._PACKAGES

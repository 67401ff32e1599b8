from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.errors import ConfigError, CoordinationError, FastCheckError
from fastcheck_dask.manager.arguments import coordinator_url, local_folder, place_of


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_shards": 0}, "num_shards must be"),
        ({"num_shards": -1}, "num_shards must be"),
        ({"num_shards": 1.5}, "num_shards must be"),
        ({"num_shards": True}, "num_shards must be"),
        ({"num_shards": "3"}, "num_shards must be"),
        ({"num_shards": 3}, "give scheduler=... or coordinator=..."),
        ({"on_busy": "panic"}, "on_busy"),
        ({"persist_every": -1}, "persist_every"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"chunk_bytes": "many"}, "chunk_bytes"),
        ({"run_id": "../x"}, "run_id must be"),
        ({"run_id": ""}, "run_id must be"),
        ({"coordinator": "etcd://nowhere"}, "coordinator must be"),
        ({"coordinator": "zk://"}, "coordinator must be"),
        ({"coordinator": ""}, "coordinator must be"),
        ({"coordinator": 7}, "coordinator must be"),
        ({"scheduler": 8786}, "scheduler must be"),
        ({"local_dir": ""}, "local_dir must be"),
        ({"local_dir": b"x"}, "local_dir must be"),
        ({"chunkbytes": 1024}, "no option 'chunkbytes'"),
    ],
)
def test_manager_bad_option_says_what_is_wanted(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**options)


@pytest.mark.parametrize("place", ["gs://bucket/run", "s3://", ""])
def test_manager_bad_checkpoint_dir_says_what_is_wanted(tmp_path: Path, place: str) -> None:
    from fastcheck_dask import FastCheckManager

    with pytest.raises(ConfigError, match="checkpoint"):
        FastCheckManager(place, local_dir=tmp_path / "shm")


def test_manager_checkpoint_dir_is_a_file_refused(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FastCheckError, match="file"):
        make("file")
    with pytest.raises(FastCheckError, match="file"):
        make("file/below")


def test_manager_local_dir_is_a_file_refused(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="local_dir"):
        make(local_dir=tmp_path / "file")


def test_manager_scheduler_nobody_listens_says_what_to_do(make: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(CoordinationError, match="dask scheduler"):
            make(scheduler=address, scheduler_timeout="1 s")


def test_manager_scheduler_never_answers_gives_up(make: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CoordinationError, match="does not answer"):
            make(scheduler=address, scheduler_timeout="500 ms")


def test_manager_other_runs_directory_refused(make: Any) -> None:
    first = make(run_id="one")
    first.save_async({"a": 1}, "t").wait()
    first.close()
    with pytest.raises(ConfigError, match="run_id='one'"):
        make(run_id="two")
    assert make(run_id="one").load() == {"a": 1}


def test_coordinator_url_relative_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = coordinator_url("sqlite:coord.db")
    assert url == f"sqlite:///{str(tmp_path).lstrip('/')}/coord.db"
    monkeypatch.chdir("/")
    assert coordinator_url(url) == url
    assert coordinator_url("zk://a:1/b") == "zk://a:1/b"


def test_paths_relative_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_folder("shm") == os.fspath(tmp_path / "shm")
    assert local_folder(None) is None
    assert place_of(Path("a/../b")) == os.fspath(tmp_path / "b")
    for wrong in (None, 3, b"x", "a\0b"):
        with pytest.raises(ConfigError, match="checkpoint_dir must be"):
            place_of(wrong)

from __future__ import annotations

import os
import threading

import pytest

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.errors import ClosedError, ConfigError, FastCheckError, SaveFailedError, TierTimeoutError
from fastcheck_dask.manager.handle import Level, SaveHandle
from fastcheck_dask.manager.in_flight import InFlight

PEERS: tuple[Level, ...] = ("local", "peers", "object")


def record(*nodes: str, generation: int = 3) -> CommitRecord:
    return CommitRecord("run", generation, "t", "tok", "0" * 64, nodes, nodes, len(nodes), False, 1, 1.0)


def taken(*levels: Level) -> SaveHandle:
    """Return the handle of a save whose snapshot is complete."""
    handle = SaveHandle("t", levels or PEERS)
    handle._reach("local")
    return handle


def committed(seq: int, *nodes: str) -> dict[str, object]:
    return {
        "event": "committed",
        "seq": seq,
        "record": record(*nodes).to_bytes(),
        "stats": {"degraded": "no node is alive"},
    }


@pytest.fixture
def failures() -> list[FastCheckError]:
    return []


@pytest.fixture
def flight(failures: list[FastCheckError]) -> InFlight:
    return InFlight(failures.append)


def test_wait_level_not_reached_in_time_raises() -> None:
    handle = SaveHandle("t", PEERS)
    with pytest.raises(TierTimeoutError, match="'t' has not reached 'peers'"):
        handle.wait(timeout=0.0)
    with pytest.raises(TierTimeoutError, match="is not done"):
        handle.exception(timeout=0.0)
    assert handle.level is None
    assert not handle.done()


def test_wait_in_another_thread_ends_with_the_event(flight: InFlight) -> None:
    handle = SaveHandle("t", PEERS)
    seq = flight.add(handle)
    waiting = threading.Thread(target=lambda: handle.wait("object", timeout=30))
    waiting.start()
    handle._reach("local")
    flight.take(committed(seq, "n0"))
    assert (handle.level, handle.generation) == ("peers", 3)
    assert flight.handles == [handle]
    flight.take({"event": "persisted", "seq": seq, "stats": {"persisted_bytes": 5}})
    waiting.join(30)
    assert not waiting.is_alive()
    assert handle.level == "object"
    assert handle.stats["persisted_bytes"] == 5
    assert flight.handles == []


def test_failed_after_commit_only_what_was_not_reached(
    flight: InFlight, failures: list[FastCheckError]
) -> None:
    handle = taken()
    seq = flight.add(handle)
    flight.take(committed(seq, "n0"))
    flight.take({"event": "persist_failed", "seq": seq, "error": ["TierError", "disk on fire"]})
    assert handle.wait("peers", timeout=0.0) is handle
    with pytest.raises(FastCheckError, match="disk on fire"):
        handle.wait("object")
    assert str(handle.exception(timeout=0.0)) == "disk on fire"
    assert [str(error) for error in failures] == ["disk on fire"]
    assert flight.handles == []


def test_delayed_persist_is_shown_and_waited_for(
    flight: InFlight, failures: list[FastCheckError], caplog: pytest.LogCaptureFixture
) -> None:
    handle = taken()
    seq = flight.add(handle)
    flight.take(committed(seq, "n0"))
    stats = {"persist_attempts": 1, "persist_error": "disk on fire"}
    flight.take({"event": "persist_delayed", "seq": seq, "stats": stats})
    assert (handle.done(), failures) == (False, [])
    assert handle.stats.items() >= stats.items()
    assert [record.getMessage() for record in caplog.records if "tried again: disk on fire" in record.message]
    with pytest.raises(TierTimeoutError, match="attempt 1 failed, and it is tried again: disk on fire"):
        handle.wait("object", timeout=0.0)
    flight.take({"event": "persisted", "seq": seq, "stats": {"persist_attempts": 2, "persist_error": None}})
    assert handle.wait("object", timeout=0.0).stats["persist_error"] is None


def test_not_persisted_by_setting_is_no_failure(flight: InFlight, failures: list[FastCheckError]) -> None:
    handle = taken()
    seq = flight.add(handle)
    flight.take(committed(seq, "n0"))
    flight.take({"event": "not_persisted", "seq": seq, "every": 4})
    assert handle.exception(timeout=0.0) is None
    with pytest.raises(ConfigError, match="persist_every=4"):
        handle.wait("object")
    assert failures == []


def test_committed_without_nodes_peers_raise_and_object_succeeds(flight: InFlight) -> None:
    handle = taken()
    seq = flight.add(handle)
    flight.take(committed(seq))
    flight.take({"event": "persisted", "seq": seq})
    with pytest.raises(FastCheckError, match="no node is alive"):
        handle.wait("peers")
    assert handle.wait("object", timeout=0.0).level == "object"


def test_fail_all_others_untouched_and_unknown_numbers_ignored(
    flight: InFlight, failures: list[FastCheckError]
) -> None:
    done, left = taken("local", "object"), taken("local", "object")
    first, second = flight.add(done), flight.add(left)
    assert second > first
    flight.take({"event": "persisted", "seq": first})
    flight.take({"event": "persisted", "seq": -1})
    flight.fail_all(lambda handle: SaveFailedError(handle.tag))
    assert done.exception(timeout=0.0) is None
    assert str(left.exception(timeout=0.0)) == "t"
    assert len(failures) == 1


def test_forked_child_does_not_wait(flight: InFlight) -> None:
    handle = SaveHandle("t", PEERS)
    handle._pid = os.getpid() + 1
    with pytest.raises(ClosedError, match="forked"):
        handle.wait()
    with pytest.raises(ClosedError, match="forked"):
        handle.exception()

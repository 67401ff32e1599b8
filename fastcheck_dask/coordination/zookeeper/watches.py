"""Watches on znodes: set by whoever waits, never in kazoo's thread, and taken away when nobody does."""

from __future__ import annotations

import logging
import threading
from typing import Final

from kazoo.client import KazooClient
from kazoo.exceptions import NoWatcherError
from kazoo.protocol.serialization import int_struct, write_string

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.zookeeper.client import AllAnswers, ReplyLostError, Session
from fastcheck_dask.errors import ClosedError, CoordinationError

logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 0.1


class Watches:
    """The watches of one session; those on one path share what the server keeps for it.

    A watch of ZooKeeper tells once, and is forgotten with the connection. Two threads:

    1. a waiter is told of change 1; the watch is gone;
    2. another session makes change 2, of which nobody is told;
    3. the waiter sets the watch again, and only then returns: what its caller reads now includes change 2,
       and change 3 will be told.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}

    def watch(self, path: str) -> ZooKeeperWatch:
        """Watch a znode from now on."""
        session = self._session
        session.check_usable()
        with self._lock:
            place = self._places.setdefault(path, _Place(session, path))
            place.users += 1
        made = ZooKeeperWatch(self, place)
        try:
            place.arm(session.deadline())
        except BaseException:
            made.close()
            raise
        return made

    def leave(self, place: _Place) -> None:
        """Take away the server's watch if the last one who used it goes."""
        with place.turn:
            with self._lock:
                place.users -= 1
                last = not place.users
            if last:
                place.disarm()
            with self._lock:
                if not place.users:
                    self._places.pop(place.path, None)

    def close(self) -> None:
        """Wake everybody who waits; the session is over, and its watches with it."""
        with self._lock:
            places = list(self._places.values())
        for place in places:
            place.tell()


class ZooKeeperWatch:
    """A watch; see `Watch`."""

    def __init__(self, watches: Watches, place: _Place) -> None:
        self._watches, self._place = watches, place
        self._session = place.session
        self._seen = place.told
        self._closed = False

    def wait(self, seconds: float | None) -> bool:
        """Wait for the next change; see `Watch`."""
        place, deadline = self._place, Deadline.after(seconds)
        while True:
            if self._session.foreign:
                self._session.check_usable()
            with place.changed:
                place.changed.wait_for(self._is_over, timeout=deadline.left())
                if self._closed or not self._is_over():
                    return False
                # What is told from here on is told again, even if the watch is set after it.
                seen = place.told
            if self._session.closed:
                return True
            if self._set_again(deadline):
                self._seen = seen
                return True
            if deadline.passed:
                return False

    def close(self) -> None:
        """Stop watching; see `Watch`."""
        with self._place.changed:
            if self._closed or self._session.foreign:
                return
            self._closed = True
            self._place.changed.notify_all()
        self._watches.leave(self._place)

    def _is_over(self) -> bool:
        return self._closed or self._session.closed or self._place.told != self._seen

    def _set_again(self, deadline: Deadline) -> bool:
        session, left = self._session, deadline.left()
        patience = _RETRY_SECONDS if left is None else min(_RETRY_SECONDS, left)
        # Not longer at once: somebody may close the watch.
        if not session.wait_connected(patience):
            return False
        try:
            self._place.arm(session.deadline())
        except (CoordinationError, ClosedError) as error:
            logger.debug("%s cannot be watched now: %s", self._place.path, error)
            session.pause(patience)
            return False
        return True


class _Place:
    """A znode that is watched, by one or more."""

    def __init__(self, session: Session, path: str) -> None:
        self.session, self.path = session, path
        #: Held while the server is asked: setting a watch and taking it away do not overtake each other.
        self.turn = threading.Lock()
        #: Only ever held for moments: kazoo's thread takes it, too.
        self.changed = threading.Condition()
        #: How often the server said that something changed, or the connection was lost.
        self.told = 0
        #: Those who watch; guarded by the lock of `Watches`.
        self.users = 0
        self._armed = False

    def tell(self, _event: object = None) -> None:
        """Note a change; kazoo calls this from a thread that must not be kept."""
        with self.changed:
            self.told += 1
            self._armed = False
            self.changed.notify_all()

    def arm(self, deadline: Deadline) -> None:
        """Make sure that the server tells the next change."""
        with self.turn:
            if self._armed:
                return
            told = self.told
            # The names of a znode that is not there cannot be watched: its coming is told, and then they are.
            self.session.repeat(f"watching {self.path}", self._ask, deadline=deadline)
            with self.changed:
                # Told meanwhile: perhaps by the watch that was just set, which is then gone.
                self._armed = self.told == told

    def disarm(self) -> None:
        """Take the server's watches away; those of a lost connection are gone by themselves."""
        session = self.session
        self._armed = False
        if not session.connected or session.closed:
            return
        try:
            session.attempt(f"no longer watching {self.path}", self._forget, deadline=session.deadline())
        except (CoordinationError, ReplyLostError) as error:
            logger.debug("the watch on %s stays until it is told: %s", self.path, error)

    def _ask(self, client: KazooClient) -> AllAnswers:
        return AllAnswers(
            [
                client.exists_async(self.path, watch=self.tell),
                client.get_children_async(self.path, watch=self.tell),
            ]
        )

    def _forget(self, client: KazooClient) -> _Removal:
        return _Removal(client, self.path)


class _Removal:
    """The removal of all watches on a path: kazoo cannot ask for it, and would keep our callbacks."""

    def __init__(self, client: KazooClient, path: str) -> None:
        self._client, self._path = client, path
        self._result = client.handler.async_result()
        client._call(_RemoveWatches(path), self._result)

    def get(self, timeout: float | None) -> None:
        try:
            self._result.get(timeout=timeout)
        except NoWatcherError:
            logger.debug("%s was not watched any more", self._path)
        # Only now: kazoo notes a callback after it handed out the answer to the call that brought it.
        for callbacks in (self._client._data_watchers, self._client._child_watchers):
            callbacks.pop(self._path, None)


class _RemoveWatches:
    """A request as kazoo sends it; see ``RemoveWatchesRequest`` in ZooKeeper's protocol."""

    type: Final = 18
    _ANY: Final = 3

    def __init__(self, path: str) -> None:
        self.path = path

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(self._ANY))

    def deserialize(self, _answer: bytes, _offset: int) -> bool:
        return True

"""FastCheckManager: save a state without waiting for it, and bring it back."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from fastcheck_dask.agent.channel import Message
from fastcheck_dask.config import OnBusy, parse_shards, settings
from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.load import LoadReport
from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.engine.snapshot import describe
from fastcheck_dask.errors import (
    ClosedError,
    ConfigError,
    FastCheckError,
    RunInUseError,
    SaveBusyError,
    SaveFailedError,
    TooFewNodesError,
    from_wire,
)
from fastcheck_dask.ids import check_name, new_token, normalised, run_id_for
from fastcheck_dask.layout.chunks import place
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.state import FlatState, flatten
from fastcheck_dask.manager.agent_link import AgentLink
from fastcheck_dask.manager.handle import SaveHandle
from fastcheck_dask.manager.scheduler import ask_scheduler, run_apart
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier, Slot
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.process_lock import ProcessLock

log = logging.getLogger(__name__)


class FastCheckManager:
    """Saves and loads the checkpoints of one training run.

    Parameters
    ----------
    checkpoint_dir : str or Path
        Folder of the object tier; it also names the run, unless `run_id` is given.
    scheduler : str, optional
        Address of the Dask scheduler of the storage nodes (``tcp://host:8786``).
    coordinator : str, optional
        ``zk://host:port/root`` or ``sqlite:///path/coord.db``, the one that the storage nodes were started
        with; asked from the scheduler unless given. Without `scheduler` and `coordinator` there is no peer
        tier: checkpoints go to shared memory and to `checkpoint_dir`.
    num_shards : int or "auto"
        Data shards; one storage node more holds their parity.
    run_id : str, optional
        Name of the run.
    on_busy : {"wait", "skip", "raise"}, optional
        What `save_async` does while both slots are in use by earlier saves.
    persist_every : int, optional
        Write each k-th generation to the object tier; 0 writes none.
    local_dir : str or Path, optional
        Folder of the local tier; shared memory unless given.
    chunk_bytes : int or str, optional
        Largest chunk.
    **options
        Any other key of `fastcheck_dask.config.Settings`.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    RunInUseError
        If another live process saves this run.
    CoordinationError
        If the scheduler or the coordinator does not answer.

    Notes
    -----
    Methods may be called from any thread; saves are taken one after the other. Encoding and sending happen
    in a process of its own (the agent), which finishes the save in flight when this process dies.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        scheduler: str | None = None,
        coordinator: str | None = None,
        num_shards: int | str = "auto",
        run_id: str | None = None,
        on_busy: OnBusy | None = None,
        persist_every: int | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        chunk_bytes: int | str | None = None,
        **options: Any,
    ) -> None:
        self._pid = os.getpid()
        self._location = normalised(os.fspath(checkpoint_dir))
        self._run = run_id_for(self._location) if run_id is None else check_name(run_id, "run_id")
        self._settings = settings(
            on_busy=on_busy,
            persist_every=persist_every,
            local_dir=local_dir,
            chunk_bytes=chunk_bytes,
            **options,
        )
        wanted = parse_shards(num_shards)
        self._peers = scheduler is not None or coordinator is not None
        if wanted is not None and not self._peers:
            raise ConfigError(
                f"num_shards={wanted} needs storage nodes: give scheduler=... or coordinator=..., "
                "or leave num_shards at 'auto'"
            )
        self._folder = CheckpointFolder(open_store(self._location))
        self._refuse_foreign_run()
        if scheduler is not None:
            found = ask_scheduler(scheduler, self._settings.scheduler_seconds)
            coordinator = coordinator or found
            if not coordinator:
                raise ConfigError(
                    f"no storage node is registered with the scheduler {scheduler}; start some "
                    "(`dask fastcheck storage`), or give coordinator=... so that they can come later"
                )
        self._start_message: Message = {
            "run": self._run,
            "location": self._location,
            "coordinator_url": coordinator or f"sqlite:///{self._location}/.fastcheck/coordinator.db",
            "peers": self._peers,
            "wanted_shards": wanted,
            "settings": self._settings.to_dict(),
            "owner": f"pid {self._pid} on {os.uname().nodename}",
            "log_level": logging.getLogger("fastcheck_dask").getEffectiveLevel(),
        }
        self._local = LocalTier(
            self._run, Path(self._settings.local_dir) if self._settings.local_dir else None
        )
        self._lock = ProcessLock(self._local.path / "trainer.lock", role="trainer")
        if not self._lock.acquire():
            raise RunInUseError(
                f"run {self._run} is used by {self._lock.holder() or 'another manager of this process'}; "
                "close it, or use another checkpoint_dir or run_id"
            )
        self._saving = threading.Lock()
        self._changed = threading.Condition()
        self._free: set[int] = set()
        self._in_flight: dict[int, SaveHandle] = {}
        self._seqs = itertools.count()
        self._link: AgentLink | None = None
        self._closed = False
        #: Why the last save that failed did; reported once more by the next save.
        self._unreported: FastCheckError | None = None
        self.last_load: LoadReport | None = None
        try:
            self._agent()
        except BaseException:
            self._lock.release()
            raise
        atexit.register(self._close_at_exit)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._run

    @property
    def checkpoint_dir(self) -> str:
        """The object tier's folder."""
        return self._location

    def save_async(self, state: Any, tag: str) -> SaveHandle:
        """Save a state; only the copy into shared memory is waited for.

        Parameters
        ----------
        state : object
            Nested containers of tensors, arrays and plain values. It may be changed as soon as this returns.
        tag : str
            Name of the checkpoint. Saving a tag again makes a newer checkpoint of that name.

        Returns
        -------
        SaveHandle
            Tells how far the save has come. Whatever goes wrong after the copy is told there, in the log,
            and in the log of the next save; it is never raised into training.

        Raises
        ------
        UnsupportedLeafError
            If something in the state could not be restored; nothing was saved.
        ConfigError
            If the tag cannot be used.
        TierFullError
            If the local tier has no room.
        SaveBusyError
            If earlier saves use both slots and `on_busy` is ``"raise"``.
        """
        self._check_open()
        check_name(tag, "tag")
        started = time.monotonic()
        with self._saving:
            if self._unreported is not None:
                log.error("an earlier save failed: %s", self._unreported)
                self._unreported = None
            flat = flatten(state, chunk_bytes=self._settings.chunk_bytes)
            handle = SaveHandle(tag, ("local", "peers", "object") if self._peers else ("local", "object"))
            waiting = time.monotonic()
            number = self._take_slot(handle)
            if number is None:
                return handle
            waited = time.monotonic() - waiting
            try:
                self._snapshot(self._local.slots[number], flat, tag)
            except BaseException:
                self._give_back(number)
                raise
            handle.stats["stall_seconds"] = time.monotonic() - started
            handle.stats["busy_seconds"] = waited
            handle._reach("local")
            self._hand_over(number, handle)
        return handle

    def _take_slot(self, handle: SaveHandle) -> int | None:
        """Wait for a free slot as `on_busy` says; None (and the handle says so) when the save is skipped."""
        self._agent()
        with self._changed:
            while not self._free:
                if self._settings.on_busy != "wait":
                    error = SaveBusyError(
                        f"save {handle.tag!r}: both slots are in use by earlier saves; wait for one, "
                        "save less often, or use on_busy='wait'"
                    )
                    if self._settings.on_busy == "raise":
                        raise error
                    handle.skipped = True
                    handle._fall_short("local", "peers", "object", error=error)
                    log.warning("%s", error)
                    return None
                self._changed.wait()
                if self._link is None:
                    # The agent died meanwhile: a new one finds the slots as they are.
                    self._changed.release()
                    try:
                        self._agent()
                    finally:
                        self._changed.acquire()
            number = min(self._free)
            self._free.discard(number)
            return number

    def _give_back(self, number: int) -> None:
        with self._changed:
            self._free.add(number)
            self._changed.notify_all()

    def _snapshot(self, slot: Slot, flat: FlatState, tag: str) -> None:
        placement = place(flat.arrays)
        token = new_token()
        if slot.status.state.name not in ("EMPTY", "COMMITTED"):
            slot.clear()
        slot.reserve(placement.total_bytes)
        slot.begin(token, tag)
        try:
            data = slot.data
            for spec, source in zip(flat.arrays, flat.sources, strict=True):
                start = placement.offsets[spec.path]
                copy_bits(source, data[start : start + spec.nbytes])
            document = describe(
                token=token, tag=tag, created_unix=time.time(), tree=flat.tree, arrays=flat.arrays
            )
            slot.complete(document, placement.total_bytes)
        except BaseException:
            slot.clear()
            raise

    def _hand_over(self, number: int, handle: SaveHandle) -> None:
        seq = next(self._seqs)
        with self._changed:
            self._in_flight[seq] = handle
        try:
            self._agent().save(number, seq)
        except FastCheckError as error:
            self._fail(seq, SaveFailedError(f"save {handle.tag!r}: {error}"))

    def load(self, tag: str | None = None, *, include: str | list[str] | None = None) -> Any:
        """Bring a state back from the fastest source that has it.

        Parameters
        ----------
        tag : str, optional
            The newest checkpoint of that name. Without it the newest checkpoint that can be had complete;
            those that were skipped are in the log and in `last_load`.
        include : str or list of str, optional
            Patterns of leaf paths (``"model/*"``; ``*`` also crosses ``/``): only what matches is read.
            Of dicts the other entries are left out, in lists and tuples they become None.

        Returns
        -------
        object or None
            The state; tensors are on the CPU. None if nothing was ever saved.

        Raises
        ------
        CheckpointNotFoundError
            If no committed checkpoint has that tag.
        UnrecoverableError
            If there are checkpoints and no source could give one complete.
        LayoutError
            If nothing matches `include`.
        """
        self._check_open()
        with self._saving:
            self._settle()
            records = [CommitRecord.from_bytes(data) for data in self._agent().ask("records")["records"]]
            with self._changed:
                free = min(self._free, default=None)
            recovery = Recovery(self._local, self._folder, self._client)
            recovered = run_apart(recovery.load(records, tag=tag, include=include, free_slot=free))
            if recovered is None:
                return None
            if recovered.filled is not None and self._agent().ask("adopt", slot=recovered.filled)["adopted"]:
                with self._changed:
                    self._free.discard(recovered.filled)
            self.last_load = recovered.report
            return recovered.state

    def _settle(self) -> None:
        """Wait until no save of ours is on its way to a commit: a load sees what was saved before it."""
        with self._changed:
            handles = list(self._in_flight.values())
        for handle in handles:
            with contextlib.suppress(FastCheckError):
                handle.wait("peers" if self._peers else "object")

    def tags(self) -> list[str]:
        """Return the tags of the committed checkpoints, oldest first."""
        self._check_open()
        records = [CommitRecord.from_bytes(data) for data in self._agent().ask("records")["records"]]
        known = {(r.generation, r.tag) for r in records}
        known |= {(m.generation, m.tag) for m in self._folder.committed()}
        return [tag for _, tag in sorted(known)]

    def path(self, tag: str) -> str:
        """Return where the object tier has the newest checkpoint of a tag: a zarr group."""
        for marker in reversed(self._folder.committed()):
            if marker.tag == tag:
                return f"{self._location}/{marker.directory}"
        raise ConfigError(f"{self._location} has no committed checkpoint with the tag {tag!r} (yet)")

    def wait_until_finished(self, timeout: float | None = None) -> None:
        """Wait until every save is done, however it ended."""
        with self._changed:
            handles = list(self._in_flight.values())
        for handle in handles:
            handle.exception(timeout)

    def close(self, *, timeout: float | None = None, keep_local: bool = False) -> None:
        """Finish what is in flight, end the agent, and give the shared memory back. Idempotent.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for saves in flight; what is not finished by then is reported as lost.
        keep_local : bool
            Leave the slots in shared memory, for a restart on this host. They stay anyway if the newest
            checkpoint is nowhere else.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        link = self._link
        if link is not None:
            seconds = self._settings.close_seconds if timeout is None else timeout
            if not link.close(seconds):
                log.error("the agent did not finish in %.0f s and was ended", seconds)
        with self._changed:
            left = list(self._in_flight)
        for seq in left:
            self._fail(seq, SaveFailedError("the manager was closed before this save was done: it is lost"))
        if link is not None and link.safe_elsewhere and not keep_local:
            self._local.remove()
        self._local.close()
        self._lock.release()

    def __enter__(self) -> FastCheckManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _agent(self) -> AgentLink:
        """Return the line to the agent; a dead agent is replaced, and the new one finds out where things are."""
        with self._changed:
            if self._link is not None:
                return self._link
        link = AgentLink(self._start_message, self._on_event, self._on_lost)
        try:
            free = link.wait_ready()
        except BaseException:
            link.end()
            raise
        with self._changed:
            self._link = link
            self._free = set(free)
            self._changed.notify_all()
        return link

    def _on_lost(self, link: AgentLink) -> None:
        with self._changed:
            if self._link is not link:
                return
            self._link = None
            self._free.clear()
            left = {} if self._closed else dict(self._in_flight)
            self._changed.notify_all()
        for seq, handle in left.items():
            self._fail(
                seq,
                SaveFailedError(
                    f"the agent (process {link.pid}) died while save {handle.tag!r} was on its way; "
                    "the next save starts a new one"
                ),
            )

    def _on_event(self, message: Message) -> None:
        """Take what the agent says of a save or a slot; runs in the link's thread."""
        event = message["event"]
        if event == "free":
            self._give_back(message["slot"])
            return
        seq = message["seq"]
        with self._changed:
            handle = self._in_flight.get(seq)
        if handle is None:
            return
        if event == "committed":
            record = CommitRecord.from_bytes(message["record"])
            handle._committed(record, message["stats"])
            if not record.nodes:
                degraded = str(message["stats"]["degraded"])
                handle._fall_short("peers", error=TooFewNodesError(1, 0, degraded))
        elif event == "failed":
            self._fail(seq, from_wire(message["error"]))
        elif event == "persisted":
            handle._reach("object", message.get("stats"))
        elif event == "persist_failed":
            self._fail(seq, from_wire(message["error"]))
        elif event == "not_persisted":
            error = ConfigError(
                f"save {handle.tag!r} is not written to the object tier: persist_every={message['every']}"
            )
            handle._fall_short("object", error=error, waived=True)
        if handle.done():
            with self._changed:
                self._in_flight.pop(seq, None)

    def _fail(self, seq: int, error: FastCheckError) -> None:
        with self._changed:
            handle = self._in_flight.pop(seq, None)
        if handle is not None:
            self._unreported = error
            handle._fall_short("peers", "object", error=error)

    def _client(self, name: str, address: str) -> PeerClient:
        return PeerClient(
            name,
            address,
            floor_bytes_per_second=self._settings.floor_bytes_per_second,
            grace_seconds=self._settings.grace_seconds,
            connect_seconds=self._settings.connect_seconds,
        )

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this manager belongs to process {self._pid}, of which this one ({os.getpid()}) was forked; "
                "save and load there"
            )
        if self._closed:
            raise ClosedError("the manager is closed; make a new one")

    def _refuse_foreign_run(self) -> None:
        for marker in self._folder.committed():
            if marker.run != self._run:
                raise ConfigError(
                    f"{self._location} holds checkpoints of run {marker.run}, not of {self._run}; "
                    f"give run_id={marker.run!r}, or another checkpoint_dir"
                )

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.close()

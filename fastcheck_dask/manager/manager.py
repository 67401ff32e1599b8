"""FastCheckManager: save a state without waiting for it, and bring it back."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from fastcheck_dask.agent.channel import Message
from fastcheck_dask.clock import Deadline
from fastcheck_dask.config import OnBusy, parse_shards, settings
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.engine.recover import Into
from fastcheck_dask.errors import (
    ClosedError,
    ConfigError,
    FastCheckError,
    SaveBusyError,
)
from fastcheck_dask.ids import check_name, is_url, run_id_for
from fastcheck_dask.layout.notes import check_metrics
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.manager.agents import Agents
from fastcheck_dask.manager.arguments import (
    check_fallback,
    check_groups,
    coordinator_url,
    local_folder,
    own_coordinator,
    place_of,
    refuse_foreign_run,
)
from fastcheck_dask.manager.busy_count import BusyCount
from fastcheck_dask.manager.handle import Level, SaveHandle
from fastcheck_dask.manager.metrics_port import MetricsPort
from fastcheck_dask.manager.ownership import Ownership, root_after_takeover, root_for_takeover
from fastcheck_dask.manager.ranks import Place, parse_rank
from fastcheck_dask.manager.save_metrics import SaveMetrics
from fastcheck_dask.manager.scheduler import coordinator_of_nodes
from fastcheck_dask.manager.snapshots import Snapshots
from fastcheck_dask.manager.stored import Stored
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.object_store import open_store

log = logging.getLogger(__name__)


class FastCheckManager:
    """Saves and loads the checkpoints of one training run.

    Parameters
    ----------
    checkpoint_dir : str or Path
        The object tier: a folder, or ``s3://bucket/folder?endpoint=http://host:9000`` (options where needed;
        credentials come from the environment, here and on the storage nodes). It also names the run, unless
        `run_id` is given.
    scheduler : str, optional
        Address of the Dask scheduler of the storage nodes (``tcp://host:8786``).
    coordinator : str, optional
        ``zk://host:port/root`` or ``sqlite:///path/coord.db``, the one that the storage nodes were started
        with; asked from the scheduler unless given. Without `scheduler` and `coordinator` there is no peer
        tier: checkpoints go to shared memory and to `checkpoint_dir`.
    num_shards : int or "auto"
        Data shards; one storage node more holds their parity (or none, or two, by the option ``parity``).
    run_id : str, optional
        Name of the run.
    on_busy : {"wait", "skip", "raise"}, optional
        What `save_async` does while both slots are in use by earlier saves. ``"wait"`` waits as long as it
        takes: a slow tier is no failure. (An agent that hangs is ended after two minutes.)
    persist_every : int, optional
        Write each k-th generation to the object tier; 0 writes none.
    local_dir : str or Path, optional
        Folder of the local tier; shared memory unless given.
    chunk_bytes : int or str, optional
        Largest chunk.
    takeover : bool
        Take the run although its owner is alive, or seems so: the owner's next save fails with `FencedError`.
        Nothing is ended; see to it that the former training does not go on.
    rank, world_size : int, optional
        Which of how many processes this is that train together: each saves its own state, and a checkpoint
        is in force when all ranks have saved theirs under the same tag. ``rank="auto"`` reads both from the
        environment of ``torchrun``; without them this process is the only one.
    **options
        ``persist="incremental"`` stores checkpoints against the one before, with ``max_deltas``,
        ``full_hours`` and ``max_references``, and its ``groups`` more rarely; ``keep_last``, ``keep_every``,
        ``keep_hours`` and ``keep_best`` say what stays in the object tier, everything unless one is given
        (see the guide of retention). And ``check_documents``, ``encoders``, ``encoder_cpus``,
        ``encoder_nice``, ``bandwidth_limit``, ``dscp``, ``close_timeout``, ``commit_timeout``,
        ``max_shards``, ``parity``, ``stripes``, ``measure_links``, ``connect_timeout``,
        ``floor_bandwidth``, ``grace``, ``lease``, ``coordinator_timeout``, ``session_timeout``,
        ``coordinator_auth`` and what goes with it, ``scheduler_timeout``, ``metrics_port``, ``metrics_host``,
        as in ``fastcheck.yaml``.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    RunInUseError
        If another live manager saves this run and `takeover` is not given, or another run saves into this
        directory.
    CoordinationError
        If the scheduler or the coordinator does not answer.

    Notes
    -----
    Methods may be called from any thread; saves are taken one after the other. In a signal handler only
    `close` may be called: let it set a flag, and save in the training loop. Encoding and sending happen in a
    process of its own (the agent), which finishes the save in flight when this process dies.
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
        takeover: bool = False,
        rank: int | Literal["auto"] | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        self._pid = os.getpid()
        location = place_of(checkpoint_dir)
        run = run_id_for(location) if run_id is None else check_name(run_id, "run_id")
        self._place = Place(parse_rank(rank, world_size), run, location)
        self._location, self._run = self._place.location, self._place.run
        self._settings = settings(
            on_busy=on_busy,
            persist_every=persist_every,
            local_dir=local_folder(local_dir),
            chunk_bytes=chunk_bytes,
            **options,
        )
        check_groups(location, self._settings.groups, alone=self._place.alone)
        wanted = parse_shards(num_shards)
        self._peers = scheduler is not None or coordinator is not None
        if wanted is not None and not self._peers:
            raise ConfigError(
                f"num_shards={wanted} needs storage nodes: give scheduler=... or coordinator=..., "
                "or leave num_shards at 'auto'"
            )
        self._folder = CheckpointFolder(open_store(self._location))
        refuse_foreign_run(self._location, self._run, self._folder.committed())
        url = coordinator_url(
            coordinator_of_nodes(scheduler, coordinator, self._settings.scheduler_seconds)
            or own_coordinator(location, run)
        )
        #: Held while a save is taken or a load runs: each is alone with the slots.
        self._turn = threading.RLock()
        self._in_turn = False
        self._closing = threading.Lock()
        self._closed = False
        #: Why the last save that failed did; reported once more by the next save.
        self._unreported: FastCheckError | None = None
        self.last_load: LoadReport | None = None
        root = (root_for_takeover if takeover else root_after_takeover)(
            self._run, local_folder(self._settings.local_dir)
        )
        self._local = LocalTier(self._run, Path(root) if root else None)
        folder = None if is_url(self._location) else Path(self._location)
        self._metrics = SaveMetrics(self._run)
        self._metrics_port = MetricsPort(self._metrics.families, self._settings)
        self._ownership = Ownership(self._run, self._local.path, folder, takeover=takeover)
        try:
            self._agents = Agents(
                self._start_message(url, wanted, root), self._note_failure, takeover=takeover
            )
            self._snapshots = Snapshots(
                self._local.slots, self._agents, self._settings.on_busy, lambda: self._closed
            )
            self._busy = BusyCount(self._agents.tell_busy)
            self._stored = Stored(
                self._place, self._agents, self._local, self._folder, self._settings, peers=self._peers
            )
            self._agents.link()
            self._metrics_port.open()
        except BaseException:
            self._ownership.release()
            raise
        atexit.register(self._close_at_exit)

    def _start_message(self, url: str, wanted: int | None, root: str | None) -> Message:
        return {
            "run": self._run,
            "location": self._location,
            "coordinator_url": url,
            "peers": self._peers,
            "wanted_shards": wanted,
            "settings": self._settings.to_dict() | {"local_dir": root},
            "owner": f"pid {self._pid} on {os.uname().nodename}",
            "ranks": self._place.message,
            "log_level": logging.getLogger("fastcheck_dask").getEffectiveLevel(),
        }

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._run

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus gets the numbers of this manager; None if nowhere."""
        return self._metrics_port.url

    @property
    def checkpoint_dir(self) -> str:
        """The object tier's folder."""
        return self._location

    def save_async(self, state: Any, tag: str, *, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Save a state; only the copy into shared memory is waited for.

        Parameters
        ----------
        state : object
            Nested containers of tensors, arrays and plain values. It may be changed as soon as this returns.
        tag : str
            Name of the checkpoint. Saving a tag again makes a newer checkpoint of that name.
        metrics : mapping of str to float, optional
            Numbers that belong to the checkpoint (``{"loss": 0.31}``); `keep_best` goes by them.

        Returns
        -------
        SaveHandle
            Tells how far the save has come. Whatever goes wrong is told there, in the log, and in the log of
            the next save, and is not raised into training: a local tier without room (`TierFullError`) or an
            agent that does not start as well as what happens after the copy.

        Raises
        ------
        UnsupportedLeafError
            If something in the state could not be restored; nothing was saved.
        ConfigError
            If the tag cannot be used, or a metric is no number.
        SaveBusyError
            If earlier saves use both slots and `on_busy` is ``"raise"``; or if this was called, from a signal
            handler, in the middle of another save.
        RunInUseError, FencedError
            If the run has another owner now.
        ClosedError
            After `close`, and in a forked child.
        """
        self._check_open()
        check_name(tag, "tag")
        noted = check_metrics(metrics)
        started = time.monotonic()
        with self._alone(f"save {tag!r}"), self._others_told(tag):
            if self._unreported is not None:
                log.error("an earlier save failed: %s", self._unreported)
                self._unreported = None
            flat = flatten(state, chunk_bytes=self._settings.chunk_bytes)
            levels: tuple[Level, ...] = ("local", "peers", "object") if self._peers else ("local", "object")
            handle = SaveHandle(tag, levels, self._metrics)
            self._snapshots.save(flat, handle, started=started, metrics=noted)
            self._snapshots.make_room_ahead(self._turn)
        return handle

    @contextlib.contextmanager
    def _others_told(self, tag: str) -> Iterator[None]:
        """Tell the other ranks when a save is not even begun here."""
        try:
            yield
        except FastCheckError as error:
            self._agents.gave_up(tag, str(error))
            raise

    @contextlib.contextmanager
    def network_busy(self) -> Iterator[None]:
        """Hold back the sending of checkpoints while the training communicates.

        Around gradient synchronisation::

            with manager.network_busy():
                all_reduce(gradients)

        Notes
        -----
        May be entered again, also by several threads: the network is busy until all have left, however that
        comes. Entering costs at most one small message to the agent, and waits for nothing. A pause cannot
        stall a save: a message to a storage node waits for at most 5 s in all, and what is busy for longer
        than 60 s without a break counts as over. Loads are not held back.
        """
        self._busy.enter()
        try:
            yield
        finally:
            self._busy.leave()

    def _note_failure(self, error: FastCheckError) -> None:
        self._unreported = error

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Wait until no other thread saves or loads."""
        with self._turn:
            # The same thread comes here a second time only from a signal handler; it would use the slot, or
            # wait for the one, that the interrupted call is at work in.
            if self._in_turn:
                raise SaveBusyError(
                    f"{what} was called in the middle of another call, from a signal handler: set a flag "
                    "there, and save in the training loop"
                )
            self._in_turn = True
            try:
                self._check_open()
                yield
            finally:
                self._in_turn = False

    def load(
        self,
        tag: str | None = None,
        *,
        include: str | list[str] | None = None,
        fallback: Literal["any", "healthy"] = "any",
        into: Any = None,
        strict: bool = True,
        older_groups: bool = False,
    ) -> Any:
        """Bring a state back from the fastest source that has it.

        Parameters
        ----------
        tag : str, optional
            The newest checkpoint of that name. Without it the newest checkpoint that can be had complete;
            those that were skipped are in the log and in `last_load`.
        include : str or list of str, optional
            Patterns of leaf paths (``"model/*"``; ``*`` also crosses ``/``): only what matches is read.
            Of dicts the other entries are left out, in lists and tuples they become None.
        fallback : {"any", "healthy"}
            ``"healthy"`` skips checkpoints that are flagged (NaN or infinity where there was none before,
            nothing changed) as if they were damaged; not with `tag`.
        into : object, optional
            A state like the saved one, whose tensors (torch or numpy, any strides, any device) are filled in
            place; plain values in it are not looked at. Names, shapes and dtypes are compared first.
        strict : bool
            With `into`: if False, tensors that only one side has, or has in another shape or dtype, are left
            alone instead of refused, and the result lacks them.
        older_groups : bool
            Whether any group of a checkpoint may be of an older step than the rest, as the object tier may
            have it; otherwise only the `groups` of this manager may. `last_load.older` says of which.

        Returns
        -------
        object or None
            The state; tensors are on the CPU, or those of `into`. None if nothing was ever saved.

        Raises
        ------
        CheckpointNotFoundError
            If no committed checkpoint has that tag.
        UnrecoverableError
            If there are checkpoints and no source could give one complete.
        LayoutError
            If nothing matches `include`, if the checkpoint does not fit `into` (which is unchanged then), or
            was saved with another `world_size`.
        ConfigError
            If `fallback` is neither, or ``"healthy"`` with a tag or several ranks.

        Notes
        -----
        With several ranks all of them load the same checkpoint, the newest that all have saved: one that
        cannot restore its part raises, and names the next older one to load on all ranks.
        """
        self._check_open()
        healthy = check_fallback(fallback, tag, alone=self._place.alone)
        with self._alone("load"):
            self._settle()
            target = None if into is None else Into(into, strict)
            recovered = self._stored.recover(
                tag, include, into=target, healthy=healthy, any_older=older_groups
            )
            if recovered is None:
                return None
            self.last_load = recovered.report
            return recovered.state

    def _settle(self) -> None:
        """Wait until no save of ours is on its way to a commit: a load sees what was saved before it."""
        for handle in self._agents.in_flight:
            with contextlib.suppress(FastCheckError):
                handle.wait("peers" if self._peers else "object")

    def tags(self) -> list[str]:
        """Return the tags of the committed checkpoints, oldest first."""
        self._check_open()
        return self._stored.tags()

    def path(self, tag: str) -> str:
        """Return where the object tier has the newest checkpoint of a tag: a zarr group."""
        return self._stored.path(tag)

    def wait_until_finished(self, timeout: float | None = None) -> None:
        """Wait until every save is done, however it ended; `TierTimeoutError` after `timeout` seconds."""
        deadline = Deadline.after(timeout)
        for handle in self._agents.in_flight:
            handle.exception(deadline.left())

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
        if os.getpid() != self._pid:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._close_at_exit)
        deadline = Deadline.after(self._settings.close_seconds if timeout is None else max(0.0, timeout))
        # Whoever waits for a slot gives up; whoever copies hands over first, so that nothing is half done.
        self._agents.nudge()
        alone = self._turn.acquire(timeout=deadline.left() or 0.0)
        try:
            safe = self._agents.close(deadline.left() or 0.0)
            if safe and alone and not keep_local:
                self._local.remove()
        finally:
            if alone:
                self._turn.release()
            self._local.close()
            self._metrics_port.close()
            self._ownership.release()
        if self._unreported is not None:
            log.error("a save failed: %s", self._unreported)

    def __enter__(self) -> FastCheckManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this manager belongs to process {self._pid}, of which this one ({os.getpid()}) was forked; "
                "save and load there"
            )
        if self._closed:
            raise ClosedError("the manager is closed; make a new one")

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.close()

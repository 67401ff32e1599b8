"""The process of a storage node: it owns the store, and outlives schedulers and Dask workers."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import dask
from distributed.comm.addressing import get_address_host

from fastcheck_dask.config import Settings, settings
from fastcheck_dask.coordination.base import Coordinator, NodeInfo, Registration
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.election import Service
from fastcheck_dask.errors import ConfigError, CoordinationError, FastCheckError
from fastcheck_dask.ids import check_name
from fastcheck_dask.metrics.optional import serve_metrics, show_metrics
from fastcheck_dask.node.background import Background, background
from fastcheck_dask.node.control import check_worker, keep_worker
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.draining import drained
from fastcheck_dask.node.housekeeper import Housekeeper
from fastcheck_dask.node.life import NodeLife
from fastcheck_dask.node.machine import check_memory, memory_limit_bytes
from fastcheck_dask.node.merge_queue import MergeQueue
from fastcheck_dask.node.plugin import StoragePlugin
from fastcheck_dask.node.scrubber import Scrubber
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.node.states import NodeStates
from fastcheck_dask.node.untracked import freeze_what_is_here
from fastcheck_dask.node.vitals import Vitals
from fastcheck_dask.scheduler_tls import check_scheduler
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import clients_for
from fastcheck_dask.tiers.wire import listen_address
from fastcheck_dask.tiers.wire_tls import DataTls

#: How often the node looks whether the registry still has it.
REGISTRY_SECONDS = 5.0
#: Older generations of a run that are kept besides the newest.
DEFAULT_RING = 2

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: How long a thread may keep the interpreter from the loop of the data port, which needs it again after every
#: read from a socket.
_SWITCH_SECONDS = 0.0005
_MMAP_BYTES = 128 * 2**10


class ServiceOf(Protocol):
    """Makes the service of a master."""

    def __call__(self, coordinator: Coordinator, scheduler: str | None, *, work: Background) -> Service:
        """Return it; `scheduler` is the address of Dask's."""
        ...


logger = logging.getLogger(__name__)


def storage(scheduler: str | None, coordinator: str, *, name: str, **options: Any) -> int:
    """Run a storage node until SIGTERM or SIGINT, and say on stderr why if it cannot.

    Parameters are those of :func:`run_storage`. Call it from the main thread of a process of its own.

    Returns
    -------
    int
        Exit code: 0 after a signal, 1 after an error.
    """
    try:
        run_storage(scheduler, coordinator, name=name, **options)
    except FastCheckError as error:
        sys.stderr.write(f"fastcheck storage {name}: {error}\n")
        return 1
    return 0


def run_storage(
    scheduler: str | None,
    coordinator_url: str,
    *,
    memory_bytes: int,
    name: str,
    rack: str = "default",
    host: str = "127.0.0.1",
    port: int = 0,
    insecure: bool = False,
    service_of: ServiceOf | None = None,
    ring: int = DEFAULT_RING,
    metrics_port: int | None = None,
    drain_seconds: float = 0.0,
    config: Mapping[str, Any] | None = None,
    **rates: Any,
) -> None:
    """Run a storage node; returns after SIGTERM or SIGINT, when it is drained.

    When it serves and is registered, it prints ``fastcheck storage NAME: data fcs://HOST:PORT`` (``fcss://``
    with TLS), and before that, with a `metrics_port`, ``fastcheck storage NAME: metrics http://HOST:PORT/metrics``.

    Parameters
    ----------
    scheduler : str or None
        Address of the Dask scheduler, which may be absent for any time; None for a node without Dask.
    coordinator_url : str
        Of the coordinator; it has to answer now.
    memory_bytes : int
        What checkpoints may take; merging, and what is just being sent or received, takes some chunks on top.
    metrics_port : int, optional
        Where the node serves its metrics for Prometheus, on `host`; 0 for any. They are also among those of
        its Dask worker.
    ring : int
        Older generations of each run that are kept besides the newest while there is room; 0 for none.
    **rates
        Of the background work, see :func:`background`.
    drain_seconds : float
        How long the node waits at most, after the first signal, until its shards are on other nodes, or in
        the object tier if no node can take them. A second signal ends the waiting.
    name, rack : str
        Of the node. No live node may have the same name.
    host, port
        Of the data port, port 0 for any; the Dask worker listens on the same host.
    insecure : bool
        Whether `host` may be other than loopback without TLS of the data port and of the scheduler.
    config : mapping of str to object, optional
        Values that win over the configuration of this process while the node runs, such as
        ``fastcheck.data.tls-ca``.
    service_of : callable, optional
        Makes, of the node's coordinator and the scheduler, what the node does while it leads.

    Raises
    ------
    ConfigError
        If an argument is wrong.
    CoordinationError
        If the coordinator does not answer, or has a live node of this name.
    TierError
        If the data port cannot be opened.
    """
    check_name(name, "a storage node")
    check_name(rack, "a rack")
    check_memory(memory_bytes, memory_limit_bytes())
    if ring < 0:
        raise ConfigError(f"a storage node keeps 0 or more older generations, got {ring}")
    work = background(**rates)
    _give_memory_back()
    sys.setswitchinterval(_SWITCH_SECONDS)
    with ExitStack() as stack:
        # Whatever connects from this process, the tasks of its worker too, finds the same.
        stack.enter_context(dask.config.set(config or {}))
        found = settings()
        tls = _checked_tls(found, scheduler, host, port, insecure=insecure)
        coordinator = connect(
            coordinator_url,
            timeout_seconds=found.coordinator_seconds,
            session_seconds=found.session_seconds,
        )
        stack.callback(coordinator.close)
        store = ShardStore(name, memory_bytes, ring=ring)
        scrubber, queue = _work_on(store, coordinator, work, stack)
        service = None if service_of is None else service_of(coordinator, scheduler, work=work)
        states = NodeStates(
            name, coordinator.entries, store.status, service=service, client=clients_for(found)
        )
        vitals = Vitals(store, scrubber, lambda: states.leads)
        server = DataServer(
            store,
            open_store,
            host=host,
            port=port,
            insecure=insecure,
            operations=states.operations,
            report_more=vitals.more,
            dscp=found.dscp,
            tls=tls,
        )
        stack.callback(server.close)
        server.start()
        info = NodeInfo(name, server.address, rack, get_address_host(server.address), memory_bytes)
        registry = _Registry(coordinator, info)
        stack.callback(registry.close)
        stack.callback(states.close)
        states.start(server.address)
        life = NodeLife(coordinator.entries, info)
        _show(vitals, name, host, metrics_port, stack)
        where = {"data_addr": server.address, "rack": rack, "coordinator": coordinator_url}
        plugin = StoragePlugin(name, queue, lambda: {**where, **vitals.brief()})
        control = None if scheduler is None else keep_worker(scheduler, name=name, host=host, plugin=plugin)
        drain = partial(drained, store, coordinator, seconds=drain_seconds)
        freeze_what_is_here()
        with life:
            asyncio.run(
                _until_signal(info, control, registry=registry, states=states, life=life, drain=drain)
            )


def _checked_tls(
    found: Settings, scheduler: str | None, host: str, port: int, *, insecure: bool
) -> DataTls | None:
    """Return how the data port is secured; raise `ConfigError` if strangers could get at this node."""
    tls = DataTls.of(found)
    listen_address(host, port, insecure=insecure, tls=tls is not None)
    check_worker(scheduler, host, insecure=insecure)
    if scheduler is not None:
        check_scheduler(scheduler, "worker", "client")
    return tls


def _work_on(
    store: ShardStore, coordinator: Coordinator, work: Background, stack: ExitStack
) -> tuple[Scrubber, MergeQueue]:
    """Start what is done to the store in the background."""
    scrubber = Scrubber(store, pause_seconds=work.scrub_seconds, bytes_per_second=work.scrub_bytes_per_second)
    stack.callback(scrubber.close)
    housekeeper = Housekeeper(store, coordinator)
    stack.callback(housekeeper.close)
    queue = MergeQueue(store)
    stack.callback(queue.close)
    return scrubber, queue


def _show(vitals: Vitals, name: str, host: str, port: int | None, stack: ExitStack) -> None:
    """Show the metrics, and serve them if there is a port."""
    stack.callback(show_metrics(vitals.families))
    if port is not None:
        metrics = serve_metrics(vitals.families, host, port)
        stack.callback(metrics.close)
        sys.stdout.write(f"fastcheck storage {name}: metrics {metrics.url}\n")


async def _until_signal(
    info: NodeInfo,
    control: Coroutine[Any, Any, None] | None,
    *,
    registry: _Registry,
    states: NodeStates,
    life: NodeLife,
    drain: Callable[[], Coroutine[Any, Any, bool]],
) -> None:
    """Run the control plane until a signal asks the process to end, and its work is over or a second one."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, number)
    sys.stdout.write(f"fastcheck storage {info.name}: data {info.address}\n")
    sys.stdout.flush()
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(registry.watch())]
    if control is not None:
        tasks.append(asyncio.create_task(control))
    asking = await asked.get()
    logger.info("storage node %s drains: %s", info.name, asking.name)
    # New saves shall not be placed here while it drains, and the rest closes.
    await asyncio.to_thread(registry.drain)
    await asyncio.to_thread(states.drain)
    tasks += [asyncio.create_task(asked.get()), asyncio.create_task(drain())]
    await asyncio.wait(tasks[-2:], return_when=asyncio.FIRST_COMPLETED)
    logger.info("storage node %s ends", info.name)
    await asyncio.to_thread(life.end, "ended", asking.name)
    await asyncio.to_thread(registry.close)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Registry:
    """Keeps the node in the registry: a session that the coordinator gave up takes the entry with it."""

    def __init__(self, coordinator: Coordinator, info: NodeInfo) -> None:
        self._info = info
        self._registration: Registration | None = coordinator.register(info)

    async def watch(self) -> None:
        """Look now and then, and register again if need be; until cancelled."""
        while (registration := self._registration) is not None:
            await asyncio.sleep(REGISTRY_SECONDS)
            try:
                await asyncio.to_thread(registration.restore)
            except CoordinationError as error:
                logger.warning("node %s cannot ask its coordinator: %s", self._info.name, error)

    def drain(self) -> None:
        """Say in the registry that nothing new shall come here, and that what is here has to go."""
        self._info = replace(self._info, state="draining")
        if self._registration is not None:
            try:
                self._registration.update(self._info)
            except CoordinationError as error:
                logger.warning("node %s cannot say that it drains: %s", self._info.name, error)

    def close(self) -> None:
        """Leave the registry. Idempotent; a coordinator that is away notices by itself."""
        registration, self._registration = self._registration, None
        if registration is not None:
            try:
                registration.close()
            except CoordinationError as error:
                logger.debug("node %s could not leave the registry: %s", self._info.name, error)


def _give_memory_back() -> None:
    """Have payloads mapped one by one: what is freed goes back to the system, whatever lies around."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.debug("no mallopt here: freed memory may stay with the process")
        return
    # Setting the threshold also ends its growth, by which glibc would keep freed chunks in the heap.
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _MMAP_BYTES)

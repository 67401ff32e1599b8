"""The story: a run without failures, then the same run with its machines killed, twice."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fastcheck_dask.demo.cluster import Cluster
from fastcheck_dask.demo.processes import DemoFailedError, no_orphans
from fastcheck_dask.demo.progress import Screen
from fastcheck_dask.demo.results import Outcome, Recovery
from fastcheck_dask.demo.scenario import MODELS, TITLES, Scenario, scenario
from fastcheck_dask.demo.trainer import Storage, Trainer
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.ids import run_id_for
from fastcheck_dask.tiers.local import SHARED_MEMORY, LocalTier

_NODE_MEMORY = "512 MiB"
#: Two slots of the larger job, and some air; containers often have 64 MiB.
_SHARED_BYTES = 160 * 2**20


def tell_story(folder: Path, *, seed: int, quick: bool, screen: Screen) -> list[Outcome]:
    """Play both jobs.

    Parameters
    ----------
    folder : Path
        Everything goes into it.
    seed : int
        Of the networks and of the order of the data.
    quick : bool
        Small networks and few steps.
    screen : Screen
        Is told what happens.

    Returns
    -------
    list of Outcome
        One for each network.

    Raises
    ------
    FastCheckError
        If a process does not do its part. No process, and nothing in shared memory, is left in any case.
    """
    with no_orphans():
        screen.say("Starting a Dask scheduler and 5 storage nodes")
        with Cluster(folder, _NODE_MEMORY) as cluster:
            plans = [scenario(model, quick=quick) for model in MODELS]
            return [
                _Job(plan, cluster, folder=folder, seed=seed, quick=quick, screen=screen).play()
                for plan in plans
            ]


@contextmanager
def work_folder(out: Path, *, keep: bool) -> Iterator[Path]:
    """Make a new folder in `out`, and remove it after the block unless it is to be kept.

    After an error of FastCheck the logs, which the message names, are kept in any case.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=out)).resolve()
    spared: set[Path] = set()
    try:
        yield folder
    except FastCheckError:
        spared.add(folder / "logs")
        raise
    finally:
        if not keep:
            _remove(folder, spared)


def _remove(folder: Path, spared: set[Path]) -> None:
    for entry in set(folder.iterdir()) - spared:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


class _Job:
    """One training job and its failures."""

    def __init__(
        self,
        scenario: Scenario,
        cluster: Cluster,
        *,
        folder: Path,
        seed: int,
        quick: bool,
        screen: Screen,
    ) -> None:
        self._scenario, self._cluster, self._screen = scenario, cluster, screen
        self._seed, self._quick = seed, quick
        too_small = shutil.disk_usage(SHARED_MEMORY).free < _SHARED_BYTES
        self._local_dir = folder / "local" if too_small else None
        #: When the last failure struck.
        self._struck_at = 0.0
        if too_small:
            screen.say(f"  {SHARED_MEMORY} is too small here: the local tier is in {self._local_dir}")
        self._storage = Storage(
            folder / "checkpoints" / scenario.model,
            cluster.scheduler_address,
            cluster.coordinator_url,
            self._local_dir,
        )

    def play(self) -> Outcome:
        """Train without failures, then with; return both."""
        plan = self._scenario
        self._screen.say(f"[bold]{TITLES[plan.model]} network[/], {plan.steps} steps")
        self._cluster.start_nodes()
        with self._trainer("reference", "without failures", storage=None) as trainer:
            trainer.finish()
        outcome = Outcome(plan, trainer.attempt)
        self._cluster.wait_ready()
        with ExitStack() as stack:
            stack.callback(self._wipe_local)
            self._until_peer_kill(outcome)
            self._until_object_kill(outcome)
            self._to_the_end(outcome)
        return outcome

    def _until_peer_kill(self, outcome: Outcome) -> None:
        plan = self._scenario
        with self._trainer("first", "with checkpoints", stay_at=plan.peer_kill_step) as trainer:
            outcome.attempts.append(trainer.attempt)
            trainer.follow(lambda now: now.last_step >= plan.peer_kill_step and len(now.reached("peers")) > 0)
            # The first of the nodes of a checkpoint holds a data shard, the last one the parity.
            victim = trainer.attempt.reached("peers")[-1].stats["nodes"][0]
            self._strike(trainer, [victim], outcome, wanted_source="peers+parity")

    def _until_object_kill(self, outcome: Outcome) -> None:
        plan = self._scenario
        title = "recovered from the storage nodes"
        with self._trainer("second", title, stay_at=plan.object_kill_step) as trainer:
            self._recovered(trainer, outcome)
            trainer.follow(
                lambda now: now.last_step >= plan.object_kill_step and len(now.reached("object")) > 0
            )
            self._strike(trainer, self._cluster.alive, outcome, wanted_source="object")

    def _to_the_end(self, outcome: Outcome) -> None:
        with self._trainer("third", "recovered from the object tier") as trainer:
            self._recovered(trainer, outcome)
            trainer.finish()

    def _strike(self, trainer: Trainer, nodes: list[str], outcome: Outcome, *, wanted_source: str) -> None:
        """Kill the training host, whose shared memory is lost with it, and storage nodes."""
        self._cluster.kill_nodes(nodes)
        trainer.kill()
        self._wipe_local()
        self._struck_at = time.monotonic()
        outcome.recoveries.append(
            Recovery(("trainer", *nodes), trainer.attempt.last_step, wanted_source=wanted_source)
        )
        self._screen.say(
            f"  [red]SIGKILL[/] after step {trainer.attempt.last_step}: the training process, its agent, and "
            f"{'storage node ' + nodes[0] if len(nodes) == 1 else 'every storage node'}; shared memory wiped"
        )

    def _recovered(self, trainer: Trainer, outcome: Outcome) -> None:
        """Wait until a new process trains again, and note how it came back."""
        outcome.attempts.append(trainer.attempt)
        recovery = outcome.recoveries[-1]
        trainer.follow(lambda now: now.last_step > 0)
        if trainer.attempt.loaded is None or trainer.first_step_at is None:
            raise DemoFailedError(
                f"the training began anew instead of recovering from {recovery.wanted_source}"
            )
        recovery.note(trainer.attempt.loaded)
        recovery.back_seconds = trainer.first_step_at - self._struck_at
        self._screen.say(
            f"  [green]recovered[/] step {recovery.step} from {recovery.source} "
            f"in {recovery.load_seconds:.2f} s"
        )

    def _trainer(
        self, name: str, title: str, *, storage: Storage | str | None = "own", stay_at: int | None = None
    ) -> Trainer:
        return Trainer(
            self._scenario,
            self._storage if isinstance(storage, str) else storage,
            name=name,
            title=title,
            seed=self._seed,
            quick=self._quick,
            logs=self._cluster.logs,
            environment=self._cluster.environment,
            screen=self._screen,
            stay_at=stay_at,
        )

    def _wipe_local(self) -> None:
        LocalTier(run_id_for(str(self._storage.checkpoint_dir)), self._local_dir).remove()

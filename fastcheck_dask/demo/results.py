"""What the demonstration measured, and whether it came out as it must. Pure."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from fastcheck_dask.demo.scenario import Model, Scenario

#: What must be the same at the end of both runs, bit for bit.
COMPARED = ("weights", "optimizer", "losses")


@dataclass(frozen=True)
class Save:
    """One save as far as it came."""

    tag: str
    #: Reached levels: ``"local"``, ``"peers"``, ``"object"``.
    levels: tuple[str, ...]
    #: Of the handle, when the highest level was reached.
    stats: dict[str, Any]


@dataclass
class Attempt:
    """What one training process did until its end, or until it was killed."""

    #: The ``loaded`` event; None if it began anew.
    loaded: dict[str, Any] | None = None
    #: Loss by step.
    losses: dict[int, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    saves: dict[str, Save] = field(default_factory=dict)
    #: Of the whole state at the end; None if it was killed.
    digests: dict[str, str] | None = None
    #: All losses of the run as the process knows them at the end.
    all_losses: list[float] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Note one event of the training process."""
        kind = event["event"]
        if kind == "loaded":
            self.loaded = event
        elif kind == "step":
            self.losses[event["step"]] = event["loss"]
            self.step_seconds.append(event["seconds"])
        elif kind == "saved":
            tag = event["tag"]
            before = self.saves[tag].levels if tag in self.saves else ()
            self.saves[tag] = Save(tag, (*before, event["level"]), event["stats"])
        elif kind == "done":
            self.digests, self.all_losses = event["digests"], event["losses"]

    @property
    def last_step(self) -> int:
        """The last step that it told of; 0 if none."""
        return max(self.losses, default=0)

    def reached(self, level: str) -> list[Save]:
        """Return the saves that reached a level, oldest first."""
        return [save for save in self.saves.values() if level in save.levels]


@dataclass
class Recovery:
    """One failure, and how the training came back."""

    killed: tuple[str, ...]
    killed_at_step: int
    #: The sources that the load must have used, as `LoadReport.source` names them.
    wanted_source: str
    source: str = ""
    step: int = 0
    raw_bytes: dict[str, int] = field(default_factory=dict)
    received_bytes: int = 0
    rebuilt_chunks: int = 0
    skipped: list[str] = field(default_factory=list)
    #: From `load` to a training that can go on.
    load_seconds: float = 0.0
    #: From the kill to the first new step, with the start of the process.
    back_seconds: float = 0.0

    @property
    def came_as_wanted(self) -> bool:
        """Whether it came from where it must; no parity is needed once the lost shard was rebuilt."""
        repaired = (self.wanted_source, self.source) == ("peers+parity", "peers")
        return repaired or self.source == self.wanted_source

    def note(self, loaded: dict[str, Any]) -> None:
        """Take what the training process told of its load."""
        self.source, self.step = loaded["source"], loaded["step"]
        self.raw_bytes, self.received_bytes = loaded["raw_bytes"], loaded["received_bytes"]
        self.rebuilt_chunks, self.skipped = loaded["rebuilt"], loaded["skipped"]
        self.load_seconds = loaded["seconds"]


@dataclass
class Outcome:
    """One training job, with and without failures."""

    scenario: Scenario
    reference: Attempt
    attempts: list[Attempt] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def model(self) -> Model:
        """Which of the two networks."""
        return self.scenario.model

    def saves(self) -> list[Save]:
        """Return the saves of all attempts in order; one that was done again counts again."""
        return [save for attempt in self.attempts for save in attempt.saves.values()]

    def faults(self) -> list[str]:
        """Return everything that did not come out as it must; empty if all did."""
        wrong = []
        final = self.attempts[-1].digests or {}
        for what in COMPARED:
            want, got = (self.reference.digests or {}).get(what), final.get(what)
            if want is None or want != got:
                wrong.append(f"{what} of the interrupted run: sha256 {got}, without failures {want}")
        for attempt in self.attempts:
            for step, loss in attempt.losses.items():
                want_loss = self.reference.losses.get(step)
                if want_loss != loss:
                    wrong.append(f"loss of step {step}: {loss!r}, without failures {want_loss!r}")
        wrong += [
            f"recovery after step {r.killed_at_step} came from {r.source or 'nowhere'}, not {r.wanted_source}"
            for r in self.recoveries
            if not r.came_as_wanted
        ]
        losses = self.reference.all_losses
        if not losses or not losses[-1] < losses[0]:
            wrong.append("the loss did not fall")
        return wrong

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the summary."""
        losses = self.reference.all_losses
        return {
            "scenario": asdict(self.scenario),
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "digests": {"uninterrupted": self.reference.digests, "interrupted": self.attempts[-1].digests},
            "saves": [asdict(save) for save in self.saves()],
            "recoveries": [asdict(recovery) for recovery in self.recoveries],
            "tiers": {level: tier_row(self.saves(), level) for level in ("local", "peers", "object")},
            "faults": self.faults(),
        }


def moved(save: Save, level: str) -> tuple[int, float] | None:
    """Return the bytes that a save moved to a tier, and the seconds; None if none are known."""
    stats = save.stats
    # Of a save whose end nobody saw nothing but the stall is known.
    if level not in save.levels or "raw_bytes" not in stats:
        return None
    if level == "local":
        return stats["raw_bytes"], stats["stall_seconds"]
    if level == "peers":
        return stats["sent_bytes"], stats["save_seconds"]
    if not stats["nodes"]:
        # Without storage nodes the save itself wrote to the object tier.
        return stats["sent_bytes"], stats["save_seconds"]
    if "persisted_bytes" not in stats:
        return None
    return stats["persisted_bytes"], stats["persist_seconds"]


def tier_row(saves: list[Save], level: str) -> dict[str, float] | None:
    """Return what the saves that reached a tier moved to it, medians; None if there was none.

    Returns
    -------
    dict or None
        ``saves`` (a count), ``raw_bytes`` and ``sent_bytes`` of one save, ``seconds`` of one save.
    """
    found = [(save.stats["raw_bytes"], *at) for save in saves if (at := moved(save, level)) is not None]
    if not found:
        return None
    raw_bytes, sent_bytes, seconds = (statistics.median(column) for column in zip(*found, strict=True))
    return {"saves": len(found), "raw_bytes": raw_bytes, "sent_bytes": sent_bytes, "seconds": seconds}

"""What a checkpoint says of itself beside its state: metrics, and what is suspicious about it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fastcheck_dask.errors import ConfigError, CorruptDataError

#: JSON has no numbers for these.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

#: Flags: values that are not finite where there were none before; weights that did not change.
NONFINITE, UNCHANGED = "nonfinite", "unchanged"


@dataclass(frozen=True)
class OlderGroup:
    """Of which checkpoint a group of leaves is that was not written with the others."""

    generation: int
    tag: str
    #: When that checkpoint was made, in seconds.
    created_unix: float

    @classmethod
    def from_document(cls, found: Any) -> OlderGroup:
        """Read what ``asdict`` wrote; `CorruptDataError` for anything else."""
        if not isinstance(found, dict) or found.keys() != cls.__dataclass_fields__.keys():
            raise CorruptDataError(f"an older group is {found!r:.200}")
        generation, tag, created = found["generation"], found["tag"], found["created_unix"]
        if type(generation) is not int or generation < 0 or not isinstance(tag, str):
            raise CorruptDataError(f"an older group is of {generation!r:.80} ({tag!r:.80})")
        if type(created) not in (int, float) or not math.isfinite(created):
            raise CorruptDataError(f"an older group is of the time {created!r:.80}")
        return cls(generation, tag, float(created))


@dataclass(frozen=True)
class Notes:
    """Metrics that the user gave, and what was found while encoding."""

    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: Paths of the arrays with NaN or infinities where none are expected, sorted.
    suspicious: tuple[str, ...] = ()
    #: Paths of those that had them from the beginning, such as masks.
    accepted: tuple[str, ...] = ()
    #: Whether no array of floats differs from the checkpoint before.
    unchanged: bool = False
    #: Groups that are of another step than the rest, by their names; only in the object tier.
    older: Mapping[str, OlderGroup] = field(default_factory=dict, hash=False)

    @property
    def flags(self) -> tuple[str, ...]:
        """Why the checkpoint is not taken for healthy; empty if it is."""
        return (NONFINITE,) * bool(self.suspicious) + (UNCHANGED,) * self.unchanged

    def __bool__(self) -> bool:
        return self != Notes()

    def describe(self) -> str:
        """Say what is suspicious, for the log."""
        told = []
        if self.suspicious:
            more = f" and {len(self.suspicious) - 3} more" if len(self.suspicious) > 3 else ""
            told.append(f"NaN or infinity in {', '.join(self.suspicious[:3])}{more}")
        if self.unchanged:
            told.append("nothing changed since the checkpoint before")
        return "; ".join(told)

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON, without what is empty."""
        document = {
            "metrics": metrics_to_json(self.metrics),
            "suspicious": list(self.suspicious),
            "accepted": list(self.accepted),
            "unchanged": self.unchanged,
            "older": {name: asdict(group) for name, group in self.older.items()},
        }
        return {name: value for name, value in document.items() if value}

    @classmethod
    def from_document(cls, found: Any) -> Notes:
        """Undo :meth:`to_document`; `CorruptDataError` for what cannot be right."""
        if not isinstance(found, dict):
            raise CorruptDataError(f"the notes are {found!r:.80}")
        paths = [found.get(name, []) for name in ("suspicious", "accepted")]
        if not all(isinstance(p, list) and all(isinstance(name, str) for name in p) for p in paths):
            raise CorruptDataError(f"the notes name arrays as {paths!r:.200}")
        unchanged = found.get("unchanged", False)
        if not isinstance(unchanged, bool):
            raise CorruptDataError(f"the notes say unchanged: {unchanged!r:.80}")
        metrics = metrics_from_json(found.get("metrics", {}))
        groups = found.get("older", {})
        if not isinstance(groups, dict):
            raise CorruptDataError(f"the notes say of older groups: {groups!r:.80}")
        older = {name: OlderGroup.from_document(group) for name, group in groups.items()}
        return cls(metrics, tuple(paths[0]), tuple(paths[1]), unchanged, older)


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics as JSON knows them: what is not finite becomes a word."""
    return {name: value if math.isfinite(value) else _word(value) for name, value in metrics.items()}


def metrics_from_json(found: Any) -> dict[str, float]:
    """Undo :func:`metrics_to_json`; `CorruptDataError` for anything else."""
    if not isinstance(found, dict):
        raise CorruptDataError(f"the metrics are {found!r:.80}")
    metrics = {}
    for name, value in found.items():
        number = _WORDS.get(value) if isinstance(value, str) else value
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise CorruptDataError(f"the metric {name!r:.80} is {value!r:.80}")
        metrics[name] = float(number)
    return metrics


def check_metrics(metrics: object) -> dict[str, float]:
    """Return the metrics of a save as floats; `ConfigError` names what is no number.

    >>> check_metrics({"loss": 1})
    {'loss': 1.0}
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics is a dict of numbers such as {{'loss': 0.31}}, got {metrics!r:.200}")
    found = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"the metric {name!r:.80} must be a number, got {value!r:.200}") from error
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a metric has a text as its name, got {name!r:.80}")
        # One NaN object: dicts compare by identity first, so that equal notes are equal.
        found[name] = math.nan if math.isnan(number) else number
    return found


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

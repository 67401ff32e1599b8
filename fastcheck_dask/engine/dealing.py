"""How a save is dealt to nodes of unequal bandwidth, and when chunks are moved for it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastcheck_dask.layout.stripes import Layout, assign, parity_nbytes

#: The slowest node has to take so many times as long as it would after dealing anew,
GAIN = 1.15
#: in so many saves in a row.
PATIENCE_SAVES = 3
#: What moves goes whole once: that has to be made good within so many saves, and nothing moves again before.
HORIZON_SAVES = 10


@dataclass(frozen=True)
class Deal:
    """Which chunk goes to which shard, and which of the chosen nodes takes which shard."""

    layout: Layout
    #: Places among the chosen nodes by shard, the parity shards last.
    order: tuple[int, ...]
    #: Whether chunks were moved.
    anew: bool = False


def slowest(layout: Layout, sizes: Mapping[str, int], weights: Sequence[float]) -> float:
    """Return the seconds that the slowest node takes for a checkpoint that goes whole.

    Parameters
    ----------
    layout : Layout
        Of the checkpoint.
    sizes : mapping of str to int
        Bytes of the data chunks.
    weights : sequence of float
        Bytes a second of each node, by shard, the parity shards last.
    """
    of_parity = sum(parity_nbytes(stripe, sizes) for stripe in layout.stripes)
    of_data = [sum(sizes[key] for key in layout.keys_of(shard)) for shard in range(layout.shards)]
    times = [nbytes / weight for nbytes, weight in zip(of_data, weights, strict=False)]
    return max([*times, *(of_parity / weight for weight in weights[layout.shards :])])


def is_worth(now: float, best: float, *, delta_share: float) -> bool:
    """Say whether chunks shall be moved.

    Parameters
    ----------
    now, best : float
        Seconds of the slowest node for a whole checkpoint, as it is dealt and as it could be.
    delta_share : float
        What a save sends as deltas, as a share of what it would send whole.

    Notes
    -----
    Moved, the next save takes ``best``, since what moves has no base where it comes to, and those after it
    ``delta_share * best`` instead of ``delta_share * now``: over `HORIZON_SAVES` that has to be less. And the
    slowest node has to take `GAIN` times as long as it could, since rates are measured.
    """
    moved = best * (1 + delta_share * (HORIZON_SAVES - 1))
    return now > GAIN * best and now * delta_share * HORIZON_SAVES > moved


class Dealer:
    """Deals one save after the other. Belongs to one event loop.

    Without weights chunks are dealt evenly. With them a shard gets bytes in proportion to what its node
    takes, up to what the slowest parity node takes: a parity shard is as large as the largest data shard. So
    the nodes that take most become parity nodes, where a checkpoint is dealt for the first time or anew.
    """

    def __init__(self) -> None:
        self._worth_in_a_row = 0
        self._saves_since = HORIZON_SAVES
        #: What the save that is under way says.
        self._worth = self._anew = False

    def deal(
        self,
        sizes: Mapping[str, int],
        *,
        shards: int,
        parity: int,
        weights: Sequence[float] = (),
        previous: Layout | None = None,
        delta_share: float | None = None,
    ) -> Deal:
        """Deal a checkpoint.

        Parameters
        ----------
        sizes : mapping of str to int
            Bytes of the data chunks.
        shards, parity
            As for `assign`.
        weights : sequence of float
            Bytes a second of each chosen node, in their order; empty for an even deal.
        previous : Layout, optional
            Of the delta base.
        delta_share : float, optional
            See :func:`is_worth`; None while it is not known, and then nothing is moved.
        """
        as_chosen = tuple(range(shards + parity))
        self._worth = self._anew = False
        if not weights:
            return Deal(assign(sizes, shards=shards, parity=parity, previous=previous), as_chosen)
        order = _order(weights, shards)
        best = assign(
            sizes,
            shards=shards,
            parity=parity,
            previous=previous,
            weights=_capped([weights[place] for place in order], shards),
            anew=True,
        )
        if previous is None or previous.shards != shards or previous.parity != parity:
            return Deal(best, order)
        layout = assign(
            sizes, shards=shards, parity=parity, previous=previous, weights=_capped(weights, shards)
        )
        if delta_share is not None:
            self._worth = is_worth(
                slowest(layout, sizes, weights),
                slowest(best, sizes, [weights[place] for place in order]),
                delta_share=delta_share,
            )
        settled = self._saves_since >= HORIZON_SAVES
        self._anew = self._worth and settled and self._worth_in_a_row + 1 >= PATIENCE_SAVES
        return Deal(best, order, anew=True) if self._anew else Deal(layout, as_chosen)

    def done(self) -> None:
        """Note that the save went through."""
        self._saves_since = 1 if self._anew else self._saves_since + 1
        self._worth_in_a_row = self._worth_in_a_row + 1 if self._worth and not self._anew else 0


def _order(weights: Sequence[float], shards: int) -> tuple[int, ...]:
    """Return the places of the nodes by shard: those with the greatest weights take the parity."""
    spare = len(weights) - shards
    if not spare or min(weights[shards:]) >= max(weights[:shards]):
        return tuple(range(len(weights)))
    fastest = sorted(range(len(weights)), key=lambda place: (-weights[place], -place))[:spare]
    rest = [place for place in range(len(weights)) if place not in fastest]
    return (*rest, *sorted(fastest))


def _capped(weights: Sequence[float], shards: int) -> list[float]:
    """Return the weights of the data shards: what the parity does not take in the time need not be faster."""
    cap = min(weights[shards:], default=float("inf"))
    return [min(weight, cap) for weight in weights[:shards]]

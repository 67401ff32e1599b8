"""What the agent tells the training process of a save, as plain values. Pure."""

from __future__ import annotations

from typing import Any

from fastcheck_dask.engine.save import Saved
from fastcheck_dask.errors import to_wire


def committed_event(saved: Saved, seq: int) -> dict[str, Any]:
    """Return the event of a commit: the record, and the statistics that the handle shows.

    Parameters
    ----------
    saved : Saved
        The committed save.
    seq : int
        Number of the save, by which the training process knows its handle.
    """
    stats = saved.stats
    return {
        "event": "committed",
        "seq": seq,
        "record": saved.record.to_bytes(),
        "unplaced": None if saved.unplaced is None else to_wire(saved.unplaced),
        "stats": {
            "raw_bytes": stats.raw_bytes,
            "derived_bytes": stats.derived_bytes,
            "sent_bytes": stats.sent_bytes,
            "chunks": stats.chunks,
            "deltas": stats.deltas,
            "nodes": list(stats.nodes),
            "node_bytes": {name: nbytes for name, (nbytes, _) in stats.transfers.items()},
            "replaced": stats.replaced,
            "degraded": stats.degraded,
            "flags": list(stats.flags),
            "save_seconds": stats.seconds,
            "compressed": stats.compressed,
            "encode_bytes_per_second": stats.encode_bytes_per_second,
            "link_bytes_per_second": stats.link_bytes_per_second,
        },
    }

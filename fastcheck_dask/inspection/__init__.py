"""Look at checkpoints without a run: open, list, verify, compare, exchange and prune them."""

from __future__ import annotations

from fastcheck_dask.inspection.checkpoint import Checkpoint, LazyArray, open_checkpoint

__all__ = ["Checkpoint", "LazyArray", "open_checkpoint"]

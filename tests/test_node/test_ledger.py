"""The ledger: every array counts once."""

from __future__ import annotations

import numpy as np

from fastcheck_dask.node.ledger import Ledger


def test_ledger_counts_a_shared_array_once() -> None:
    ledger, array = Ledger(), np.zeros(10, np.uint8)
    ledger.hold([array])
    ledger.hold([array])
    assert ledger.used_bytes == 10
    ledger.let_go([array])
    assert ledger.used_bytes == 10
    ledger.let_go([array])
    assert ledger.used_bytes == 0

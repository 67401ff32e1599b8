"""Chunk descriptors."""

from __future__ import annotations

from typing import Any

import pytest

from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.tiers.descriptors import Descriptor, descriptors_from_wire

GOOD = Descriptor("w/c/0", "float32", 4096, "ab" * 16, 2**32 - 1, 0)


def test_descriptor_comes_back_same() -> None:
    assert descriptors_from_wire([GOOD.to_wire()]) == [GOOD]


@pytest.mark.parametrize(
    "change",
    [
        {"key": ""},
        {"key": 5},
        {"key": "k" * 5000},
        {"dtype": None},
        {"raw_nbytes": -1},
        {"raw_nbytes": True},
        {"raw_nbytes": 1.0},
        {"digest": "AB" * 16},
        {"digest": "ab"},
        {"crc32c": 2**32},
        {"nbytes": 2**62},
    ],
)
def test_descriptor_with_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        Descriptor.from_wire(GOOD._replace(**change).to_wire())


@pytest.mark.parametrize("values", [None, {}, [[]], [5], [GOOD.to_wire()[:-1]], [GOOD.to_wire()] * 2])
def test_list_that_is_none_of_descriptors_is_refused(values: object) -> None:
    with pytest.raises(CorruptDataError):
        descriptors_from_wire(values)

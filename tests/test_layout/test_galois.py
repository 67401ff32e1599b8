"""The field, compared with long multiplication."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.layout import galois
from fastcheck_dask.layout.galois import ORDER, add_product, double, inverse, power, product

ELEMENTS = st.integers(0, 255)


def by_hand(left, right):
    """Multiply polynomials over GF(2), and take the rest by the polynomial of the field."""
    found = 0
    for bit in range(8):
        if right >> bit & 1:
            found ^= left << bit
    for bit in range(14, 7, -1):
        if found >> bit & 1:
            found ^= 0x11D << (bit - 8)
    return found


@given(ELEMENTS, ELEMENTS)
def test_product_is_that_of_polynomials(left, right):
    assert product(left, right) == by_hand(left, right)


def test_powers_are_all_elements_but_zero_and_repeat():
    assert sorted(power(exponent) for exponent in range(ORDER)) == list(range(1, 256))
    assert [power(e) for e in range(9)] == [1, 2, 4, 8, 16, 32, 64, 128, 29]
    assert power(-1) == power(ORDER - 1)


@given(st.integers(1, 255))
def test_inverse_gives_one(element):
    assert product(element, inverse(element)) == 1


@given(st.binary(max_size=90), ELEMENTS, st.integers(0, 3), st.integers(0, 9))
def test_add_product_at_any_address_is_added_byte_by_byte(data, factor, offset, extra):
    before = np.arange(offset + len(data) + extra, dtype=np.uint8)
    target = before.copy()
    bits = np.frombuffer(bytes(offset) + data, np.uint8)[offset:]
    add_product(target[offset:], bits, factor)
    wanted = [byte ^ product(factor, data[i]) for i, byte in enumerate(before[offset : offset + len(data)])]
    assert target[offset : offset + len(data)].tolist() == wanted
    assert (target[:offset] == before[:offset]).all()
    assert (target[offset + len(data) :] == before[offset + len(data) :]).all()


@given(st.binary(max_size=90), st.integers(0, 3))
def test_double_is_the_product_with_two_in_place(data, offset):
    bits = np.frombuffer(bytes(offset) + data, np.uint8).copy()
    double(bits[offset:])
    assert bits.tolist() == [0] * offset + [product(2, byte) for byte in data]


def test_double_of_several_blocks():
    bits = np.random.default_rng(7).integers(0, 256, 2 * galois._DOUBLED + 3, np.uint8)
    wanted = np.array([by_hand(2, byte) for byte in range(256)], np.uint8)[bits]
    double(bits)
    assert (bits == wanted).all()


@pytest.mark.parametrize("size", [galois._BLOCK - 1, galois._BLOCK, 2 * galois._BLOCK + 3])
def test_add_product_of_several_blocks(size):
    bits = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    add_product(target, bits, 0x53)
    table = np.array([by_hand(0x53, byte) for byte in range(256)], np.uint8)
    assert (target == table[bits]).all()

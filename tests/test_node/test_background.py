"""Settings of the background work."""

from __future__ import annotations

import math
from dataclasses import fields

import dask
import pytest

from fastcheck_dask.errors import ConfigError
from fastcheck_dask.node.background import FIELDS, Background, background


def test_background_is_as_packaged():
    assert background() == Background(600.0, 2**26, 3600.0, 2**26, 2.0, None, 5.0)


def test_background_override_wins_over_the_configuration():
    with dask.config.set(
        {"fastcheck.storage.drill-every": "5 minutes", "fastcheck.storage.repair-rate": "1 MB/s"}
    ):
        assert background().drill_seconds == 300.0
        assert background(drill_every="2 minutes").drill_seconds == 120.0
        assert background(drill_every=None).repair_bytes_per_second == 1e6
        assert background(repair_rate="none").repair_bytes_per_second is None


@pytest.mark.parametrize("option", ["scrub_every", "drill_every"])
def test_background_that_is_never_done(option):
    assert getattr(background(**{option: "never"}), FIELDS[option]) == math.inf
    key = f"fastcheck.storage.{option.replace('_', '-')}"
    with dask.config.set({key: None}):
        assert getattr(background(), FIELDS[option]) == math.inf


def test_background_by_option_or_field_is_the_same():
    for option, field in FIELDS.items():
        by_option, by_field = background(**{option: 200_000}), background(**{field: 200_000})
        assert by_option == by_field
        assert getattr(by_option, field) == 200_000
    assert list(FIELDS.values()) == [field.name for field in fields(Background)]


@pytest.mark.parametrize("option", FIELDS)
@pytest.mark.parametrize("value", [0, -1, "soon", True, "", float("nan"), [], "1e-3"])
def test_background_bad_value_is_refused_with_its_key(option, value):
    with pytest.raises(ConfigError) as caught:
        background(**{option: value})
    assert f"{option} (fastcheck.storage.{option.replace('_', '-')})" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("repair_every", "never"), ("sweep_every", None), ("scrub_rate", "none"), ("drill_rate", "99 kB")],
)
def test_background_that_has_to_be_is_refused_without_a_value(option, value):
    key = f"fastcheck.storage.{option.replace('_', '-')}"
    with dask.config.set({key: value}), pytest.raises(ConfigError, match=key):
        background()


def test_background_unknown_option_is_refused():
    with pytest.raises(ConfigError, match=r"no option 'scrub_rat'.*scrub_rate"):
        background(scrub_rat=1)

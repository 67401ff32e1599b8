"""Locations of S3 folders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import ConfigError
from fastcheck_dask.ids import joined, normalised
from fastcheck_dask.tiers.s3_location import S3Location

NAMES = st.text("abc-._ ü%?#&", min_size=1).filter(lambda name: name.strip(".") and not set(name) & set("?#"))


@given(
    prefix=st.lists(NAMES, max_size=3),
    endpoint=st.sampled_from([None, "http://127.0.0.1:9000", "https://s3.example.org"]),
    region=st.sampled_from([None, "eu-1"]),
)
def test_location_text_round_trip(prefix, endpoint, region):
    options = tuple((k, v) for k, v in (("endpoint", endpoint), ("region", region)) if v is not None)
    place = S3Location("bucket", "/".join(prefix), options)
    assert S3Location.parse(place.text) == place
    assert S3Location.parse(normalised(place.text)) == place
    assert place.joined("00000001-t").text == joined(place.text, "00000001-t")


@pytest.mark.parametrize(
    "location",
    [
        "s3://",
        "s3:///x",
        "http://bucket/x",
        "s3://bucket/a/../b",
        "s3://b/x#y",
        "s3://b/x?endpoint=host:9000",
    ],
)
def test_location_wrong_says_what_is_wanted(location):
    with pytest.raises(ConfigError, match=r"s3://BUCKET/FOLDER|http\(s\)://"):
        S3Location.parse(location)


def test_location_unknown_option_lists_those_there_are():
    with pytest.raises(ConfigError, match="'zone'; there are endpoint, region"):
        S3Location.parse("s3://b/x?zone=1")


@pytest.mark.parametrize(
    "location",
    ["s3://id:hidden@b/x", "s3://b/x?secret_access_key=hidden", "s3://b/x?AWS_ACCESS_KEY_ID=hidden"],
)
def test_location_with_credentials_is_refused_without_showing_them(location):
    with pytest.raises(ConfigError, match="carries credentials") as caught:
        S3Location.parse(location)
    assert "hidden" not in str(caught.value)


def test_location_tells_how_long_to_try_again():
    place = S3Location.parse("s3://b/x?retry_seconds=2.5&region=eu-1")
    assert place.retry_seconds == 2.5
    assert place.client_options == {"region": "eu-1"}
    assert S3Location.parse("s3://b/x").retry_seconds is None
    assert S3Location.parse(place.text) == place


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1e9"])
def test_location_wrong_time_to_try_again(value):
    with pytest.raises(ConfigError, match=rf"retry_seconds must be 1 to 86400 seconds, got '{value}'"):
        S3Location.parse(f"s3://b/x?retry_seconds={value}")

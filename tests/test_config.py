from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import dask
import msgpack
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import fastcheck_dask
from fastcheck_dask.config import (
    _FIELDS,
    CHUNK_LIMIT_BYTES,
    Group,
    Settings,
    load_defaults,
    parse_shards,
    settings,
)
from fastcheck_dask.errors import ConfigError
from fastcheck_dask.tiers.wire import DEFAULT_LIMITS

PACKAGE = Path(fastcheck_dask.__file__).parent


def test_settings_defaults_are_those_of_the_packaged_file():
    found = settings()
    assert found.chunk_bytes == 8 * 2**20 or found.chunk_bytes == 8_000_000
    assert (found.on_busy, found.persist_every, found.local_dir) == ("wait", 1, None)
    assert found.compression == "auto"
    assert found.encoders == max(1, os.cpu_count() - 1)
    assert (found.close_seconds, found.max_shards, found.connect_seconds) == (120.0, None, 2.0)
    assert (found.floor_bytes_per_second, found.grace_seconds) == (10e6, 2.0)
    assert (found.coordinator_seconds, found.session_seconds, found.scheduler_seconds) == (10.0, 10.0, 5.0)


def test_settings_configuration_wins_over_defaults_and_override_over_both():
    with dask.config.set({"fastcheck.chunk-size": "1 MiB", "fastcheck.peers.grace": "7 s"}):
        load_defaults()
        assert settings().chunk_bytes == 2**20
        assert settings().grace_seconds == 7.0
        assert settings(chunk_bytes="2 MiB", grace=None).chunk_bytes == 2 * 2**20
        assert settings(grace="250 ms").grace_seconds == 0.25
        assert settings(grace=None).grace_seconds == 7.0


def test_settings_override_by_field_or_option_name_is_the_same():
    for option, field in _FIELDS.items():
        value = {
            "on_busy": "skip",
            "persist": "incremental",
            "keep_best": ("loss", "min", 3),
            "local_dir": "/x",
            "chunk_bytes": 4096,
            "compression": "never",
            "coordinator_auth": "me:x",
            "coordinator_auth_scheme": "sasl",
            "coordinator_acl": ("sasl:ops:r",),
            **{f"data_tls_{name}": f"/{name}" for name in ("ca", "cert", "key")},
            "coordinator_tls_ca": "/ca",
            "coordinator_tls_cert": "/cert",
            "coordinator_tls_key": "/key",
            "encoder_cpus": (0,),
            "bandwidth_limit": 12_500_000,
            "measure_links": True,
            "parity": 2,
            "stripes": "weighted",
            "check_documents": False,
            "metrics_host": "::1",
            "groups": (Group("rare", "model/embed*", 10), Group("cold", "model/b*", root="/shared")),
        }.get(option, 5)
        more = {"persist": "incremental"} if option == "groups" else {}
        by_option, by_field = settings(**{option: value}, **more), settings(**{field: value}, **more)
        assert by_option == by_field
        assert getattr(by_option, field) == value
    assert set(_FIELDS.values()) == {field.name for field in fields(Settings)}


@pytest.mark.parametrize(("value", "wanted"), [(0, 0), (1, 1), (2, 2), (False, 0), (True, 1)])
def test_settings_parity_is_a_count_and_yes_is_one(value, wanted):
    found = settings(parity=value).parity
    assert (found, type(found)) == (wanted, int)


@pytest.mark.parametrize("name", ["persist_evry", "timeout", "fastcheck"])
def test_settings_unknown_option_is_refused_even_when_none(name):
    for value in (5, None):
        with pytest.raises(ConfigError, match=f"no option '{name}'.*persist_every"):
            settings(**{name: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("chunk_bytes", 255),
        ("chunk_bytes", 0),
        ("chunk_bytes", -1),
        ("chunk_bytes", "8 parsecs"),
        ("chunk_bytes", CHUNK_LIMIT_BYTES + 1),
        ("chunk_bytes", []),
        ("on_busy", "sleep"),
        ("on_busy", ["wait"]),
        ("persist_every", -1),
        ("persist_every", 1.5),
        ("persist_every", True),
        ("persist_every", "often"),
        ("persist_every", float("inf")),
        ("persist_every", float("nan")),
        ("local_dir", 7),
        ("encoders", 0),
        ("encoders", "many"),
        ("encoders", 1.5),
        ("encoder_cpus", "0-"),
        ("encoder_cpus", "1-0"),
        ("encoder_cpus", []),
        ("encoder_cpus", -1),
        ("encoder_cpus", True),
        ("encoder_cpus", 2**15),
        ("encoder_cpus", 1.5),
        ("encoder_nice", -1),
        ("encoder_nice", 20),
        ("bandwidth_limit", 0),
        ("bandwidth_limit", "99 Mbit"),
        ("bandwidth_limit", "1 Gbaud"),
        ("bandwidth_limit", float("nan")),
        ("bandwidth_limit", float("inf")),
        ("bandwidth_limit", True),
        ("measure_links", "yes"),
        ("stripes", "uneven"),
        ("stripes", True),
        ("measure_links", 1),
        ("parity", 3),
        ("parity", -1),
        ("parity", 1.5),
        ("parity", "two"),
        ("measure_links", "always"),
        ("check_documents", "yes"),
        ("dscp", -1),
        ("dscp", 64),
        ("dscp", "EF"),
        ("close_timeout", "-1 s"),
        ("close_timeout", "soon"),
        ("compression", "sometimes"),
        ("compression", True),
        ("metrics_host", ""),
        ("metrics_port", -1),
        ("metrics_port", 65536),
        ("metrics_port", True),
        ("max_shards", 0),
        ("max_shards", 1.5),
        ("max_shards", "three"),
        ("connect_timeout", 0),
        ("connect_timeout", float("nan")),
        ("connect_timeout", True),
        ("floor_bandwidth", 0),
        ("grace", "-2 s"),
        ("coordinator_timeout", 0),
        ("session_timeout", "0 s"),
        ("coordinator_auth_scheme", "kerberos"),
        ("coordinator_acl", 7),
        ("coordinator_acl", [7]),
        ("coordinator_tls_ca", 7),
        ("data_tls_ca", 7),
        ("scheduler_timeout", object),
    ],
)
def test_settings_wrong_value_names_option_key_and_value(option, value):
    with pytest.raises(ConfigError) as caught:
        settings(**{option: value})
    text = str(caught.value)
    assert text.startswith(f"{option} (fastcheck.")
    assert repr(value) in text


@pytest.mark.parametrize(
    ("given", "bytes_per_second"),
    [
        ("1Gbit", 125e6),
        ("1 gbit/s", 125e6),
        ("100 Mbit", 12.5e6),
        ("2.5 Gbit/s", 312.5e6),
        ("125 MB", 125e6),
        ("64 MiB/s", 2**26),
        (2e7, 2e7),
        (None, None),
    ],
)
def test_settings_bandwidth_limit_in_bits_or_bytes(given, bytes_per_second):
    with dask.config.set({"fastcheck.peers.bandwidth-limit": given}):
        assert settings().limit_bytes_per_second == bytes_per_second


def test_settings_encoders_follow_their_cpus_unless_given(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for written in ("4-6,9", [4, 5, 6, 9], (9, 6, 5, 4), " 4 - 6 , 9 "):
        found = settings(encoder_cpus=written)
        assert (found.encoder_cpus, found.encoders) == ((4, 5, 6, 9), 4)
    assert settings(encoder_cpus="4-6", encoders=2).encoders == 2
    assert settings(encoder_cpus=3).encoder_cpus == (3,)
    with pytest.raises(ConfigError, match="this machine has 0 to 15"):
        settings(encoder_cpus="0-16")


@pytest.mark.parametrize("key", ["peers.grace", "chunk-size", "coordinator.session"])
def test_settings_configured_null_is_refused_with_its_key(key):
    with dask.config.set({f"fastcheck.{key}": None}), pytest.raises(ConfigError, match=f"fastcheck.{key}"):
        settings()


def test_settings_section_replaced_by_null_is_a_config_error():
    with dask.config.set({"fastcheck.peers": None}), pytest.raises(ConfigError, match="peers"):
        settings()


def test_settings_largest_chunk_fits_a_message():
    assert settings(chunk_bytes=CHUNK_LIMIT_BYTES).chunk_bytes == CHUNK_LIMIT_BYTES
    assert DEFAULT_LIMITS.message_bytes > CHUNK_LIMIT_BYTES * 1.01 + 4096


def test_settings_path_like_local_dir_is_text_and_all_survive_the_trip(tmp_path):
    found = settings(local_dir=tmp_path)
    assert found.local_dir == str(tmp_path)
    found = settings(encoder_cpus="0", bandwidth_limit="1 Gbit", dscp=8)
    assert Settings.from_dict(msgpack.unpackb(msgpack.packb(found.to_dict()))) == found
    assert Settings.from_dict(settings().to_dict()) == settings()


@given(st.integers(256, CHUNK_LIMIT_BYTES), st.integers(0, 10**6), st.floats(1e-3, 1e6))
def test_settings_any_good_values_are_taken(chunk_bytes, persist_every, grace):
    found = settings(chunk_bytes=chunk_bytes, persist_every=persist_every, grace=grace)
    assert (found.chunk_bytes, found.persist_every) == (chunk_bytes, persist_every)
    assert found.grace_seconds == pytest.approx(grace)


def test_schema_describes_every_default_and_nothing_else():
    defaults = yaml.safe_load((PACKAGE / "fastcheck.yaml").read_text())["fastcheck"]
    schema = yaml.safe_load((PACKAGE / "fastcheck-schema.yaml").read_text())["properties"]["fastcheck"]

    def same(values, described):
        assert values.keys() == described["properties"].keys()
        for name, value in values.items():
            if isinstance(value, dict):
                same(value, described["properties"][name])

    same(defaults, schema)


@pytest.mark.parametrize(("value", "wanted"), [("auto", None), (1, 1), (5, 5)])
def test_parse_shards_good(value, wanted):
    assert parse_shards(value) == wanted


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3", None, "AUTO"])
def test_parse_shards_bad_says_what_came(value):
    with pytest.raises(ConfigError, match=repr(value)):
        parse_shards(value)

from __future__ import annotations

import sys

import dask
import pytest

from fastcheck_dask.certificates import Tls
from fastcheck_dask.config import settings
from fastcheck_dask.coordination.access import Access, Grant
from fastcheck_dask.coordination.connect import connect, shown
from fastcheck_dask.coordination.zookeeper.transport import acl_of, open_to_all
from fastcheck_dask.errors import ConfigError

SECRET = "s3cr3t:with-colon"


def test_access_nothing_configured_is_open():
    assert Access.configured() == Access()
    assert acl_of(Access()) is None


def test_access_configuration_is_read_and_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = {
        "auth": f"me:{SECRET}",
        "acl": ["sasl:ops:r", "digest:you:hash=:cdrwa"],
        "tls-ca": "ca.pem",
        "tls-cert": "/c.pem",
        "tls-key": "/k.pem",
    }
    with dask.config.set({f"fastcheck.coordinator.{key}": value for key, value in section.items()}):
        found = Access.configured()
    assert found == Access(
        "digest",
        "me",
        SECRET,
        tls=Tls(str(tmp_path / "ca.pem"), "/c.pem", "/k.pem"),
        grants=(Grant("sasl", "ops", "r"), Grant("digest", "you:hash=", "cdrwa")),
    )


def test_access_secret_is_in_no_text():
    found = settings(coordinator_auth=f"me:{SECRET}")
    assert SECRET not in repr(found) + str(found) + repr(Access.of(found))
    for wrong in (["me", SECRET], {"me": SECRET}):
        with pytest.raises(ConfigError) as caught:
            settings(coordinator_auth=wrong)
        assert "coordinator_auth (fastcheck.coordinator.auth)" in str(caught.value)
        assert SECRET not in f"{caught.value}{caught.value.__cause__}{caught.value.args}"
    with pytest.raises(ConfigError, match="must be user:password") as caught:
        Access.of(settings(coordinator_auth=f":{SECRET}"))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", [f"zk://me:{SECRET}@h/r", f"zk:me:{SECRET}@h", f"zk://h/me:{SECRET}@r"])
def test_url_with_credentials_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match=r"zk://host:port") as caught:
        connect(url)
    assert SECRET not in f"{caught.value}{caught.value.args}"
    assert SECRET not in shown(url)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"coordinator_tls_cert": "c"}, "tls-key is not"),
        ({"coordinator_tls_key": "k"}, "tls-cert is not"),
        ({"coordinator_tls_cert": "c", "coordinator_tls_key": "k"}, "tls-ca is not"),
        ({"coordinator_auth": "me"}, "user:password"),
        ({"coordinator_acl": ["sasl:ops:r"]}, "needs coordinator_auth"),
        ({"coordinator_auth": "me:x", "coordinator_acl": ["sasl:ops"]}, "'sasl:ops'"),
        ({"coordinator_auth": "me:x", "coordinator_acl": ["sasl:ops:rx"]}, "'sasl:ops:rx'"),
        ({"coordinator_auth": "me:x", "coordinator_acl": ["world:anyone:r"]}, "open everything"),
    ],
)
def test_access_settings_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Access.of(settings(**options))


def test_access_sasl_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "puresasl", None)
    with pytest.raises(ConfigError, match=r"fastcheck-dask\[sasl\]"):
        Access.of(settings(coordinator_auth="me:x", coordinator_auth_scheme="sasl"))


@pytest.mark.parametrize("scheme", ["digest", "sasl"])
def test_acl_is_ours_and_what_is_granted_and_nobody_elses(scheme):
    acl = acl_of(Access(scheme, "me", SECRET, grants=(Grant("sasl", "ops", "rr"),)))
    assert not open_to_all(acl)
    assert [(one.id.scheme, one.perms) for one in acl] == [(scheme, 31), ("sasl", 1)]
    assert SECRET not in repr(acl)

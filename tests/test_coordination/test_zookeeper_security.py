"""Credentials, access lists and TLS, with real servers that enforce them."""

from __future__ import annotations

from uuid import uuid4

import dask
import pytest
from click.testing import CliRunner
from kazoo import exceptions as client_errors
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

from fastcheck_dask import cli
from fastcheck_dask.certificates import Tls
from fastcheck_dask.coordination import Access, connect
from fastcheck_dask.coordination.access import Grant
from fastcheck_dask.coordination.connect import zookeeper_place
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.coordination.zookeeper.protect import protect
from fastcheck_dask.coordination.zookeeper.server import free_ports
from fastcheck_dask.coordination.zookeeper.transport import acl_of
from fastcheck_dask.errors import ConfigError, CoordinationError
from fastcheck_dask.testing.zookeeper import (
    ENFORCE_DIGEST,
    ZooKeeperServer,
    sasl_options,
    tls_options,
)

SECRET = "s3cr3t"
US = Access("digest", "me", SECRET)


@pytest.fixture(scope="module")
def ours(authority):
    """Our certificate and its key."""
    return authority.issue("client")


@pytest.fixture(scope="module")
def secure(tmp_path_factory, authority):
    """A server with TLS that ends sessions without digest credentials, and the URL of its secure port."""
    (port,) = free_ports(1)
    options = tls_options(authority, authority.issue("server"), port=port, settings=ENFORCE_DIGEST)
    with ZooKeeperServer(tmp_path_factory.mktemp("secure"), options) as server:
        yield server, f"zk://127.0.0.1:{port}/secure"


@pytest.fixture
def private_url(zookeeper):
    """Return the URL of a root with nothing above it: that would be protected, too."""
    return f"zk://{zookeeper.hosts}/{uuid4().hex}"


@pytest.fixture
def access(authority, ours):
    """Return a function that makes what is right, but for what is given."""

    def make(*, ca=authority.ca, pair=ours, user="me", password=SECRET):
        return Access("digest", user, password, tls=Tls(str(ca), *map(str, pair or ())))

    return make


def every_znode(client, path=""):
    yield path or "/"
    for name in client.get_children(path or "/"):
        yield from every_znode(client, f"{path}/{name}")


# Access lists


@pytest.mark.zookeeper
def test_credentials_every_znode_is_ours_alone_and_strangers_cannot_read_nor_write(
    private_url, open_coordinator, node, record
):
    coordinator = open_coordinator(private_url, access=US)
    coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "me")
    coordinator.commit(record(), claim)
    coordinator.entries.apply(Create("deep/down", b"x"))
    hosts, root = zookeeper_place(private_url)
    insider = KazooClient(hosts + root, auth_data={("digest", f"me:{SECRET}")})
    outsider = KazooClient(hosts + root)
    for client in (insider, outsider):
        client.start()
    try:
        paths = list(every_znode(insider))
        wanted = {"/format", "/nodes/a", "/runs/run-1/owner", "/runs/run-1/decisions/0000000001"}
        assert wanted | {"/", "/entries/deep/down"} < set(paths)
        for path in paths:
            assert insider.get_acls(path)[0] == acl_of(US)
            for call in (
                lambda path=path: outsider.get(path),
                lambda path=path: outsider.get_children(path),
                lambda path=path: outsider.set(path, b""),
                lambda path=path: outsider.create(f"{path}/x".replace("//", "/")),
                lambda path=path: outsider.set_acls(path, acl_of(Access("digest", "other", "x"))),
            ):
                with pytest.raises(NoAuthError):
                    call()
    finally:
        for client in (insider, outsider):
            client.stop()
            client.close()
    for stranger, said in (
        (Access(), "demands credentials"),
        (Access("digest", "me", "x"), "refuses user 'me'"),
    ):
        with pytest.raises(CoordinationError, match=said):
            open_coordinator(private_url, access=stranger)
    assert open_coordinator(private_url, access=US).latest("run-1") == record()


@pytest.mark.zookeeper
def test_grant_other_identity_may_read_and_not_write(private_url, open_coordinator):
    other = acl_of(Access("digest", "ops", "pw"))[0].id.id
    open_coordinator(
        private_url, access=Access("digest", "me", SECRET, grants=(Grant("digest", other, "r"),))
    )
    hosts, root = zookeeper_place(private_url)
    client = KazooClient(hosts + root, auth_data={("digest", "ops:pw")})
    client.start()
    try:
        assert client.get("/format")[0]
        with pytest.raises(NoAuthError):
            client.set("/format", b"")
    finally:
        client.stop()
        client.close()


@pytest.mark.zookeeper
def test_open_root_is_refused_with_credentials_until_it_is_protected(private_url, open_coordinator, record):
    before = open_coordinator(private_url, access=Access())
    before.commit(record(), before.claim("run-1", "me"))
    before.close()
    with pytest.raises(ConfigError, match=r"open to everyone.*fastcheck zookeeper protect"):
        open_coordinator(private_url, access=US)
    hosts, root = zookeeper_place(private_url)
    with pytest.raises(ConfigError, match="no credentials"):
        protect(hosts, root, Access())
    with pytest.raises(CoordinationError, match="has no /nothing"):
        protect(hosts, "/nothing", US)
    with dask.config.set({"fastcheck.coordinator.auth": f"me:{SECRET}"}):
        result = CliRunner().invoke(cli.main, ["zookeeper", "protect", "--coordinator", private_url])
    assert (result.exit_code, result.output) == (
        0,
        f"{protect(hosts, root, US)} znodes under {root} are protected\n",
    )
    assert open_coordinator(private_url, access=US).latest("run-1") == record()
    with pytest.raises(CoordinationError, match="demands credentials"):
        open_coordinator(private_url, access=Access())


@pytest.mark.zookeeper
def test_secret_is_in_no_log_and_no_error(private_url, caplog):
    with caplog.at_level(1, logger="fastcheck_dask"), caplog.at_level(1, logger="kazoo"):
        connect(private_url, access=US).close()
        with pytest.raises(CoordinationError) as caught:
            connect(private_url, access=Access("digest", "me", f"{SECRET}2"))
    texts = [caplog.text, str(caught.value), repr(caught.value.__cause__), *map(repr, caplog.records)]
    assert "Sending request" in caplog.text
    assert not [text for text in texts if SECRET in text]


@pytest.mark.zookeeper
def test_credentials_from_the_configuration_are_used(private_url):
    with dask.config.set({"fastcheck.coordinator.auth": f"me:{SECRET}"}):
        connect(private_url).close()
    with pytest.raises(CoordinationError, match="demands credentials"):
        connect(private_url)


# SASL


@pytest.mark.zookeeper
def test_sasl_user_is_let_in_and_wrong_password_is_not(tmp_path, open_coordinator, record):
    pytest.importorskip("puresasl")
    with ZooKeeperServer(tmp_path / "server", sasl_options(tmp_path, {"me": SECRET})) as server:
        url = f"zk://{server.hosts}/sasl"
        coordinator = open_coordinator(url, access=Access("sasl", "me", SECRET))
        claim = coordinator.claim("run-1", "me")
        coordinator.commit(record(), claim)
        for access in (Access("sasl", "me", "wrong"), Access("sasl", "you", SECRET)):
            with pytest.raises(CoordinationError, match="refuses user"):
                connect(url, access=access, timeout_seconds=5.0)
        with pytest.raises(CoordinationError, match="demands credentials"):
            connect(url, access=Access())
        server.restart()
        assert coordinator.commit(record(generation=2, token="t2"), claim).generation == 2
        coordinator.close()


@pytest.mark.zookeeper
def test_sasl_connection_broken_while_it_authenticates_is_no_end(private_url, open_coordinator, eventually):
    """Kazoo takes that for a refusal and gives up for good: it has to be started again."""
    coordinator = open_coordinator(private_url)
    session = coordinator._session
    connection = session._client._connection
    broken = []

    def break_once(*_):
        broken.append(True)
        connection.sasl_options = None
        raise client_errors.AuthFailedError("Connection dropped in SASL")

    connection._authenticate_with_sasl = break_once
    connection.sasl_options = {}
    connection._socket.shutdown(2)
    eventually(lambda: broken and session.connected)
    assert coordinator.nodes() == ()


@pytest.mark.zookeeper
def test_client_that_does_not_start_again_at_once_is_started_later(
    private_url, open_coordinator, monkeypatch, eventually
):
    coordinator = open_coordinator(private_url)
    session = coordinator._session
    whole, failed = session._client.start_async, []

    def start():
        if len(failed) < 2:
            failed.append(True)
            raise RuntimeError("not now")
        return whole()

    def refuse(*_):
        raise client_errors.AuthFailedError

    monkeypatch.setattr(session._client, "start_async", start)
    monkeypatch.setattr(session._client._connection, "_read_socket", refuse)
    session._client.get_async("/")
    eventually(lambda: failed)
    monkeypatch.delattr(session._client._connection, "_read_socket")
    eventually(lambda: len(failed) == 2 and session.connected)
    assert coordinator.nodes() == ()


# TLS


@pytest.mark.zookeeper
def test_tls_with_credentials_everything_works(secure, access, open_coordinator, node, record):
    coordinator = open_coordinator(secure[1], access=access())
    coordinator.register(node("a"))
    coordinator.commit(record(), coordinator.claim("run-1", "me"))
    assert open_coordinator(secure[1], access=access()).nodes() == (node("a"),)


@pytest.mark.zookeeper
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("no credentials", "demands credentials"),
        ("no credentials, plain", "demands credentials"),
        ("wrong password", "refuses user 'me'"),
        ("wrong CA", "certificate is refused, by the CA .*ca.pem: unable to get local issuer"),
        ("our certificate of a wrong CA", "refuses our certificate .*of-stranger.pem: certificate unknown"),
        ("no certificate", r"refuses us without a certificate \(tls-cert\)"),
        ("plain to the TLS port", "the port speaks TLS: give fastcheck.coordinator.tls-ca"),
        ("TLS to the plain port", "does not speak TLS"),
    ],
)
def test_tls_not_let_in_says_why(secure, access, stranger, wrong, said):
    server, url = secure
    plain = f"zk://{server.hosts}/secure"
    # The root is there, and not for everybody.
    connect(url, access=access()).close()
    place, with_what = {
        "no credentials": (url, lambda: access(user="", password="")),
        "no credentials, plain": (plain, Access),
        "wrong password": (url, lambda: access(password="wrong")),
        "wrong CA": (url, lambda: access(ca=stranger.ca)),
        "our certificate of a wrong CA": (url, lambda: access(pair=stranger.issue("of-stranger"))),
        "no certificate": (url, lambda: access(pair=None)),
        "plain to the TLS port": (url, lambda: US),
        "TLS to the plain port": (plain, access),
    }[wrong]
    with pytest.raises(CoordinationError, match=said) as caught:
        connect(place, access=with_what(), timeout_seconds=3.0)
    assert SECRET not in str(caught.value)


@pytest.mark.zookeeper
@pytest.mark.parametrize(
    ("days", "host", "said"),
    [(0, "IP:127.0.0.1", "certificate has expired"), (1, "DNS:elsewhere", "address mismatch")],
)
def test_tls_certificate_of_the_server_wrong_says_why(tmp_path, authority, access, days, host, said):
    (port,) = free_ports(1)
    options = tls_options(authority, authority.issue(f"server-{days}", days=days, host=host), port=port)
    with (
        ZooKeeperServer(tmp_path, options),
        pytest.raises(CoordinationError, match=f"certificate is refused.*{said}"),
    ):
        # A server that was just started takes its time for the first one who speaks TLS.
        connect(f"zk://127.0.0.1:{port}/root", access=access(), timeout_seconds=8.0)

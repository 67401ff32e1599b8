"""Files for TLS: what is said of wrong ones, and that replaced ones are taken."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from fastcheck_dask.certificates import (
    Renewed,
    Tls,
    TlsNames,
    answers_tls,
    check_files,
    check_member,
    client_context,
    member_contexts,
)
from fastcheck_dask.errors import ConfigError

GUIDE = Path(__file__).parents[1] / "docs/guides/security.md"


@pytest.fixture(scope="module")
def ours(authority):
    """Our certificate and its key."""
    return authority.issue("ours")


@pytest.mark.parametrize("check", [check_files, check_member])
def test_tls_files_wrong_are_named_before_anything_is_tried(check, tmp_path, authority, ours):
    cert, key = map(str, ours)
    old, old_key = map(str, authority.issue("old", days=0))
    ca = str(authority.ca)
    missing, garbage = str(tmp_path / "missing.pem"), str(tmp_path / "garbage.pem")
    (tmp_path / "garbage.pem").write_text("nothing")
    for tls, named, said in (
        (Tls(missing), missing, "No such file"),
        (Tls(garbage), garbage, "no certificate"),
        (Tls(str(tmp_path)), str(tmp_path), "Is a directory"),
        (Tls(ca, missing, key), missing, "No such file"),
        (Tls(ca, cert, missing), missing, "No such file"),
        (Tls(ca, key, cert), key, "swapped"),
        (Tls(ca, cert, garbage), garbage, "PEM"),
        (Tls(ca, cert, old_key), old_key, "belong together"),
        (Tls(ca, old, old_key), old, "has expired"),
    ):
        with pytest.raises(ConfigError) as caught:
            check(tls)
        assert named in str(caught.value)
        assert said in str(caught.value)
    check_files(Tls(ca))
    check(Tls(ca, cert, key))


def test_tls_certificate_of_another_authority_is_for_the_server_to_judge(stranger, ours):
    check_files(Tls(str(stranger.ca), *map(str, ours)))


def test_tls_key_encrypted_is_refused_and_asks_nobody(tmp_path, authority, ours):
    key = tmp_path / "encrypted.pem"
    authority._run("pkcs8", "-topk8", "-in", ours[1], "-out", key, "-passout", "pass:x")
    with pytest.raises(ConfigError, match="encrypted"):
        check_files(Tls(str(authority.ca), str(ours[0]), str(key)))


def test_member_of_another_authority_is_told_both_files(stranger, ours):
    tls = Tls(str(stranger.ca), *map(str, ours), TlsNames.within("section"))
    with pytest.raises(ConfigError, match=r"ours.pem \(section.tls-cert\) is refused by the CA") as caught:
        check_member(tls)
    assert f"{stranger.ca} (section.tls-ca)" in str(caught.value)


def test_names_of_the_settings_are_in_the_message(tmp_path, authority, ours):
    names = TlsNames("the.ca", "the.cert", "the.key")
    with pytest.raises(ConfigError, match=r"missing \(the.key\) cannot be read"):
        check_member(Tls(str(authority.ca), str(ours[0]), str(tmp_path / "missing"), names))
    with pytest.raises(ConfigError, match=r"\(the.cert\) and key .*ours.pem \(the.cert\): one of them"):
        check_member(Tls(str(authority.ca), str(ours[0]), None, names))


def test_key_in_the_file_of_the_certificate_is_found(tmp_path, authority, ours):
    both = tmp_path / "both.pem"
    both.write_bytes(ours[0].read_bytes() + ours[1].read_bytes())
    check_member(Tls(str(authority.ca), str(both)))


def test_contexts_trust_their_ca_alone_and_nothing_before_tls_1_2(authority, ours):
    tls = Tls(str(authority.ca), *map(str, ours))
    for context in (client_context(tls), *member_contexts(tls)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1
    assert client_context(tls).check_hostname


def test_renewed_files_are_taken_unless_they_do_not_fit(tmp_path, authority, stranger, ours, caplog):
    tls = Tls(*(str(tmp_path / name) for name in ("ca", "cert", "key")))
    for source, name in zip((authority.ca, *ours), ("ca", "cert", "key"), strict=True):
        shutil.copy(source, tmp_path / name)
    renewed = Renewed(tls)
    first = renewed.contexts()
    assert renewed.contexts() is first
    for source, name in zip(stranger.issue("theirs"), ("cert", "key"), strict=True):
        shutil.copy(source, tmp_path / name)
        if name == "cert":
            assert renewed.contexts() is renewed.contexts() is first
    assert caplog.text.count("do not belong together") == 1
    second = renewed.contexts()
    assert second is not first
    (tmp_path / "key").unlink()
    assert renewed.contexts() is second
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("speaks", [True, False])
def test_answers_tls_only_if_the_server_speaks_it(authority, ours, speaks):
    _, server = member_contexts(Tls(str(authority.ca), *map(str, ours)))
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def serve():
            plain, _ = listening.accept()
            with closing(plain), suppress(OSError):
                if speaks:
                    server.wrap_socket(plain, server_side=True)
                else:
                    plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        assert answers_tls(*listening.getsockname()) is speaks
        thread.join()


def test_commands_of_the_guide_make_a_member(tmp_path):
    found = re.search(r"<!-- tested: certificates -->\n```bash\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    subprocess.run(["bash", "-e", "-c", found[1]], cwd=tmp_path, check=True, capture_output=True)
    check_member(Tls(*(str(tmp_path / name) for name in ("ca.pem", "node.pem", "node.key"))))


def test_ca_file_with_the_old_and_the_new_authority_takes_both(tmp_path, authority, stranger, ours):
    both = tmp_path / "ca.pem"
    both.write_bytes(authority.ca.read_bytes() + stranger.ca.read_bytes())
    for pair in (ours, stranger.issue("new")):
        check_member(Tls(str(both), *map(str, pair)))

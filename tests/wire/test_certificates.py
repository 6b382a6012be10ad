"""Certificates: two hosts of one authority talk TLS both ways, a stranger's is refused, and no key is overwritten."""

import ipaddress
import json
import os
import shutil
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from socflower.wire import certificates
from socflower.wire.certificates import HostCertificate, write_certificates
from tests.command_line import Socflower
from tests.one_line import one_line, refused

LOOPBACK = "127.0.0.1"


def context(files: HostCertificate, side: ssl.Purpose, ca: Path | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(side, cafile=str(ca or files.ca))
    made.load_cert_chain(files.certificate, files.key)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    return made


def handshake(
    server: HostCertificate,
    client: HostCertificate,
    *,
    client_trusts: Path | None = None,
    dialled: str = LOOPBACK,
) -> bytes:
    """Return what the server says to the client, over mutual TLS on a real socket."""
    refused: list[Exception] = []
    with socket.create_server((LOOPBACK, 0)) as listener:
        listener.settimeout(30)

        def serve() -> None:
            connection, _ = listener.accept()
            try:
                with context(server, ssl.Purpose.CLIENT_AUTH).wrap_socket(
                    connection, server_side=True
                ) as channel:
                    channel.sendall(b"welcome")
            except (ssl.SSLError, OSError) as error:
                refused.append(error)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=30) as raw,
                context(client, ssl.Purpose.SERVER_AUTH, client_trusts).wrap_socket(
                    raw, server_hostname=dialled
                ) as secure,
            ):
                return secure.recv(100)
        except ssl.SSLCertVerificationError:
            raise
        except OSError:
            # The client may see no more than a closed connection; the server knows why.
            thread.join(timeout=30)
            if refused:
                raise refused[0] from None
            raise
        finally:
            thread.join(timeout=30)


def test_two_hosts_talk_in_both_directions(tmp_path: Path) -> None:
    made = write_certificates(tmp_path, [LOOPBACK, "localhost"])
    assert handshake(made[LOOPBACK], made["localhost"]) == b"welcome"
    assert handshake(made["localhost"], made[LOOPBACK], dialled="localhost") == b"welcome"


def test_a_host_is_refused_under_another_name(tmp_path: Path) -> None:
    made = write_certificates(tmp_path, ["soc-1", "localhost"])
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        handshake(made["soc-1"], made["localhost"])


def test_server_and_client_refuse_each_other_under_another_authority(tmp_path: Path) -> None:
    ours, stranger = (
        write_certificates(tmp_path / name, [LOOPBACK])[LOOPBACK] for name in ("ours", "theirs")
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(ours, stranger, client_trusts=ours.ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(stranger, ours)


def test_hosts_are_added_later_and_what_is_there_is_kept(tmp_path: Path) -> None:
    first = write_certificates(tmp_path, [LOOPBACK])[LOOPBACK]
    before = files_of(tmp_path)
    second = write_certificates(tmp_path, [LOOPBACK, "localhost"])
    assert (second[LOOPBACK].status, second["localhost"].status) == ("kept", "new")
    assert second[LOOPBACK].not_after == first.not_after
    assert before.items() <= files_of(tmp_path).items()
    assert handshake(second["localhost"], first, dialled="localhost") == b"welcome"


def test_renewing_gives_a_new_key_and_keeps_the_authority(tmp_path: Path) -> None:
    old = write_certificates(tmp_path, [LOOPBACK, "localhost"])
    key, ca = old[LOOPBACK].key.read_bytes(), old[LOOPBACK].ca.read_bytes()
    new = write_certificates(tmp_path, [LOOPBACK], renew=True)[LOOPBACK]
    assert new.status == "renewed" and new.key.read_bytes() != key and new.ca.read_bytes() == ca
    assert handshake(new, old["localhost"]) == b"welcome"


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    (tmp_path / ".ca.key.99999999-1.part").write_text("half a key, of a killed command")
    umask = os.umask(0)
    try:
        write_certificates(tmp_path, ["soc-1", "fe80::1"])
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    hosts = ("ca", "soc-1", "fe80__1")
    assert set(modes) == {f"{host}.{suffix}" for host in hosts for suffix in ("pem", "key")}
    assert all(mode == 0o600 for name, mode in modes.items() if name.endswith(".key"))


def test_what_stands_in_a_certificate(tmp_path: Path) -> None:
    made = write_certificates(tmp_path, ["SOC-1.rack.example.", "2001:DB8:0::1"], valid_days=10)
    assert list(made) == ["soc-1.rack.example", "2001:db8::1"]
    found = [x509.load_pem_x509_certificate(one.certificate.read_bytes()) for one in made.values()]
    names = [
        one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value for one in found
    ]
    assert names[0].get_values_for_type(x509.DNSName) == ["soc-1.rack.example"]
    assert names[1].get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("2001:db8::1")]
    for one in found:
        usages = one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
        assert timedelta(days=9) < one.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=10)
        assert one.not_valid_before_utc < datetime.now(UTC) - timedelta(hours=1)


def test_no_certificate_outlives_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_certificates(tmp_path, ["soc-1"])["soc-1"]
    ends = x509.load_pem_x509_certificate(made.ca.read_bytes()).not_valid_after_utc
    later = datetime.now(UTC) + timedelta(days=3600)
    monkeypatch.setattr(certificates, "_now", lambda: later)
    assert write_certificates(tmp_path, ["soc-2"])["soc-2"].not_after == ends
    refused(lambda: write_certificates(tmp_path, ["soc-1"]), "soc-1.pem", "ended", "--renew")
    monkeypatch.setattr(certificates, "_now", lambda: later + timedelta(days=60))
    refused(lambda: write_certificates(tmp_path, ["soc-3"]), "ca.pem", "ended", "empty folder")


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", "10.0.0.300", "10.0.0.2:28200", "soc_1", "-soc", "soc-", "a..b", "*.rack"),
        *("soc 1", "soc/1", "../soc", "söc", "x" * 64, ".".join(["x" * 60] * 5), "fe80::1%eth0"),
        *("ca", "soc\n1", "http://soc-1"),
    ],
)
def test_what_is_no_host_is_refused_and_nothing_written(tmp_path: Path, host: str) -> None:
    refused(lambda: write_certificates(tmp_path / "new", ["soc-1", host]), "host ")
    assert not (tmp_path / "new").exists()


def test_no_host_and_a_silly_time_are_refused(tmp_path: Path) -> None:
    refused(lambda: write_certificates(tmp_path, []), "host")
    for days in (0, -1, 4000):
        refused(partial(write_certificates, tmp_path, ["soc-1"], valid_days=days), f"{days} days")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("ca.pem", b"junk", "damaged"),
        ("ca.key", b"junk", "damaged"),
        ("ca.pem", None, "cannot be read"),
        ("ca.key", None, "cannot be read"),
        ("ca.key", "soc-1.key", "ca.pem"),
        ("soc-1.pem", b"junk", "damaged"),
        ("soc-1.key", b"", "damaged"),
        ("soc-1.pem", None, "cannot be read"),
        ("soc-1.key", "soc-2.key", "soc-1.pem"),
    ],
)
def test_damaged_files_are_named_and_those_of_a_host_renewed(
    tmp_path: Path, name: str, content: bytes | str | None, says: str
) -> None:
    write_certificates(tmp_path, ["soc-1", "soc-2"])
    put(tmp_path, name, content)
    before = files_of(tmp_path)
    named = (name, says) if name.startswith("ca") else (name, says, "--renew")
    refused(lambda: write_certificates(tmp_path, ["soc-1"]), *named)
    assert files_of(tmp_path) == before
    if name.startswith("soc"):
        for renew, status in ((True, "renewed"), (False, "kept")):
            made = write_certificates(tmp_path, ["soc-1"], renew=renew)
            assert made["soc-1"].status == status


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def put(folder: Path, name: str, content: bytes | str | None) -> None:
    """Fill a file with bytes or with another file's, or remove it."""
    if content is None:
        (folder / name).unlink()
    elif isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        shutil.copy(folder / content, folder / name)


def test_files_of_another_part_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_certificates(tmp_path / name, ["soc-1"])
    for file in ("ca.pem", "ca.key"):
        shutil.copy(tmp_path / "b" / file, tmp_path / "a" / file)
    refused(lambda: write_certificates(tmp_path / "a", ["soc-1"]), "signed", "ca.pem")
    for suffix in (".pem", ".key"):
        put(tmp_path / "b", f"ca{suffix}", f"soc-1{suffix}")
    refused(lambda: write_certificates(tmp_path / "b", ["soc-2"]), "sign")


def test_keys_whose_authority_is_gone_are_not_overwritten(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["soc-1"])
    (tmp_path / "ca.pem").unlink()
    (tmp_path / "ca.key").unlink()
    before = files_of(tmp_path)
    refused(lambda: write_certificates(tmp_path, ["soc-1"], renew=True), "soc-1")
    assert files_of(tmp_path) == before


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(lambda: write_certificates(tmp_path / "file" / "below", ["soc-1"]), "cannot write")
    refused(lambda: write_certificates(tmp_path / 'a"b', ["soc-1"]), "quotes")


def test_the_command_prints_what_node_config_needs(socflower: Socflower, tmp_path: Path) -> None:
    ran = socflower("certificates", "--out", "keys", "10.0.0.2", "soc-1")
    assert ran.status == 0, ran.err
    folder = tmp_path / "keys"
    for host in ("10.0.0.2", "soc-1"):
        for key, file in (("ca", "ca.pem"), ("certificate", f"{host}.pem"), ("key", f"{host}.key")):
            assert f'ring-{key}="{folder}/{file}"' in ran.out
    assert f"{folder}/ca.key" in ran.out.splitlines()[-1]
    ran = socflower("certificates", "--out", "keys", "soc-1", "soc-2", "--json")
    document = json.loads(ran.out)
    assert document["schema"] == 1
    statuses = {host["host"]: host["status"] for host in document["hosts"]}
    assert statuses == {"soc-1": "kept", "soc-2": "new"}
    for host in document["hosts"]:
        assert all(Path(host[file]).exists() for file in ("ca", "certificate", "key"))


def test_a_mistake_on_the_command_line_is_one_line(socflower: Socflower) -> None:
    ran = socflower("certificates", "--out", "keys", "10.0.0.2:28200")
    assert ran.status == 2
    one_line(ran.err.removesuffix("\n"), "error: ", "'10.0.0.2:28200'", "port: 10.0.0.2")

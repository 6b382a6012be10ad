"""Certificates: two hosts of one authority talk TLS both ways, a stranger's is refused, and no key is overwritten."""

import ipaddress
import json
import os
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from socflower.errors import ConfigError
from socflower.wire import certificates
from socflower.wire.certificates import HostCertificate, write_certificates
from tests.command_line import Socflower

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


def test_a_server_refuses_a_client_of_another_authority(tmp_path: Path) -> None:
    ours = write_certificates(tmp_path / "ours", [LOOPBACK])[LOOPBACK]
    stranger = write_certificates(tmp_path / "theirs", [LOOPBACK])[LOOPBACK]
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(ours, stranger, client_trusts=ours.ca)


def test_a_client_refuses_a_server_of_another_authority(tmp_path: Path) -> None:
    ours = write_certificates(tmp_path / "ours", [LOOPBACK])[LOOPBACK]
    stranger = write_certificates(tmp_path / "theirs", [LOOPBACK])[LOOPBACK]
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(stranger, ours)


def test_hosts_are_added_later_and_what_is_there_is_kept(tmp_path: Path) -> None:
    first = write_certificates(tmp_path, [LOOPBACK])[LOOPBACK]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    second = write_certificates(tmp_path, [LOOPBACK, "localhost"])
    assert (second[LOOPBACK].status, second["localhost"].status) == ("kept", "new")
    assert second[LOOPBACK].not_after == first.not_after
    assert {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in before
    } == before
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
    assert {name for name in modes} == {
        "ca.pem",
        "ca.key",
        "soc-1.pem",
        "soc-1.key",
        "fe80__1.pem",
        "fe80__1.key",
    }
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
    ca = x509.load_pem_x509_certificate(
        write_certificates(tmp_path, ["soc-1"])["soc-1"].ca.read_bytes()
    )
    later = datetime.now(UTC) + timedelta(days=3600)
    monkeypatch.setattr(certificates, "_now", lambda: later)
    assert write_certificates(tmp_path, ["soc-2"])["soc-2"].not_after == ca.not_valid_after_utc
    with pytest.raises(ConfigError, match=r"soc-1.pem: ended on .* --renew"):
        write_certificates(tmp_path, ["soc-1"])
    monkeypatch.setattr(certificates, "_now", lambda: later + timedelta(days=60))
    with pytest.raises(ConfigError, match=r"ca.pem: ended on .* empty folder"):
        write_certificates(tmp_path, ["soc-3"])


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "10.0.0.300",
        "10.0.0.2:28200",
        "soc_1",
        "-soc",
        "soc-",
        "a..b",
        "*.rack",
        "soc 1",
        "soc/1",
        "../soc",
        "söc",
        "x" * 64,
        ".".join(["x" * 60] * 5),
        "fe80::1%eth0",
        "ca",
        "soc\n1",
        "http://soc-1",
    ],
)
def test_a_host_that_is_none_is_refused_and_nothing_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"^host "):
        write_certificates(tmp_path / "new", ["soc-1", host])
    assert not (tmp_path / "new").exists()


def test_no_host_and_a_silly_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one host"):
        write_certificates(tmp_path, [])
    for days in (0, -1, 4000):
        with pytest.raises(ConfigError, match=f"{days} days"):
            write_certificates(tmp_path, ["soc-1"], valid_days=days)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("ca.pem", b"junk", "is damaged"),
        ("ca.key", b"junk", "is damaged"),
        ("ca.pem", None, "cannot be read"),
        ("ca.key", None, "cannot be read"),
        ("ca.key", "soc-1.key", "is not the key of ca.pem"),
    ],
)
def test_a_damaged_authority_is_refused(
    tmp_path: Path, name: str, content: bytes | str | None, says: str
) -> None:
    write_certificates(tmp_path, ["soc-1"])
    put(tmp_path, name, content)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=rf"{name}: {says}.*; put the right file back"):
        write_certificates(tmp_path, ["soc-2"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_hosts_certificate_is_no_authority(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["soc-1"])
    put(tmp_path, "ca.pem", "soc-1.pem")
    put(tmp_path, "ca.key", "soc-1.key")
    with pytest.raises(ConfigError, match="cannot sign others"):
        write_certificates(tmp_path, ["soc-2"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("soc-1.pem", b"junk", "is damaged"),
        ("soc-1.key", b"", "is damaged"),
        ("soc-1.pem", None, "cannot be read"),
        ("soc-1.key", "soc-2.key", "is not the key of soc-1.pem"),
    ],
)
def test_a_hosts_damaged_files_are_named_and_renewed(
    tmp_path: Path,
    name: str,
    content: bytes | str | None,
    says: str,
) -> None:
    write_certificates(tmp_path, ["soc-1", "soc-2"])
    put(tmp_path, name, content)
    with pytest.raises(ConfigError, match=rf"{name}: {says}.*--renew"):
        write_certificates(tmp_path, ["soc-1"])
    assert write_certificates(tmp_path, ["soc-1"], renew=True)["soc-1"].status == "renewed"
    assert write_certificates(tmp_path, ["soc-1"])["soc-1"].status == "kept"


def put(folder: Path, name: str, content: bytes | str | None) -> None:
    """Fill a file with bytes, with another file's, or remove it."""
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(
            content if isinstance(content, bytes) else (folder / content).read_bytes()
        )


def test_a_host_of_another_authority_is_not_kept(tmp_path: Path) -> None:
    write_certificates(tmp_path / "a", ["soc-1"])
    write_certificates(tmp_path / "b", ["soc-1"])
    for name in ("ca.pem", "ca.key"):
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ConfigError, match=r"was not signed by ca\.pem"):
        write_certificates(tmp_path / "a", ["soc-1"])


def test_keys_whose_authority_is_gone_are_not_overwritten(tmp_path: Path) -> None:
    key = write_certificates(tmp_path, ["soc-1"])["soc-1"].key
    before = key.read_bytes()
    (tmp_path / "ca.pem").unlink()
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match="that it belongs to are not"):
        write_certificates(tmp_path, ["soc-1"], renew=True)
    assert key.read_bytes() == before and not (tmp_path / "ca.pem").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write in"):
        write_certificates(tmp_path / "file" / "below", ["soc-1"])
    with pytest.raises(ConfigError, match="quotes"):
        write_certificates(tmp_path / 'a"b', ["soc-1"])


def test_the_command_prints_what_node_config_needs(socflower: Socflower, tmp_path: Path) -> None:
    ran = socflower("certificates", "--out", "keys", "10.0.0.2", "soc-1")
    assert ran.status == 0, ran.err
    folder = tmp_path / "keys"
    for host in ("10.0.0.2", "soc-1"):
        assert (
            f'ring-ca="{folder}/ca.pem" ring-certificate="{folder}/{host}.pem" ring-key="{folder}/{host}.key"'
            in ran.out
        )
    assert f"{folder}/ca.key" in ran.out.splitlines()[-1]


def test_the_command_has_a_document_for_programs(socflower: Socflower, tmp_path: Path) -> None:
    socflower("certificates", "--out", "keys", "soc-1")
    ran = socflower("certificates", "--out", "keys", "soc-1", "soc-2", "--json")
    document = json.loads(ran.out)
    assert document["schema"] == 1
    assert [(host["host"], host["status"]) for host in document["hosts"]] == [
        ("soc-1", "kept"),
        ("soc-2", "new"),
    ]
    assert all(
        Path(host[file]).exists()
        for host in document["hosts"]
        for file in ("ca", "certificate", "key")
    )


def test_a_mistake_on_the_command_line_is_one_line(socflower: Socflower) -> None:
    ran = socflower("certificates", "--out", "keys", "10.0.0.2:28200")
    assert ran.status == 2
    assert ran.err == (
        "error: host '10.0.0.2:28200' is neither a DNS name nor an IP address; leave out the port: "
        "10.0.0.2\n"
    )

"""Certificates for the machines of a rack: a private certificate authority, and a key for each host.

A thin layer over `cryptography`; docs/guides/deployment.md says what an authority of your own has to sign. The key of
this one, `ca.key`, signs new hosts and must not be on a machine of the rack.
"""

import inspect
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from socflower.errors import ConfigError
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import remove_partial, write_atomically

_CA_DAYS = 3650
# A board without a clock battery starts with a past time, at which a new certificate would not be valid yet.
_CLOCK_SKEW = timedelta(days=1)
_LABEL = r"(?!-)[a-z0-9-]{1,63}(?<!-)"
# "ca" would overwrite the authority's files.
_DNS_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?!ca\Z){_LABEL}(\.{_LABEL})*")
_START_OVER = "put the right file back, or start with an empty folder"


_Status: TypeAlias = Literal["new", "kept", "renewed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCertificate:
    """The files of one host; copy all three to it, and make the key readable only by its Flower user."""

    host: str
    ca: Path
    certificate: Path
    key: Path
    not_after: datetime
    status: _Status

    @property
    def node_config(self) -> str:
        """The entries for `--node-config` of the host's SuperNode, with the present paths."""
        return f'ring-ca="{self.ca}" ring-certificate="{self.certificate}" ring-key="{self.key}"'


def write_certificates(
    folder: Path,
    hosts: Sequence[str],
    *,
    valid_days: int = 825,
    renew: bool = False,
) -> dict[str, HostCertificate]:
    """Write a certificate and a key for each host into `folder`, and an authority if there is none; return them.

    A host is a DNS name or an IP address, as its peers use it. Existing files are kept, unless `renew` is set.
    Certificates expire at the latest with the authority's, ten years after its creation. Keys are written with mode
    0600. Raises `ConfigError` for an invalid host, a folder that cannot be written, files that are damaged or of
    another authority, and expired certificates; nothing is written before all hosts and files are checked.
    """
    names = list(dict.fromkeys(_host(host) for host in hosts))
    if not names:
        raise ConfigError("certificates: name at least one host, such as soc-1 or 10.0.0.2")
    if not 1 <= valid_days <= _CA_DAYS:
        raise ConfigError(f"certificates: valid for {valid_days} days; give 1 to {_CA_DAYS}")
    folder = folder.absolute()
    if set("\"'\\\n") & set(str(folder)):
        raise ConfigError(
            f"{folder}: --node-config takes no path with quotes, backslashes or line breaks"
        )
    # Some file systems do not allow colons, and scp reads them as a host; no DNS name contains an underscore.
    stems = {host: folder / host.replace(":", "_") for host in names}
    with exclusive_folder(folder, f"--out {folder}"):
        # A killed command may have left a part of a key.
        remove_partial(folder)
        authority = _read(folder / "ca", None, _START_OVER)
        present = [host for host, stem in stems.items() if any(map(Path.exists, _files(stem)))]
        if authority is None and present:
            # A new authority must not overwrite keys of an old one.
            raise ConfigError(
                f"{stems[present[0]]}.key: is there without the ca.pem and ca.key that it belongs to; "
                f"{_START_OVER}"
            )
        pairs: dict[str, _Pair] = {}
        for host in () if renew else present:
            found = _read(stems[host], authority, "give the host new ones with --renew")
            assert found is not None
            pairs[host] = found
        kept = set(pairs)
        try:
            issuer = authority or _issue(folder / "ca", None, None, _CA_DAYS)
            for host in names:
                if host not in pairs:
                    pairs[host] = _issue(stems[host], host, issuer, valid_days)
        except OSError as error:
            raise ConfigError(
                f"{folder}: cannot be written ({error.strerror}); make room"
            ) from None
    made = {}
    for host in names:
        status: _Status = "renewed" if host in present else "new"
        if host in kept:
            status = "kept"
        not_after = pairs[host][0].not_valid_after_utc
        made[host] = _of_files(host, folder / "ca.pem", stems[host], not_after, status)
    return made


def _of_files(
    host: str, ca: Path, stem: Path, not_after: datetime, status: _Status
) -> HostCertificate:
    certificate, key = _files(stem)
    return HostCertificate(
        host=host, ca=ca, certificate=certificate, key=key, not_after=not_after, status=status
    )


_Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _host(text: str) -> str:
    """Return the host's name or address in canonical form."""
    host = text.strip().lower().rstrip(".")
    address = _address(host)
    if address is not None:
        return str(address)
    # A last label of digits alone is a mistyped address: no such top-level domain exists.
    if not _DNS_NAME.fullmatch(host) or host.rpartition(".")[2].isdigit():
        has_port = re.fullmatch(r"[^:]+:\d+", host)
        hint = f"; leave out the port: {host.partition(':')[0]}" if has_port else ""
        raise ConfigError(f"host {text!r} is neither a DNS name nor an IP address{hint}")
    return host


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address without a zone, which no certificate can contain."""
    with suppress(ValueError):
        return None if "%" in host else ipaddress.ip_address(host)
    return None


def _files(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(f"{stem.name}.pem"), stem.with_name(f"{stem.name}.key")


def _read(stem: Path, issuer: _Pair | None, remedy: str) -> _Pair | None:
    """Return the certificate of `issuer`, or of an authority, and its key; None if neither is there."""
    certificate_path, key_path = _files(stem)
    if not certificate_path.exists() and not key_path.exists():
        return None
    path = certificate_path
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        path = key_path
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # TypeError: the key is encrypted.
        raise ConfigError(f"{path}: is damaged, or not in unencrypted PEM form; {remedy}") from None
    problem = _problem(certificate, key, issuer, certificate_path.name)
    if problem is None and isinstance(key, ec.EllipticCurvePrivateKey):
        return certificate, key
    problem = problem or f"{key_path.name}: is no key of an elliptic curve"
    raise ConfigError(f"{stem.parent / problem}; {remedy}")


def _problem(
    certificate: x509.Certificate,
    key: PrivateKeyTypes,
    issuer: _Pair | None,
    name: str,
) -> str | None:
    """Return the file and its fault if a certificate has another key, signer or time."""
    if certificate.public_key() != key.public_key():
        return f"{name.removesuffix('.pem')}.key: is not the key of {name}"
    try:
        certificate.verify_directly_issued_by(issuer[0] if issuer else certificate)
    except (ValueError, TypeError, InvalidSignature):
        # A host's certificate signs no others, and so not itself.
        return f"{name}: was not signed by {'ca.pem' if issuer else 'itself'}"
    if certificate.not_valid_after_utc <= _now():
        return f"{name}: ended on {certificate.not_valid_after_utc:%Y-%m-%d}"
    return None


def _issue(stem: Path, host: str | None, issuer: _Pair | None, valid_days: int) -> _Pair:
    """Make a key and a host's certificate, or without `issuer` an authority's, and write both."""
    key = ec.generate_private_key(ec.SECP256R1())
    # People read this name; TLS uses the alternative name. It has at most 64 characters.
    text = (host or "socflower private certificate authority")[:64]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
    not_after = _now() + timedelta(days=valid_days)
    if issuer is not None:
        not_after = min(not_after, issuer[0].not_valid_after_utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer[0].subject if issuer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCK_SKEW)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    critical, others = _for_host(host, issuer) if host and issuer else _for_authority()
    for extension in (*critical, *others):
        builder = builder.add_extension(extension, critical=extension in critical)
    certificate = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    _write(stem, certificate, key)
    return certificate, key


_Extensions = tuple[list[x509.ExtensionType], list[x509.ExtensionType]]
"""Those that are critical, and all others."""


def _for_authority() -> _Extensions:
    usage = _usage("key_cert_sign", "crl_sign")
    return [x509.BasicConstraints(ca=True, path_length=0), usage], []


def _for_host(host: str, issuer: _Pair) -> _Extensions:
    address = _address(host)
    name = x509.IPAddress(address) if address else x509.DNSName(host)
    # A host listens to one neighbour of the ring and connects to the other, so it is both server and client.
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        [x509.BasicConstraints(ca=False, path_length=None), _usage("digital_signature")],
        [
            x509.SubjectAlternativeName([name]),
            x509.ExtendedKeyUsage(both),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer[1].public_key()),
        ],
    )


def _usage(*uses: str) -> x509.KeyUsage:
    keys = inspect.signature(x509.KeyUsage).parameters
    return x509.KeyUsage(**{key: key in uses for key in keys})


def _write(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    certificate_path, key_path = _files(stem)
    pem = serialization.Encoding.PEM
    form, encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_atomically(key_path, key.private_bytes(pem, form, encryption), mode=0o600)
    write_atomically(certificate_path, certificate.public_bytes(pem), mode=0o644)


def _now() -> datetime:
    return datetime.now(UTC)

"""Certificates for the machines of a rack: a private certificate authority, and a key for each host.

Only hosts with a certificate of the private authority may take part; no public name is needed. Its key, `ca.key`,
signs new hosts and must not be on a machine of the rack. The same files serve rings and Flower's SuperLink.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from socflower.errors import ConfigError
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import write_atomically

_CA_DAYS = 3650
# A board without a clock battery starts with a past time, at which a new certificate would not be valid yet.
_CLOCK_SKEW = timedelta(days=1)
_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)")
_NODE_CONFIG_REFUSES = set("\"'\\\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCertificate:
    """One host's files; copy all three to the host, with the key readable only by its Flower user."""

    host: str
    ca: Path
    certificate: Path
    key: Path
    not_after: datetime
    status: str  # "new", "kept" or "renewed"

    @property
    def node_config(self) -> str:
        """The entries for `--node-config` of the host's SuperNode, with the present paths."""
        return f'ring-ca="{self.ca}" ring-certificate="{self.certificate}" ring-key="{self.key}"'


class _Authority:
    def __init__(self, path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.path = path
        self.certificate = certificate
        self._key = key

    def sign(self, host: str, key: ec.EllipticCurvePrivateKey, valid_days: int) -> x509.Certificate:
        not_after = min(_now() + timedelta(days=valid_days), self.certificate.not_valid_after_utc)
        # A host is both server and client: it listens to one neighbour of the ring and connects to the other.
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _builder(_name(host), self.certificate.subject, key, not_after)
        return (
            builder.add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def write_certificates(
    folder: Path, hosts: Sequence[str], *, valid_days: int = 825, renew: bool = False,
) -> dict[str, HostCertificate]:
    """Write a certificate and a key for each host into `folder`, and an authority if there is none; return them.

    A host is a DNS name or an IP address, as used by its peers. Existing files are kept, unless `renew` is set.
    Certificates expire at the latest with the authority's, ten years after its creation. Keys are written with mode
    0600. Raises `ConfigError` for a host that is neither, a folder that cannot be written, files that are damaged or of
    another authority, and expired certificates; nothing is written before all hosts and files are checked.
    """
    names = list(dict.fromkeys(_host(host) for host in hosts))
    if not names:
        raise ConfigError("certificates: name at least one host, such as soc-1 or 10.0.0.2")
    if not 1 <= valid_days <= _CA_DAYS:
        raise ConfigError(f"certificates: valid for {valid_days} days; give 1 to {_CA_DAYS}")
    folder = folder.absolute()
    if _NODE_CONFIG_REFUSES & set(str(folder)):
        raise ConfigError(f"{folder}: quotes, backslashes and line breaks in a path cannot stand in --node-config; "
                          "name another folder")
    with exclusive_folder(folder, f"--out {folder}"):
        return _write(folder, names, valid_days, renew)


def _write(folder: Path, names: Sequence[str], valid_days: int, renew: bool) -> dict[str, HostCertificate]:
    existing = _read_authority(folder)
    kept = {} if existing is None else {
        host: certificate for host in names if (certificate := _read_host(folder, host, existing, renew)) is not None}
    if existing is None:
        _refuse_orphans(folder, names)
    try:
        authority = existing or _make_authority(folder)
        return {host: HostCertificate(host=host, ca=authority.path, certificate=_certificate_path(folder, host),
                                      key=_key_path(folder, host), not_after=kept[host].not_valid_after_utc,
                                      status="kept")
                if host in kept else _issue(folder, host, authority, valid_days) for host in names}
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); make room, or name another folder") \
            from None


def _host(text: str) -> str:
    """Return the host's name or address in canonical form."""
    host = text.strip().lower().rstrip(".")
    if isinstance(_address(host), ipaddress.IPv6Address) and "%" in host:
        raise ConfigError(f"host {text!r}: a zone cannot stand in a certificate; leave out %{host.partition('%')[2]}")
    if (address := _address(host)) is not None:
        return str(address)
    labels = host.split(".")
    # A last label of digits alone is a mistyped address: no such top-level domain exists.
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        hint = f"; leave out the port: {host.partition(':')[0]}" if re.fullmatch(r"[^:]+:\d+", host) else ""
        raise ConfigError(f"host {text!r} is neither a DNS name nor an IP address{hint}")
    if host == "ca":
        raise ConfigError("host 'ca': ca.pem and ca.key are the authority's own; use the host's address or full name")
    return host


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _general_name(host: str) -> x509.GeneralName:
    address = _address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _stem(host: str) -> str:
    # Some file systems do not allow colons, and scp reads them as a host; no DNS name contains an underscore.
    return host.replace(":", "_")


def _certificate_path(folder: Path, host: str) -> Path:
    return folder / f"{_stem(host)}.pem"


def _key_path(folder: Path, host: str) -> Path:
    return folder / f"{_stem(host)}.key"


def _read_authority(folder: Path) -> _Authority | None:
    """Return the folder's authority, or None if it has none; `ConfigError` if it is not valid."""
    path, key_path = folder / "ca.pem", folder / "ca.key"
    if not path.exists() and not key_path.exists():
        return None
    remedy = "put the right file back, or start with an empty folder and give every host new certificates"
    certificate, key = _read_certificate(path, remedy), _read_key(key_path, remedy)
    if certificate.public_key() != key.public_key():
        _refuse(key_path, f"is not the key of {path.name}", remedy)
    if not _is_authority(certificate):
        _refuse(path, "is a host's certificate and cannot sign others", remedy)
    if certificate.not_valid_after_utc <= _now():
        _refuse(path, f"ended on {certificate.not_valid_after_utc:%Y-%m-%d}",
                "start with an empty folder and give every host new certificates")
    return _Authority(path, certificate, key)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        return False


def _read_host(folder: Path, host: str, authority: _Authority, renew: bool) -> x509.Certificate | None:
    """Return a host's existing certificate, or None if a new one is needed."""
    path, key_path = _certificate_path(folder, host), _key_path(folder, host)
    if renew or not (path.exists() or key_path.exists()):
        return None
    remedy = "give the host new ones with --renew"
    certificate, key = _read_certificate(path, remedy), _read_key(key_path, remedy)
    if certificate.public_key() != key.public_key():
        _refuse(key_path, f"is not the key of {path.name}", remedy)
    try:
        certificate.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature):
        _refuse(path, f"was not signed by {authority.path.name}", remedy)
    if certificate.not_valid_after_utc <= _now():
        _refuse(path, f"ended on {certificate.not_valid_after_utc:%Y-%m-%d}", remedy)
    return certificate


def _refuse_orphans(folder: Path, hosts: Sequence[str]) -> None:
    """Refuse to make a new authority in a folder with keys of an old one, which would be overwritten."""
    for host in hosts:
        for path in (_certificate_path(folder, host), _key_path(folder, host)):
            if path.exists():
                _refuse(path, "is there, but ca.pem and ca.key that it belongs to are not",
                        "put them back, or start with an empty folder")


def _read_certificate(path: Path, remedy: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(path, remedy))
    except ValueError:
        _refuse(path, "is damaged, or no certificate in PEM form", remedy)


def _read_key(path: Path, remedy: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(_read(path, remedy), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key is encrypted
        _refuse(path, "is damaged, or no unencrypted private key in PEM form", remedy)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        _refuse(path, "is not a key of the kind this command makes (elliptic curve)", remedy)
    return key


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})", remedy)


def _refuse(path: Path, why: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{path}: {why}; {remedy}") from None


def _make_authority(folder: Path) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("socflower private certificate authority")
    certificate = (
        _builder(name, name, key, _now() + timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_atomically(folder / "ca.key", [_pem_of_key(key)], mode=0o600)
    write_atomically(folder / "ca.pem", [certificate.public_bytes(serialization.Encoding.PEM)], mode=0o644)
    return _Authority(folder / "ca.pem", certificate, key)


def _issue(folder: Path, host: str, authority: _Authority, valid_days: int) -> HostCertificate:
    path, key_path = _certificate_path(folder, host), _key_path(folder, host)
    status = "renewed" if key_path.exists() or path.exists() else "new"
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = authority.sign(host, key, valid_days)
    write_atomically(key_path, [_pem_of_key(key)], mode=0o600)
    write_atomically(path, [certificate.public_bytes(serialization.Encoding.PEM)], mode=0o644)
    return HostCertificate(host=host, ca=authority.path, certificate=path, key=key_path,
                           not_after=certificate.not_valid_after_utc, status=status)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, not_after: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(_now() - _CLOCK_SKEW).not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False,
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False)


def _name(text: str) -> x509.Name:
    # A common name is limited to 64 characters; it is for people, TLS uses the alternative name.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                             serialization.NoEncryption())


def _now() -> datetime:
    return datetime.now(UTC)

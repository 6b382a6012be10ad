"""Certificates for the machines of a rack: a private certificate authority, and a key for each host.

A thin layer over `cryptography`; docs/guides/deployment.md says what an authority of your own has to sign. The key of
this one, `ca.key`, signs new hosts and must not be on a machine of the rack.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from socflower.errors import ConfigError
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import remove_partial, write_atomically

_CA_DAYS = 3650
# A board without a clock battery starts with a past time, at which a new certificate would not be valid yet.
_CLOCK_SKEW = timedelta(days=1)
_DNS_NAME = re.compile(
    r"(?=.{1,253}\Z)(?!ca\Z)(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*"
)
_ANEW = (
    "put the right file back, or start with an empty folder and give every host new certificates"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCertificate:
    """One host's files; copy all three to the host, with the key readable only by its Flower user."""

    host: str
    ca: Path
    certificate: Path
    key: Path
    not_after: datetime
    # "new", "kept" or "renewed".
    status: str

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
    if set("\"'\\\n") & set(str(folder)):
        raise ConfigError(
            f"{folder}: quotes, backslashes and line breaks in a path cannot stand in --node-config; "
            "name another folder"
        )
    # Some file systems do not allow colons, and scp reads them as a host; no DNS name contains an underscore.
    stems = {host: folder / host.replace(":", "_") for host in names}
    with exclusive_folder(folder, f"--out {folder}"):
        # Of a killed command; it may hold a key.
        remove_partial(folder)
        authority = _read(folder / "ca", None, _ANEW)
        present = {
            host for host, stem in stems.items() if any(path.exists() for path in _files(stem))
        }
        if authority is None and present:
            # A new authority must not overwrite keys of an old one.
            raise ConfigError(
                f"{stems[min(present)]}.key: is there, but ca.pem and ca.key that it belongs to are not; "
                "put them back, or start with an empty folder"
            )
        kept = (
            {}
            if renew
            else {
                host: _read(stems[host], authority, "give the host new ones with --renew")
                for host in present
            }
        )
        try:
            issuer = authority or _issue(folder / "ca", None, None, _CA_DAYS)
            issued = {
                host: kept.get(host) or _issue(stems[host], host, issuer, valid_days)
                for host in names
            }
        except OSError as error:
            raise ConfigError(
                f"{folder}: cannot be written ({error.strerror}); make room, or name another folder"
            ) from None
    return {
        host: HostCertificate(
            host=host,
            ca=folder / "ca.pem",
            certificate=_files(stems[host])[0],
            key=_files(stems[host])[1],
            not_after=certificate.not_valid_after_utc,
            status="kept" if host in kept else "renewed" if host in present else "new",
        )
        for host, (certificate, _) in issued.items()
    }


_Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _host(text: str) -> str:
    """Return the host's name or address in canonical form."""
    host = text.strip().lower().rstrip(".")
    try:
        if "%" not in host:
            # A zone cannot stand in a certificate.
            return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    # A last label of digits alone is a mistyped address: no such top-level domain exists.
    if not _DNS_NAME.fullmatch(host) or host.rpartition(".")[2].isdigit():
        hint = (
            f"; leave out the port: {host.partition(':')[0]}"
            if re.fullmatch(r"[^:]+:\d+", host)
            else ""
        )
        raise ConfigError(f"host {text!r} is neither a DNS name nor an IP address{hint}")
    return host


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
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or certificate.public_key() != key.public_key()
    ):
        raise ConfigError(f"{key_path}: is not the key of {certificate_path.name}; {remedy}")
    try:
        certificate.verify_directly_issued_by((issuer or (certificate,))[0])
    except (ValueError, TypeError, InvalidSignature):
        signer = "ca.pem" if issuer else "itself: a host's certificate cannot sign others"
        raise ConfigError(f"{certificate_path}: was not signed by {signer}; {remedy}") from None
    if certificate.not_valid_after_utc <= _now():
        raise ConfigError(
            f"{certificate_path}: ended on {certificate.not_valid_after_utc:%Y-%m-%d}; {remedy}"
        )
    return certificate, key


def _issue(stem: Path, host: str | None, issuer: _Pair | None, valid_days: int) -> _Pair:
    """Make a key and a host's certificate, or without `issuer` an authority's, and write both."""
    key, is_ca = ec.generate_private_key(ec.SECP256R1()), issuer is None
    # A common name is limited to 64 characters; it is for people, TLS uses the alternative name.
    name = x509.Name(
        [
            x509.NameAttribute(
                NameOID.COMMON_NAME, (host or "socflower private certificate authority")[:64]
            )
        ]
    )
    not_after = _now() + timedelta(days=valid_days)
    if issuer is not None:
        not_after = min(not_after, issuer[0].not_valid_after_utc)
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer[0].subject if issuer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _CLOCK_SKEW)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **usage
            ),
            critical=True,
        )
    )
    if issuer is not None and host is not None:
        try:
            general_name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            general_name = x509.DNSName(host)
        # A host is both server and client: it listens to one neighbour of the ring and connects to the other.
        both = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer[1].public_key())
        builder = (
            builder.add_extension(x509.SubjectAlternativeName([general_name]), critical=False)
            .add_extension(both, critical=False)
            .add_extension(identifier, critical=False)
        )
    certificate = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    certificate_path, key_path = _files(stem)
    write_atomically(
        key_path,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        mode=0o600,
    )
    write_atomically(
        certificate_path, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644
    )
    return certificate, key


def _now() -> datetime:
    return datetime.now(UTC)

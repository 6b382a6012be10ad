"""Certificates for tests: an authority, and members' certificates for loopback."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from socflower.wire.secure_channel import Tls


class Authority:
    """Signs certificates for 127.0.0.1 into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(
            self._name, self._key, x509.BasicConstraints(ca=True, path_length=0), None
        )
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def member(self, name: str, host: str = "127.0.0.1") -> Tls:
        """Return the files of a new certificate for an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(
            subject, key, x509.BasicConstraints(ca=False, path_length=None), host
        )
        files = Tls(self.ca, self._folder / f"{name}.crt", self._folder / f"{name}.key")
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        constraints: x509.BasicConstraints,
        host: str | None,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(constraints, critical=True)
        )
        if host is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())

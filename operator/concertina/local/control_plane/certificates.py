"""Certificate authority of one local cluster, and the certificates and kubeconfigs that it signs.

The library trustme is not enough: it signs for hosts with at most one organization. Kubernetes also needs certificates
for users, which are in several groups (O).
"""

import base64
import datetime
import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)
_LIFETIME = 365 * _DAY


@dataclass(frozen=True)
class KeyPair:
    """Paths of a certificate and its private key."""

    certificate: Path
    key: Path


class ClusterAuthority:
    """Certificate authority of a local cluster.

    Its key stays in the state folder, so that nodes can be added later.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pair = KeyPair(folder / "ca.crt", folder / "ca.key")

    @classmethod
    def create(cls, folder: Path) -> "ClusterAuthority":
        """Create the certificate authority and write its files."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = cls(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("concertina-local", ())
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        _write(authority.pair, builder.sign(key, hashes.SHA256()), key)
        return authority

    def issue(self, name: str, subject: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> KeyPair:
        """Sign a certificate for a subject (CN) in groups (O), and return the paths of the certificate and its key.

        With `hosts` (names and addresses), the certificate is also valid for a server on these hosts.
        """
        issuer = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        signer = serialization.load_pem_private_key(self.pair.key.read_bytes(), password=None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])
        builder = _builder(_name(subject, groups), issuer.subject, key)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        pair = KeyPair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        _write(pair, builder.sign(signer, hashes.SHA256()), key)
        return pair

    def kubeconfig(self, path: Path, server: str, user: str, groups: Sequence[str] = ()) -> None:
        """Write a kubeconfig with an embedded certificate for a user. The file is JSON, which is valid YAML."""
        pair = self.issue(path.name, user, groups)
        cluster = {"server": server, "certificate-authority-data": _base64(self.pair.certificate)}
        credentials = {"client-certificate-data": _base64(pair.certificate), "client-key-data": _base64(pair.key)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "concertina", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "concertina", "context": {"cluster": "concertina", "user": user}}],
            "current-context": "concertina",
        }
        write_private(path, json.dumps(config, indent=2).encode())


def service_account_key(folder: Path) -> KeyPair:
    """Create the key pair with which service account tokens are signed.

    The certificate file contains only the public key.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    pair = KeyPair(folder / "service-account.pub", folder / "service-account.key")
    write_private(pair.key, _pem(key))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    pair.certificate.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, public))
    return pair


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, by an atomic replacement."""
    fresh = path.with_name(path.name + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(path)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _name(common: str, organizations: Sequence[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization) for organization in organizations]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _DAY).not_valid_after(now + _LIFETIME)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _write(pair: KeyPair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    write_private(pair.key, _pem(key))
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

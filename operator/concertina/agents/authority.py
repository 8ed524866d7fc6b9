"""Certificate authority (CA) of one job, derived from the operator's master key.

No part of the CA is stored. HKDF (RFC 5869) derives each key of a job from the master key, the job's uid and the
purpose of the key. Every operator with the same master key can therefore connect to the job's agents. The agents'
certificate has the name `<uid>.agent`, and the operator's certificate has the name `<uid>.operator`. The private key of
the agents' certificate is stored in the job's Secret. The private keys of the CA and of the operator never leave the
operator.
"""

from __future__ import annotations

import base64
import datetime
import functools
import os
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
VALID_BEFORE = datetime.timedelta(days=1)
"""Time before the job's creation from which its certificates are valid, for machines whose clock is slow."""
VALID_AFTER = datetime.timedelta(days=3650)
MASTER_KEY_BYTES = 32
MOST_CACHED = 128
"""Maximum number of jobs whose certificate authority is cached."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, both in PEM format."""

    certificate: bytes
    key: bytes


class Authority:
    """Certificate authority of one job, which signs the certificates of its agents and of the operator."""

    def __init__(self, master_key: bytes, uid: str, created: float) -> None:
        """Derive the key of the job's CA from the master key, and sign the CA's certificate.

        Args:
            master_key: Master key of the operator.
            uid: Uid of the job.
            created: Creation time of the job in Unix seconds. The validity of all certificates depends on it.

        Raises:
            ValueError: When the master key is shorter than MASTER_KEY_BYTES.
        """
        if len(master_key) < MASTER_KEY_BYTES:
            raise ValueError(
                f"the master key must have at least {MASTER_KEY_BYTES} bytes, this one has {len(master_key)}"
            )
        self._master_key = master_key
        self._uid = uid
        self._created = datetime.datetime.fromtimestamp(int(created), datetime.UTC)
        self._key = self._derive("ca")
        self._name = _name(f"concertina {uid}")
        self._certificate = self._self_signed()

    @property
    def ca(self) -> bytes:
        """Certificate of the CA in PEM format."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def secret_data(self) -> dict[str, str]:
        """Return the `data` of the job's Secret: the CA certificate, the agents' certificate and its key."""
        agent = self._issue("agent", (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH))
        files = {"ca.crt": self.ca, "tls.crt": agent.certificate, "tls.key": agent.key}
        return {name: base64.b64encode(content).decode() for name, content in files.items()}

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context for the operator's connections to this job's agents.

        Connections must set server_hostname to `<uid>.agent`.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.ca.decode())
        operator = self._issue("operator", (ExtendedKeyUsageOID.CLIENT_AUTH,))
        # Python loads keys only from files. This file exists only in memory.
        file = os.memfd_create("operator-identity")
        try:
            os.write(file, operator.key + operator.certificate)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return context

    def _derive(self, purpose: str) -> ec.EllipticCurvePrivateKey:
        # 48 bytes are 128 bits more than the group order, so the remainder is uniformly distributed (FIPS 186-5,
        # A.2.1).
        info = f"concertina/{purpose}/{self._uid}".encode()
        secret = HKDF(hashes.SHA256(), length=48, salt=None, info=info).derive(self._master_key)
        return ec.derive_private_key(int.from_bytes(secret, "big") % (P256_ORDER - 1) + 1, ec.SECP256R1())

    def _issue(self, role: str, usages: tuple[x509.ObjectIdentifier, ...]) -> Issued:
        key = self._derive(role)
        builder = (
            self._builder(f"{self._uid}.{role}", key, ca=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(f"{self._uid}.{role}")]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return Issued(self._sign(builder).public_bytes(pem), private)

    def _self_signed(self) -> x509.Certificate:
        return self._sign(self._builder(f"concertina {self._uid}", self._key, ca=True))

    def _builder(self, name: str, key: ec.EllipticCurvePrivateKey, ca: bool) -> x509.CertificateBuilder:
        serial = hashes.Hash(hashes.SHA256())
        serial.update(f"{self._uid}/{name}".encode())
        authority = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(int.from_bytes(serial.finalize()[:16], "big") >> 1 | 1)
            .not_valid_before(self._created - VALID_BEFORE)
            .not_valid_after(self._created + VALID_AFTER)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
            .add_extension(_usage(ca), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
        )

    def _sign(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        return builder.sign(self._key, hashes.SHA256(), ecdsa_deterministic=True)


@functools.lru_cache(MOST_CACHED)
def of_job(master_key: bytes, uid: str, created: float) -> Authority:
    """Return the certificate authority of a job.

    The result is cached, because a new job needs its authority twice within seconds: for the connections to its agents,
    and for its Secret.
    """
    return Authority(master_key, uid, created)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )

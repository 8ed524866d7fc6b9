"""Token issuer of a cluster, and an S3 server with a token service that trusts it: SeaweedFS's own, by OpenID Connect.

AWS does the same for a pod with an IAM role (IRSA): the token of its service account is exchanged for credentials.
"""

import base64
import contextlib
import http.server
import json
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from concertina.local import s3
from concertina.local.control_plane import certificates
from concertina.local.host import processes

AUDIENCE = "sts.amazonaws.com"
ROLE = "arn:aws:iam::role/Trainer"
VERSION = "2012-10-17"


class Issuer:
    """Issuer that signs tokens of service accounts, and serves the key that verifies them."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        numbers = self._key.public_key().public_numbers()
        modulus = _base64(numbers.n.to_bytes(256, "big"))
        key = {"kty": "RSA", "kid": "k", "use": "sig", "alg": "RS256", "n": modulus, "e": "AQAB"}
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _answering({"keys": [key]}))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def token(self, seconds: float = 600, audience: str = AUDIENCE) -> str:
        """Return a token with this lifetime in seconds."""
        now = int(time.time())
        claims = {"iss": self.url, "aud": [audience], "sub": "system:serviceaccount:team:trainer"}
        header = {"alg": "RS256", "kid": "k", "typ": "JWT"}
        parts = header, claims | {"iat": now - 3600, "exp": int(now + seconds)}
        signed = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        return f"{signed}.{_base64(self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Service:
    issuer: Issuer
    server: s3.Server
    environment: dict[str, str]
    """Return the variables of a pod with an identity; the caller writes the token's file."""


@contextlib.contextmanager
def serve(name: str, folder: Path):
    """Serve the bucket `train`, which the role may use, and `other`, which it may not."""
    issuer = Issuer()
    [port] = processes.free_ports("127.0.0.1", 1)
    authority = certificates.ClusterAuthority.create(folder / "pki")
    pair = authority.issue("s3", "s3", hosts=["127.0.0.1"])
    (folder / "iam.json").write_text(json.dumps(_configuration(issuer.url)))
    flags = {
        "s3.iam.config": str(folder / "iam.json"),
        "s3.port.https": str(port),  # Clients contact a token service over TLS only.
        "s3.cert.file": str(pair.certificate),
        "s3.key.file": str(pair.key),
    }
    try:
        with s3.serve(name, ["train", "other"], flags) as server:
            environment = {
                "AWS_ENDPOINT_URL": server.endpoint,
                "AWS_ENDPOINT_URL_STS": f"https://127.0.0.1:{port}",
                "AWS_CA_BUNDLE": str(authority.pair.certificate),
                "AWS_REGION": server.region,
                "AWS_ROLE_ARN": ROLE,
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(folder / "token"),
            }
            yield Service(issuer, server, environment)
    finally:
        issuer.close()


def _configuration(url: str) -> dict[str, object]:
    provider = {"issuer": url, "clientId": AUDIENCE, "jwksUri": f"{url}/keys"}
    trust = {"Effect": "Allow", "Principal": {"Federated": "cluster"}, "Action": ["sts:AssumeRoleWithWebIdentity"]}
    resources = ["arn:aws:s3:::train", "arn:aws:s3:::train/*"]
    may = [
        {"Effect": "Allow", "Action": ["s3:*"], "Resource": resources},
        {"Effect": "Allow", "Action": ["sts:ValidateSession"], "Resource": ["*"]},
    ]
    role = {"roleName": "Trainer", "roleArn": ROLE, "attachedPolicies": ["Train"]}
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    return {
        "sts": {"tokenDuration": "1h", "maxSessionLength": "12h", "issuer": "sts", "signingKey": key},
        "providers": [{"name": "cluster", "type": "oidc", "enabled": True, "config": provider}],
        "policy": {"defaultEffect": "Deny"},
        "roles": [role | {"trustPolicy": {"Version": VERSION, "Statement": [trust]}}],
        "policies": [{"name": "Train", "document": {"Version": VERSION, "Statement": may}}],
    }


def _answering(content: object) -> type[http.server.BaseHTTPRequestHandler]:
    text = json.dumps(content).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

"""CA of a job, which is derived and not stored: it accepts the right clients only, in real TLS handshakes."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from concertina.agents.authority import Authority, of_job

MASTER = b"m" * 32
CREATED = 1_700_000_000.0


def server_context(authority: Authority, folder: Path) -> ssl.SSLContext:
    """Return the TLS context that an agent makes from the job's Secret."""
    for name, content in authority.secret_data().items():
        (folder / name).write_bytes(base64.b64decode(content))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> list[str]:
    """Return the DNS names of the client's certificate, as the server sees them."""
    seen: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("peercert")
        await reader.readline()
        seen.set_result([value for kind, value in certificate["subjectAltName"] if kind == "DNS"])
        writer.write(b"ok\n")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
        try:
            writer.write(b"hello\n")
            assert await reader.readline() == b"ok\n"
        finally:
            writer.close()
    return await seen


def test_everything_is_a_function_of_master_key_uid_and_creation() -> None:
    first, again = Authority(MASTER, "u1", CREATED), Authority(MASTER, "u1", CREATED)
    assert first.secret_data() == again.secret_data()
    for other in (Authority(b"n" * 32, "u1", CREATED), Authority(MASTER, "u2", CREATED)):
        assert other.secret_data()["tls.key"] != first.secret_data()["tls.key"]
        assert other.ca != first.ca


def test_the_operator_is_let_in_under_its_name(tmp_path: Path) -> None:
    authority = Authority(MASTER, "u1", CREATED)
    names = asyncio.run(handshake(server_context(authority, tmp_path), authority.client_context(), "u1.agent"))
    assert names == ["u1.operator"]


def test_an_operator_started_later_still_speaks_to_agents_with_the_old_secret(tmp_path: Path) -> None:
    server = server_context(Authority(MASTER, "u1", CREATED), tmp_path)
    asyncio.run(handshake(server, Authority(MASTER, "u1", CREATED).client_context(), "u1.agent"))


@pytest.mark.parametrize("foreign", [Authority(MASTER, "u2", CREATED), Authority(b"n" * 32, "u1", CREATED)])
def test_another_jobs_agent_and_another_operators_are_refused(foreign: Authority, tmp_path: Path) -> None:
    server = server_context(foreign, tmp_path)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        asyncio.run(handshake(server, Authority(MASTER, "u1", CREATED).client_context(), "u1.agent"))


def test_the_name_is_checked(tmp_path: Path) -> None:
    authority = Authority(MASTER, "u1", CREATED)
    with pytest.raises(ssl.SSLCertVerificationError):
        asyncio.run(handshake(server_context(authority, tmp_path), authority.client_context(), "u2.agent"))


def test_a_client_without_a_certificate_of_the_job_is_refused(tmp_path: Path) -> None:
    server = server_context(Authority(MASTER, "u1", CREATED), tmp_path)
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
        asyncio.run(handshake(server, client, "u1.agent"))


def test_the_secret_holds_nothing_of_the_operator() -> None:
    authority = Authority(MASTER, "u1", CREATED)
    data = authority.secret_data()
    assert set(data) == {"ca.crt", "tls.crt", "tls.key"}
    certificate = x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["u1.agent"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_before_utc.timestamp() <= CREATED - 86400


def test_a_short_master_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes"):
        Authority(b"short", "u1", CREATED)


def test_the_authority_of_a_job_is_made_once() -> None:
    made = of_job(MASTER, "u1", CREATED)
    assert of_job(MASTER, "u1", CREATED) is made
    others = [of_job(b"n" * 32, "u1", CREATED), of_job(MASTER, "u2", CREATED), of_job(MASTER, "u1", CREATED + 1)]
    assert made.ca == Authority(MASTER, "u1", CREATED).ca
    assert made.ca not in [other.ca for other in others]

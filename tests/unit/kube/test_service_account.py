"""The operator's login by its pod's service account, as kopf reads it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import kopf
import pytest

from concertina.kube.access import NoAccess
from concertina.kube.watch import service_account


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let kopf find this text as the token. kopf's own path is of the machine."""
    token = ["first"]

    def login(**_: object) -> kopf.ConnectionInfo | None:
        if not token[0]:
            return None
        return kopf.ConnectionInfo(server="https://by-name", token=token[0], default_namespace="system")

    monkeypatch.setattr(service_account.kopf, "login_with_service_account", login)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    return token


def test_the_address_is_that_of_the_pods_variables(token: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    access = asyncio.run(service_account.operator_access())
    assert (access.server, access.namespace) == ("https://[fd00::1]:6443", "system")


def test_a_token_is_read_again_when_it_is_due_and_when_it_is_refused(
    token: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        now = 0.0
        monkeypatch.setattr(service_account.time, "monotonic", lambda: now)
        access = await service_account.operator_access()
        assert await access.authorization() == "Bearer first"
        token[0] = "second"
        assert await access.authorization() == "Bearer first"
        now = service_account.READ_AGAIN_SECONDS
        assert await access.authorization() == "Bearer second"
        token[0] = "third"
        await access.renew("Bearer second")
        assert await access.authorization() == "Bearer third"

    asyncio.run(body())


def test_without_a_token_a_sentence_says_what_to_set(token: list[str]) -> None:
    token[0] = ""
    with pytest.raises(NoAccess, match="automountServiceAccountToken"):
        asyncio.run(service_account.operator_access())


@pytest.mark.parametrize("module", ["concertina.controller.operator", "concertina.controller.installation_check"])
def test_each_program_of_the_operators_image_logs_in_without_the_client_library(module: str) -> None:
    program = (
        "import runpy, sys, kopf; sys.modules['kubernetes'] = None; kopf.login_with_service_account = lambda **_: None;"
        f"sys.argv[1:] = []; runpy.run_module({module!r}, run_name='__main__')"
    )
    environment = {
        "CONCERTINA_NAMESPACE": "system",
        "CONCERTINA_MASTER_KEY_SECRET": "key",
        "CONCERTINA_IMAGE_AGENT": "agent",
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "This pod has no token of a service account" in done.stderr

"""Credentials by web identity (IRSA): a service account's token becomes credentials, or a sentence says what to do."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

from builders.stores import identity
from concertina_state.objects.prefix import ObjectPrefix, StorageError

SHORT = timedelta(seconds=2)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with identity.serve(f"identity-tests-{os.getpid()}", tmp_path_factory.mktemp("identity")) as service:
        yield service


@pytest.fixture
def pod(service, monkeypatch):
    """Return the environment of a pod with an identity and without keys."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    token = Path(service.environment["AWS_WEB_IDENTITY_TOKEN_FILE"])
    token.write_text(service.issuer.token())
    return token


def test_a_token_gives_access_to_what_its_role_may_use(pod):
    folder = ObjectPrefix("s3://train/run", SHORT)
    folder.put("key", b"content")
    _, version = folder.get_version("key")
    folder.put_if("key", b"more", version)
    assert folder.get("key") == b"more"
    with pytest.raises(StorageError, match=rf"refused the credentials for s3://other/x .*let the role {identity.ROLE}"):
        ObjectPrefix("s3://other/x", SHORT).get("key")


def test_a_token_that_is_renewed_is_read_again(pod, service):
    pod.write_text(service.issuer.token(-60))
    folder = ObjectPrefix("s3://train/renewed", SHORT)
    with pytest.raises(StorageError, match="token has expired"):
        folder.put("key", b"")
    pod.write_text(service.issuer.token())
    folder.put("key", b"")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda service, token, env: token.write_text(service.issuer.token(-60)), "token has expired"),
        (lambda service, token, env: token.write_text(service.issuer.token(audience="x")), "audience matches none"),
        (lambda service, token, env: token.write_text(identity.Issuer().token()), "denies web identity"),
        (lambda service, token, env: token.unlink(), "Failed to read token file"),
        (lambda service, token, env: env("AWS_ROLE_ARN", "arn:aws:iam::role/Nobody"), "role not found: Nobody"),
    ],
)
def test_an_identity_that_is_refused(pod, service, monkeypatch, spoil, sentence):
    spoil(service, pod, monkeypatch.setenv)
    with pytest.raises(StorageError) as refused:
        ObjectPrefix("s3://train/x", SHORT).get("key")
    said = str(refused.value)
    assert said.startswith("The identity of this process was refused for s3://train/x (read key): ")
    assert sentence in said
    assert f"Check that the role exists and trusts the service account, and that the token in {pod} has not exp" in said


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("AWS_ENDPOINT_URL_STS", "https://127.0.0.1:9", "the token service can't be reached for s3://train/x"),
        ("AWS_CA_BUNDLE", "", "the token service has a certificate that is not trusted here"),
    ],
)
def test_a_token_service_that_is_away_or_not_trusted(pod, monkeypatch, name, value, sentence):
    monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=sentence):
        ObjectPrefix("s3://train/x", SHORT).get("key")

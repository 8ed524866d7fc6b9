"""az:// beyond what all stores are tried for (`storage_uri`): what a refusal of Azure's says. Against Azurite."""

import pytest
from typer.testing import CliRunner

from builders.stores import azurite
from concertina.cli.checkpoint import app

KEY = {"AZURE_STORAGE_ACCOUNT_NAME": azurite.ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": azurite.KEY}


@pytest.fixture
def account(azure, monkeypatch):
    """As with a real account: an endpoint and a key, nothing of an emulator."""
    for name in azurite.environment(azure):
        monkeypatch.delenv(name)
    for name, value in {**KEY, "AZURE_ENDPOINT": f"{azure}/{azurite.ACCOUNT}"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch.setenv


@pytest.mark.parametrize(
    ("uri", "change", "sentence"),
    [
        ("az://nowhere/x", {}, "The container nowhere does not exist at http://127.0.0.1"),
        ("az://train/x", {"AZURE_STORAGE_ACCOUNT_KEY": "d3Jvbmc="}, "refused the credentials for az://train/x"),
        (
            "az://train/x",
            {"AZURE_ENDPOINT": "nowhere"},
            "AZURE_ENDPOINT is 'nowhere', which is not an http:// or https://",
        ),
        ("az://train/x", {}, "az://train/x has no LATEST"),
    ],
)
def test_a_refusal_is_a_sentence(account, uri, change, sentence):
    for name, value in change.items():
        account(name, value)
    result = CliRunner().invoke(app, ["prune", uri, "--keep", "1"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert sentence in result.output

"""Object stores behind a URI: the supported schemes, and how each store finds its endpoint, credentials and CA.

Credentials come from the sources that obstore supports: environment variables, web identity, metadata servers, and the
files of Google and Azure. This module adds the static keys in AWS's files. docs/storage-access.md lists the variables.
"""

from __future__ import annotations

import configparser
import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from obstore.store import AzureStore, GCSStore, S3Store

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

CloudStore = Union[S3Store, GCSStore, AzureStore]
CA_FILES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables that name a PEM file with additional trusted certificates. The first variable that is set is used."""
CONNECT = timedelta(seconds=3)
STALLED = timedelta(seconds=20)
"""Time without data after which a request is considered stalled, and is sent again."""
REQUEST = timedelta(minutes=15)
"""Time limit of one request, including its body."""


@dataclasses.dataclass(frozen=True)
class WorkloadIdentity:
    """Identity that the cloud gives to a pod by a token, with advice on what to check if the store refuses it.

    `who` is the name of the identity, or "" if the pod has none.
    """

    who: str = ""
    check: str = "that the pod's service account has an identity that can use the store"


@dataclasses.dataclass(frozen=True)
class StoreKind:
    """Properties of one kind of store."""

    holder: str
    """Name of the first part of a URI in messages: bucket or container."""
    open: Callable[[str, str | None, ClientConfig, RetryConfig], CloudStore]
    """Function that opens a store, given its bucket and prefix."""
    endpoint: Callable[[], str]
    """Function that returns the name of the endpoint for messages."""
    endpoints: tuple[str, ...]
    """Names of environment variables that contain the URL of an endpoint."""
    keys: str
    """Names of the environment variables with credentials, as text for error messages."""
    region: str = "the region's variable"
    identity: Callable[[], WorkloadIdentity] = WorkloadIdentity


def client_options() -> ClientConfig:
    """Return the options of the HTTP client.

    Raises:
        OSError: When the CA file that the environment names can't be read.
    """
    options: ClientConfig = {
        "allow_http": True,
        "connect_timeout": CONNECT,
        "read_timeout": STALLED,
        "timeout": REQUEST,
    }
    file = next((os.environ[name] for name in CA_FILES if os.environ.get(name)), "")
    if file:
        options["root_certificate"] = Path(file).read_bytes()
    return options


def _s3(bucket: str, prefix: str | None, client: ClientConfig, retry: RetryConfig) -> S3Store:
    config: dict[str, Any] = {**aws_profile(os.environ), "checksum_algorithm": "SHA256"}
    return S3Store(bucket, prefix=prefix, client_options=client, retry_config=retry, **config)


def _gcs(bucket: str, prefix: str | None, client: ClientConfig, retry: RetryConfig) -> GCSStore:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    config: dict[str, Any] = {}
    if emulator:  # with this key, the client does not request a token
        url = emulator if "://" in emulator else f"http://{emulator}"
        key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        config = {"service_account_key": json.dumps(key)}
    return GCSStore(bucket, prefix=prefix, client_options=client, retry_config=retry, **config)


def _azure_endpoint() -> str:
    if os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
        return os.environ.get("AZURITE_BLOB_STORAGE_URL", "Azurite")
    return os.environ.get("AZURE_ENDPOINT", "Azure Blob Storage")


def _azure(container: str, prefix: str | None, client: ClientConfig, retry: RetryConfig) -> AzureStore:
    return AzureStore(container, prefix=prefix, client_options=client, retry_config=retry)


def _aws_identity() -> WorkloadIdentity:
    token, role = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"), os.environ.get("AWS_ROLE_ARN")
    if not token or not role or os.environ.get("AWS_ACCESS_KEY_ID"):
        return WorkloadIdentity()
    check = f"that the role exists and trusts the service account, and that the token in {token} has not expired"
    return WorkloadIdentity(f"the role {role}", check)


def _azure_identity() -> WorkloadIdentity:
    token, client = os.environ.get("AZURE_FEDERATED_TOKEN_FILE"), os.environ.get("AZURE_CLIENT_ID")
    if not token or not client or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
        return WorkloadIdentity()
    check = f"that the client trusts the service account, and that the token in {token} has not expired"
    return WorkloadIdentity(f"the client {client}", check)


KINDS: Mapping[str, StoreKind] = {
    "s3": StoreKind(
        "bucket",
        _s3,
        lambda: os.environ.get("AWS_ENDPOINT_URL", "AWS"),
        ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT"),
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        "AWS_REGION",
        _aws_identity,
    ),
    "gs": StoreKind(
        "bucket",
        _gcs,
        lambda: os.environ.get("STORAGE_EMULATOR_HOST", "Google Cloud Storage"),
        (),
        "GOOGLE_SERVICE_ACCOUNT_KEY (JSON) or GOOGLE_APPLICATION_CREDENTIALS (its file)",
    ),
    "az": StoreKind(
        "container",
        _azure,
        _azure_endpoint,
        ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        identity=_azure_identity,
    ),
}


def open_store(scheme: str, holder: str, prefix: str | None, retry: RetryConfig) -> CloudStore:
    """Open the store behind a URI.

    Raises:
        ValueError: When the settings can't be used.
        OSError: When a file that the settings name can't be read.
        obstore.exceptions.BaseError: When obstore refuses the settings.
    """
    kind = KINDS[scheme]
    if not holder:
        raise ValueError(f"it names no {kind.holder}")
    for name in kind.endpoints:  # check the URL here: on a malformed one, the client panics, which is not an Exception
        if not re.fullmatch(r"(https?://[^\s/]+(/\S*)?)?", os.environ.get(name, "")):
            raise ValueError(f"{name} is {os.environ[name]!r}, which is not an http:// or https:// URL")
    return kind.open(holder, prefix, client_options(), retry)


def aws_profile(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the static keys and the region of the current profile in AWS's files.

    The result is empty if the environment variables contain credentials.
    """
    if any(name in environment for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")):
        return {}
    home = Path(environment.get("HOME", "/")) / ".aws"
    files = configparser.RawConfigParser()
    files.read(
        [
            environment.get("AWS_CONFIG_FILE", home / "config"),
            environment.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"),
        ]
    )
    profile = environment.get("AWS_PROFILE", "default")
    settings: dict[str, str] = {}
    for section in (f"profile {profile}", profile):
        if files.has_section(section):
            settings |= dict(files.items(section))
    option_names = {
        "access_key_id": "aws_access_key_id",
        "secret_access_key": "aws_secret_access_key",
        "session_token": "aws_session_token",
        "region": "region",
    }
    return {key: settings[name] for key, name in option_names.items() if name in settings}

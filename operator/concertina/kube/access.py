"""Address and credentials of the API server: from KUBECONFIG, the pod's service account, or ~/.kube/config.

The library kubernetes.aio loads the credentials (exec plugins, OIDC, renewed tokens). Only an operator that runs in a
pod reads its service account without this library (watch/service_account.py). client.py sends the requests.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import Any

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NoAccess(Exception):
    """Error: there is no usable configuration for the API server. The message names the source that was tried."""


class Access:
    """Address, certificates and credentials of one API server."""

    def __init__(self, configuration: Any, namespace: str, reload: Any) -> None:
        self._configuration = configuration
        self._reload = reload
        self._lock = asyncio.Lock()
        self.namespace = namespace
        """Default namespace: that of the kubeconfig's context or of the pod; `default` if neither names one."""

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    @property
    def ca_file(self) -> str | None:
        return self._configuration.ssl_ca_cert or None

    @property
    def certificate(self) -> tuple[str, str | None] | None:
        """Files of the client certificate and of its key; None if there is no certificate."""
        configuration = self._configuration
        return (configuration.cert_file, configuration.key_file) if configuration.cert_file else None

    @property
    def verify(self) -> bool:
        return bool(self._configuration.verify_ssl)

    @property
    def server_name(self) -> str | None:
        return self._configuration.tls_server_name or None

    @property
    def proxy(self) -> str | None:
        return self._configuration.proxy or None

    async def authorization(self) -> str:
        """Return the value of the Authorization header, or "" if the client authenticates with a certificate only.

        Tokens that expire are renewed when needed.
        """
        return await self._configuration.get_api_key_with_prefix("BearerToken") or ""

    async def renew(self, refused: str) -> None:
        """Read the credentials again after the API server refused a request that used the credentials `refused`.

        If several requests were refused with the same credentials, the credentials are read only once.
        """
        async with self._lock:
            if await self.authorization() == refused:
                await self._reload(self._configuration)

    def ssl_context(self) -> ssl.SSLContext:
        """Return the TLS context for connections to the API server."""
        context = ssl.create_default_context(cafile=self.ca_file)
        # Kubernetes' own test CAs and many others lack the key identifiers that Python 3.13 requires.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            context.load_cert_chain(*self.certificate)
        return context


async def load(kubeconfig: str | None = None, context: str | None = None) -> Access:
    """Return the address and credentials of the API server from the first source that exists.

    The sources are, in this order: `kubeconfig`, KUBECONFIG, the pod's service account, and ~/.kube/config.

    Raises:
        NoAccess: When there is no usable configuration.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG") or ""
    file = _expanded(path or "~/.kube/config")
    os.environ.setdefault("HOME", "/")  # the import below reads HOME, which is not set for a user without a name
    try:
        from kubernetes.aio import client, config  # the import takes 1 s, so it is done only if a cluster is used
    except ImportError as error:
        raise NoAccess(
            "This operator has no client library to read a kubeconfig with, and does not run in a pod. To run "
            "it outside of its cluster: pip install 'concertina-operator[kubeconfig]'"
        ) from error

    configuration = client.Configuration()
    if not path and os.environ.get("KUBERNETES_SERVICE_HOST"):

        async def in_cluster(target: Any) -> None:
            config.load_incluster_config(target)  # type: ignore[no-untyped-call]

        try:
            await in_cluster(configuration)
        except config.ConfigException as error:
            raise NoAccess(f"This pod's service account can't be used: {error}") from error
        return Access(configuration, _pod_namespace(), in_cluster)

    async def from_file(target: Any) -> Any:
        return await config.load_kube_config(file, context, target, persist_config=False)  # type: ignore[no-untyped-call]

    try:
        loader = await from_file(configuration)
        context_of_file: dict[str, Any] = loader.current_context["context"]
        return Access(configuration, str(context_of_file.get("namespace") or "default"), from_file)
    except Exception as error:  # the loader has no error of its own for most invalid files
        raise NoAccess(
            f"There is no cluster to connect to: {file} can't be used ({str(error)[:400]}). Set KUBECONFIG, or "
            "start a local cluster with `concertina local up`."
        ) from error


def _pod_namespace() -> str:
    try:
        return _POD_NAMESPACE.read_text().strip()
    except OSError:
        return "default"


def _expanded(path: str) -> str:
    return os.path.expanduser(path)  # leaves ~ unchanged when there is no home directory

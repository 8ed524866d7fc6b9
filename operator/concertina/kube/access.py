"""How to reach the API server: KUBECONFIG, the service account of the pod, or ~/.kube/config.

The loading is kubernetes.aio's (exec plugins, OIDC, tokens that are renewed); the requests are our own, see client.py.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import Any

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NoAccess(Exception):
    """No usable configuration; the sentence says what was tried."""


class Access:
    """Address, certificates and credentials of one API server."""

    def __init__(self, configuration: Any, namespace: str, reload: Any) -> None:
        self._configuration = configuration
        self._reload = reload
        self._lock = asyncio.Lock()
        self.namespace = namespace
        """Of the kubeconfig's context or the pod; `default` where none is named."""

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    @property
    def ca_file(self) -> str | None:
        return self._configuration.ssl_ca_cert or None

    @property
    def certificate(self) -> tuple[str, str | None] | None:
        """Files of the client certificate and its key."""
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
        """The Authorization header, empty where a certificate is all there is. Renewed by its source when it is due."""
        return await self._configuration.get_api_key_with_prefix("BearerToken") or ""

    async def renew(self, refused: str) -> None:
        """Read the credentials again, once for all that were refused with the same ones."""
        async with self._lock:
            if await self.authorization() == refused:
                await self._reload(self._configuration)

    def ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        # Kubernetes' own test CAs and many in the field lack the key identifiers that Python 3.13 insists on.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            context.load_cert_chain(*self.certificate)
        return context


async def load(kubeconfig: str | None = None, context: str | None = None) -> Access:
    """The access that `kubeconfig`, KUBECONFIG, the pod's service account or ~/.kube/config gives, in this order."""
    path = kubeconfig or os.environ.get("KUBECONFIG") or ""
    file = _expanded(path or "~/.kube/config")
    os.environ.setdefault("HOME", "/")  # the import below asks for it, and a user without a name has none
    from kubernetes.aio import client, config  # 1 s of imports: only when a cluster is really talked to

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
    except Exception as error:  # the loader has no error of its own for most of what a file may hold
        raise NoAccess(
            f"No cluster to talk to: {file} can't be used ({str(error)[:400]}). Set KUBECONFIG, or start a local "
            "cluster with `concertina local up`."
        ) from error


def _pod_namespace() -> str:
    try:
        return _POD_NAMESPACE.read_text().strip()
    except OSError:
        return "default"


def _expanded(path: str) -> str:
    return os.path.expanduser(path)  # which leaves ~ as it is where there is no home

"""Credentials for an operator in a pod: the pod's service account, read by kopf.

The Kubernetes client library takes 126 MB, twice as much as everything else in the operator's image. An operator in a
pod needs only three files, which kopf can read (decision "The operator logs in by kopf").
"""

from __future__ import annotations

import os
import time

from concertina.kube.access import Access, NoAccess, load
from concertina.kube.watch.kopf_import import kopf

READ_AGAIN_SECONDS = 60.0
"""Seconds after which the token is read again. The kubelet replaces the token before it expires."""


class ServiceAccount:
    """Credentials of the pod's service account, in the form that `Access` needs."""

    cert_file: str | None = None
    key_file: str | None = None
    verify_ssl = True
    tls_server_name: str | None = None
    proxy: str | None = None

    def __init__(self) -> None:
        """Read the token, the CA and the namespace of the pod's service account.

        Raises:
            NoAccess: When the pod has no service account token.
        """
        self.namespace = "default"
        self.read()

    def read(self) -> None:
        """Read the token, the path of the CA and the namespace again. The kubelet may have replaced them.

        Raises:
            NoAccess: When the pod has no service account token.
        """
        login = kopf.login_with_service_account(settings=kopf.OperatorSettings())
        if login is None or not login.token:
            raise NoAccess("This pod has no token of a service account: set automountServiceAccountToken to true.")
        self.host = _address()
        self.ssl_ca_cert = login.ca_path
        self.namespace = login.default_namespace or "default"
        self._token = login.token
        self._read_at = time.monotonic()

    async def get_api_key_with_prefix(self, identifier: str) -> str:
        """Return the value of the Authorization header.

        `identifier` is unused. It exists because the client library's method of this name has the parameter.
        """
        if time.monotonic() - self._read_at >= READ_AGAIN_SECONDS:
            self.read()
        return f"Bearer {self._token}"


def _address() -> str:
    """Return the API server's address from the pod's environment variables.

    kopf would use a host name instead, which needs the cluster's DNS.
    """
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


async def operator_access() -> Access:
    """Return the address and credentials of the API server for a program in the operator's image.

    In a pod this is the pod's service account, because the image has no client library. Outside of a cluster, or with
    KUBECONFIG, the client library reads the kubeconfig.

    Raises:
        NoAccess: When the pod has no token of a service account, or the kubeconfig cannot be used.
    """
    if os.environ.get("KUBECONFIG") or not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return await load()
    account = ServiceAccount()

    async def reload(_: object) -> None:
        account.read()

    return Access(account, account.namespace, reload)

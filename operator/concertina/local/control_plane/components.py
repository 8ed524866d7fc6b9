"""Files and command lines of etcd, kube-apiserver, kube-controller-manager and kube-scheduler as processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from concertina.local.control_plane import certificates

SERVICE_RANGE = "10.96.0.0/16"
# Not used, because no endpoints are reconciled. Without it, the API server would look for a route to the internet.
_ADVERTISED = "192.0.2.1"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True)
class Endpoints:
    """Addresses of the control plane: a loopback address that only this cluster uses, and free ports."""

    address: str
    api: int
    etcd: int
    etcd_peer: int

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.api}"

    def ports(self, component: str) -> tuple[int, ...]:
        """Return the ports on which a component listens."""
        return {"kube-apiserver": (self.api,), "etcd": (self.etcd, self.etcd_peer)}.get(component, ())


@dataclass(frozen=True)
class OffByDefault:
    """Kubernetes features that the local cluster switches on although Kubernetes does not enable them by default."""

    feature_gates: tuple[str, ...] = ()
    api: str = ""
    """API version to serve, as group/version."""
    admission: str = ""
    """Name of an admission plugin to enable."""


def write_files(directory: Path, endpoints: Endpoints) -> None:
    """Write the certificates, keys and kubeconfigs of all components, and the administrator's kubeconfig."""
    pki = directory / "pki"
    authority = certificates.ClusterAuthority.create(pki)
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += ["kubernetes.default.svc.cluster.local", endpoints.address, "127.0.0.1", "::1", "10.96.0.1"]
    authority.issue("apiserver", "kube-apiserver", hosts=names)
    authority.issue("kubelet-client", "kube-apiserver-kubelet-client", ["system:masters"])
    authority.issue("etcd", "etcd", hosts=[endpoints.address])
    authority.issue("etcd-client", "kube-apiserver-etcd-client")
    certificates.service_account_key(pki)
    for component in ("kube-controller-manager", "kube-scheduler"):
        authority.kubeconfig(pki / f"{component}.kubeconfig", endpoints.server, f"system:{component}")
    authority.kubeconfig(pki / "kubeconfig", endpoints.server, "admin", ["system:masters"])
    (pki / "kubeconfig").replace(directory / "kubeconfig")


def commands(
    directory: Path, endpoints: Endpoints, binaries: Mapping[str, Path], turned_on: OffByDefault
) -> dict[str, list[str]]:
    """Return the command lines of the control plane's components, keyed by the component's name."""
    named_gates = ",".join(f"{gate}=true" for gate in turned_on.feature_gates)
    gates = {"feature-gates": named_gates} if named_gates else {}
    api = {"runtime-config": f"{turned_on.api}=true"} if turned_on.api else {}
    admission = {"enable-admission-plugins": turned_on.admission} if turned_on.admission else {}
    flags = {
        "etcd": _etcd(directory, endpoints),
        "kube-apiserver": _apiserver(directory, endpoints) | gates | api | admission,
        "kube-controller-manager": _controller_manager(directory) | gates,
        "kube-scheduler": _scheduler(directory) | gates,
    }
    return {
        name: [str(binaries[name]), *(f"--{flag}={value}" for flag, value in flags[name].items())]
        for name in COMPONENTS
    }


def _etcd(directory: Path, endpoints: Endpoints) -> dict[str, object]:
    client = f"https://{endpoints.address}:{endpoints.etcd}"
    peer = f"https://{endpoints.address}:{endpoints.etcd_peer}"
    pki = directory / "pki"
    # A client that can write to etcd is an administrator, and all users of the machine can reach its loopback
    # addresses.
    tls = {
        "cert-file": pki / "etcd.crt",
        "key-file": pki / "etcd.key",
        "trusted-ca-file": pki / "ca.crt",
        "client-cert-auth": "true",
    }
    return {
        **tls,
        **{f"peer-{flag}": value for flag, value in tls.items()},
        "data-dir": directory / "etcd",
        "unsafe-no-fsync": "true",
        "log-level": "error",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
    }


def _apiserver(directory: Path, endpoints: Endpoints) -> dict[str, object]:
    pki = directory / "pki"
    return {
        "etcd-servers": f"https://{endpoints.address}:{endpoints.etcd}",
        "etcd-cafile": pki / "ca.crt",
        "etcd-certfile": pki / "etcd-client.crt",
        "etcd-keyfile": pki / "etcd-client.key",
        "bind-address": endpoints.address,
        "secure-port": endpoints.api,
        "advertise-address": _ADVERTISED,
        "endpoint-reconciler-type": "none",
        "service-cluster-ip-range": SERVICE_RANGE,
        "cert-dir": pki,
        "tls-cert-file": pki / "apiserver.crt",
        "tls-private-key-file": pki / "apiserver.key",
        "client-ca-file": pki / "ca.crt",
        "authorization-mode": "RBAC",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": pki / "service-account.pub",
        "service-account-signing-key-file": pki / "service-account.key",
        "kubelet-certificate-authority": pki / "ca.crt",
        "kubelet-client-certificate": pki / "kubelet-client.crt",
        "kubelet-client-key": pki / "kubelet-client.key",
        "kubelet-preferred-address-types": "InternalIP",
        "allow-privileged": "true",
        "profiling": "false",
    }


def _controller_manager(directory: Path) -> dict[str, object]:
    pki = directory / "pki"
    return {
        "kubeconfig": pki / "kube-controller-manager.kubeconfig",
        "authentication-kubeconfig": pki / "kube-controller-manager.kubeconfig",
        "authorization-kubeconfig": pki / "kube-controller-manager.kubeconfig",
        "use-service-account-credentials": "true",
        "service-account-private-key-file": pki / "service-account.key",
        "root-ca-file": pki / "ca.crt",
        "leader-elect": "false",
        "secure-port": 0,
        # Seconds without a sign of life after which a node is NotReady; the default of 50 s would delay tests.
        "node-monitor-grace-period": "8s",
        "node-monitor-period": "1s",
        # Interval of the autoscaler; the default of 15 s would delay tests.
        "horizontal-pod-autoscaler-sync-period": "2s",
        # The controller manager sends many requests at its start, which the default of 20 per second would delay by 4
        # s.
        "kube-api-qps": 500,
        "kube-api-burst": 1000,
        "profiling": "false",
    }


def _scheduler(directory: Path) -> dict[str, object]:
    kubeconfig = directory / "pki" / "kube-scheduler.kubeconfig"
    return {
        "kubeconfig": kubeconfig,
        "authentication-kubeconfig": kubeconfig,
        "authorization-kubeconfig": kubeconfig,
        "leader-elect": "false",
        "secure-port": 0,
        "profiling": "false",
    }

"""A platform team's first day: install, upgrade, two teams with quotas, preemption, a drain, restarts, uninstall.

It begins on a cluster without concertina and without Kueue, and leaves it so.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from builders.cluster import drills, e2e
from builders.cluster import kueue as kueue_builder
from builders.cluster.kueue import Kueue
from builders.cluster.platform import GIVE_UP, GPU, HIGH, QUOTAS, Platform, Release
from builders.cluster.queues import KUEUE, evicted, shrunk
from builders.cluster.quota_use import QuotaUse
from builders.until import until

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
pytestmark = kueue_builder.needed
ALL = sum(QUOTAS.values())
ELASTIC: Object = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 0}}
SHORT = [("blue", f"blue-{number}") for number in range(4)] + [("red", f"red-{number}") for number in range(3)]
"""Team and name of the jobs of one replica that end by themselves. With `base`, `high` and `rush` there are ten
jobs."""


@pytest.fixture
def platform() -> Platform:
    kubeconfig, shared = os.environ.get("KUBECONFIG", ""), e2e.setting("SHARED")
    if not e2e.setting("RUN") or not kubeconfig:
        pytest.skip("end-to-end tests need a cluster: `KUBECONFIG=... make test-e2e` (docs/e2e.md says the rest)")
    if not shared:
        pytest.skip("set CONCERTINA_E2E_SHARED to a folder that this machine and all nodes see")
    reached = Platform(Path(kubeconfig), Path(shared))
    if reached.exists("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.concertina.dev"):
        pytest.skip("concertina's CRD is there already: the first day begins on a cluster without it")
    return reached


@pytest.fixture
def before() -> Release:
    """Return the release that is upgraded."""
    checkout, tag = e2e.setting("BEFORE_CHECKOUT"), e2e.setting("BEFORE_TAG")
    if not checkout or not tag:
        pytest.skip("set CONCERTINA_E2E_BEFORE_CHECKOUT and _BEFORE_TAG to a checkout and the tag of its images")
    return Release(Path(checkout), tag)


@pytest.fixture
def kueue(platform: Platform, tmp_path: Path) -> Kueue:
    """Return Kueue, which is not started yet."""
    return Kueue(platform.kubeconfig, platform.client, tmp_path)


@dataclass
class Moments:
    """Times at which a job's Workloads first had certain states, and what the test does then."""

    job: str
    states: dict[str, Callable[[Object], bool]]
    actions: dict[str, Callable[[], object]] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    """Monotonic seconds by the name of a state."""
    done: set[str] = field(default_factory=set)

    def hear(self, event: Object) -> None:
        """Take a watch event."""
        item = event["object"]
        if any(owner["name"] == self.job for owner in item["metadata"].get("ownerReferences", ())):
            for name, state in self.states.items():
                if name not in self.seen and state(item):
                    self.seen[name] = time.monotonic()

    def act(self) -> bool:
        """Do what is due, and return whether all is done."""
        for name in [name for name in self.seen if name not in self.done]:
            self.done.add(name)
            self.actions.get(name, lambda: None)()
        return self.done >= self.states.keys()


class Day:
    """Steps of the day, with their figures."""

    def __init__(self, platform: Platform, kueue: Kueue, config: pytest.Config) -> None:
        self.platform, self.kueue, self.config = platform, kueue, config

    def keep(self, what: str, *figures: str) -> None:
        drills.keep(self.config, f"first day: {what}", *figures)

    def unharmed(self, team: str, name: str) -> None:
        """Check that no step was trained twice, and that nothing counts as a failure."""
        status = self.platform.status(team, name)
        assert status.get("stepsReplayed", 0) == 0, status
        assert status.get("restarts", {}).get("inWindow", 0) == 0, status

    def upgrade(self, before: Release, now: Release) -> None:
        """Upgrade while a job without a queue trains: it stays in its round."""
        self.platform.install(before)
        self.platform.create("red", "yesterday", replicas=2, queue="")
        old = self.platform.trains("red", "yesterday", 2)
        begun = time.monotonic()
        self.platform.install(now)
        # The new operator acts once it is connected to the job's coordinator.
        self.platform.until("red", "yesterday", "progress", lambda status: _step(status) > _step(old) + 20)
        assert self.platform.trains("red", "yesterday", 2)["world"]["round"] == old["world"]["round"]
        self.unharmed("red", "yesterday")
        self.keep("upgrade", f"{time.monotonic() - begun:.1f} s, same round")

    def ten_jobs(self) -> None:
        """Let short jobs of both teams have their turns: the elastic job shrinks and grows back."""
        self.platform.create("red", "base", ALL, elastic=ELASTIC)
        whole = self.platform.trains("red", "base", ALL)
        begun = time.monotonic()
        for team, name in SHORT:
            self.platform.create(team, name, trainer={"steps": 30})
        for team, name in SHORT:
            self.platform.until(team, name, "the end", lambda status: _is_true(status, "Complete"))
        self.platform.trains("red", "base", ALL, whole["world"]["round"])
        self.unharmed("red", "base")
        self.keep("seven short jobs", f"{time.monotonic() - begun:.1f} s until the elastic job is whole again")

    def preemption(self) -> None:
        """Play 4 -> 1 -> 4."""
        self._preempt("high", {}, lambda: None)

    def preemption_with_restarts(self) -> None:
        """Play it with Kueue killed as it evicts, the operator as it has shrunk the Workload, and a node drained."""
        actions = {"evicted": self._restart_kueue, "shrunk": self.platform.kill_operator}
        self._preempt("rush", actions, self._drain)

    def _restart_kueue(self) -> None:
        self.kueue.end()
        time.sleep(3)  # Meanwhile all writes to Workloads are refused.
        self.kueue.start()

    def _preempt(self, name: str, actions: dict[str, Callable[[], object]], meanwhile: Callable[[], None]) -> None:
        before = self.platform.status("red", "base")
        moments = Moments("base", {"evicted": evicted, "shrunk": functools.partial(shrunk, full=ALL)}, actions)
        with self.platform.client.watching(f"{KUEUE}/namespaces/red/workloads", moments.hear):
            begun = time.monotonic()
            self.platform.create("red", name, ALL - 1, priority=HIGH)
            until(moments.act, "an eviction and a smaller Workload", lambda: moments.seen, GIVE_UP, pause=0.01)
            high = self.platform.trains("red", name, ALL - 1)
            first_step = time.monotonic() - begun
        small = self.platform.trains("red", "base", 1, before["world"]["round"])
        self.unharmed("red", "base")
        figures = [f"{moment} after {at - begun:.1f} s" for moment, at in moments.seen.items()]
        self.keep(f"{name} preempts", *figures, f"first step after {first_step:.1f} s")
        meanwhile()
        after = self.platform.trains("red", name, ALL - 1)
        self.unharmed("red", name)
        assert _step(after) > _step(high)
        begun = time.monotonic()
        self.platform.delete("red", name)
        self.platform.trains("red", "base", ALL, small["world"]["round"])
        self.unharmed("red", "base")
        self.keep(f"{name} ends", f"{ALL} replicas train after {time.monotonic() - begun:.1f} s")

    def _drain(self) -> None:
        """Drain the node of the one replica that was left."""
        (pod,) = self.platform.pods("red", "base")
        node, before = pod["spec"]["nodeName"], self.platform.status("red", "base")
        begun = time.monotonic()
        self.platform.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=200s")
        try:
            after = self.platform.trains("red", "base", 1, before["world"]["round"])
            assert _step(after) > _step(before)
            self.unharmed("red", "base")
            (moved,) = self.platform.pods("red", "base")
            assert moved["spec"]["nodeName"] != node
            self.keep("drain of its last replica", f"a step on another node after {time.monotonic() - begun:.1f} s")
        finally:
            self.platform.kubectl("uncordon", node)

    def uninstall(self, now: Release) -> None:
        self.unharmed("red", "yesterday")
        self.platform.uninstall(now)
        self.platform.remove_kueue()
        self.kueue.unregister_webhooks()


@pytest.fixture
def day(platform: Platform, kueue: Kueue, request: pytest.FixtureRequest) -> Iterator[Day]:
    yield Day(platform, kueue, request.config)
    kueue.unregister_webhooks()  # The webhooks refuse all pods once Kueue is gone.
    if kueue.process and kueue.process.poll() is None:
        kueue.end()


@pytest.mark.timeout(2400)
def test_a_first_day(platform: Platform, before: Release, day: Day) -> None:
    """No step is lost, no GPU is lent twice, and nothing is left behind."""
    now = Release(ROOT, e2e.TAG)
    (platform.shared / "data").mkdir(exist_ok=True)
    drills.build_data(str(platform.shared / "data"), {})
    empty = platform.inventory()
    platform.create_namespaces()
    day.upgrade(before, now)
    day.kueue.install()
    day.kueue.start()
    day.kueue.register_webhooks()
    platform.create_queues()
    use = QuotaUse(platform.client, GPU)
    with use.recording():
        day.ten_jobs()
        day.preemption()
        day.preemption_with_restarts()
        day.uninstall(now)
    assert not (breaches := use.breaches(list(QUOTAS), Decimal(ALL))), breaches[:10]
    left = {entry for entry in platform.inventory() - empty if not _of_a_namespace(entry)}
    assert not left, sorted(left)
    platform.kubectl("delete", "namespace", *QUOTAS)


def _step(status: Object) -> int:
    return int(status.get("progress", {}).get("step", 0))


def _is_true(status: Object, kind: str) -> bool:
    return bool(e2e.condition(status, kind)["status"] == "True")


def _of_a_namespace(entry: str) -> bool:
    """Return whether the object is a team's namespace, or what Kubernetes itself creates in one."""
    made = {f"Namespace//{team}" for team in QUOTAS}
    made |= {f"{kind}/{team}/{name}" for team in QUOTAS for kind, name in OF_EACH_NAMESPACE}
    return entry in made


OF_EACH_NAMESPACE = (("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt"))

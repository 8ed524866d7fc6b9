"""The operator with the real Kueue: two teams share a quota, and elastic jobs shrink instead of being killed."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from builders.cluster import kueue as kueue_builder
from builders.cluster.kueue import Kueue
from builders.cluster.operator_process import Operator
from builders.cluster.queued import ELASTIC, QueuedJobs
from builders.cluster.queues import KUEUE, condition, evicted, is_true, shrunk
from builders.until import until

LAW = "tests/unit/repository/test_kueue_recordings.py::test_no_quota_is_reserved_twice"
pytestmark = [kueue_builder.needed, pytest.mark.long(law=LAW), pytest.mark.usefixtures("kueue", "operator")]
Object = dict[str, Any]
TAINT = {"key": "pool", "value": "spot", "effect": "NoSchedule"}


def unharmed(job: Object) -> None:
    """Check that no step was lost, and that nothing counts as a failure."""
    status = job["status"]
    assert status.get("stepsReplayed", 0) == 0, status["world"]
    assert status.get("restarts", {}).get("inWindow", 0) == 0, status["restarts"]


def one_queue(queued: QueuedJobs, units: int = 4) -> str:
    """Create the LocalQueue `team`, and return its ClusterQueue."""
    queued.create_flavor()
    queued.create_priority()
    return queued.create_queue("team", units)


@pytest.fixture
def spot(queued: QueuedJobs) -> Iterator[str]:
    """Yield a node that only pods of a flavor may use."""
    kubectl = queued.jobs.cluster.kubectl
    node = str(queued.jobs.cluster.nodes()[0])
    kubectl("label", "node", node, "pool=spot")
    kubectl("taint", "node", node, "pool=spot:NoSchedule")
    yield node
    kubectl("taint", "node", node, "pool-")
    kubectl("label", "node", node, "pool-")


def test_a_job_is_admitted_trains_and_ends(queued: QueuedJobs, spot: str) -> None:
    """The job's pods are on the flavor's nodes, and its Workload says that they are ready."""
    queued.create_flavor({"pool": "spot"}, **TAINT)
    shared = queued.create_queue("team", 4)
    queued.create("a", "team", 2)
    job = queued.wait_trains("a", 2)
    assert job["status"]["queue"]["name"] == "team"
    assert job["status"]["queue"]["clusterQueue"] == shared
    for pod in queued.jobs.pods("a"):
        assert pod["spec"]["nodeSelector"]["pool"] == "spot"
        assert pod["spec"]["nodeName"] == spot
        assert any(TAINT.items() <= toleration.items() for toleration in pod["spec"]["tolerations"])
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/cluster-queue-name"] == shared
    until(lambda: is_true(queued.current("a"), "PodsReady"), "PodsReady", lambda: queued.describe("a"))
    assert not queued.jobs.get("a")["spec"]["suspend"]
    queued.jobs.delete("a")
    queued.wait_no_workloads("a")


def test_a_job_that_completes_finishes_its_workload(queued: QueuedJobs) -> None:
    one_queue(queued)
    queued.create("a", "team", 2, steps=20)
    queued.jobs.wait_true("a", "Complete")
    until(lambda: all(is_true(item, "Finished") for item in queued.workloads("a")), "the Workload's end")
    assert condition(queued.workloads("a")[-1], "Finished")["reason"] == "Succeeded"
    assert queued.lent("a") == 0


def test_a_job_waits_without_pods_until_there_is_quota(queued: QueuedJobs) -> None:
    """The job waits at its full size, because it has no minimum."""
    shared = one_queue(queued, 2)
    queued.create("a", "team", 3)
    queued.jobs.wait_reason("a", "Queued")
    queued.jobs.wait("a", lambda job: "insufficient" in queued.jobs.condition(job, "Ready")["message"])
    for _ in range(20):
        assert not queued.jobs.pods("a")
        time.sleep(0.1)
    queued.set_quota(shared, 4)
    queued.quota *= 2
    queued.wait_trains("a", 3)


def test_a_job_without_a_label_does_not_use_the_default_queue_twice(queued: QueuedJobs) -> None:
    """Kueue's pod integration queues each pod of a job without the label, where a LocalQueue `default` exists."""
    queued.create_flavor()
    queued.create_queue("default", 4)
    queued.create("a", "", 2)
    time.sleep(5)
    names = [owner["kind"] for item in queued.workloads() for owner in item["metadata"].get("ownerReferences", ())]
    assert "Pod" not in names, names


def test_an_elastic_job_starts_smaller_and_grows(queued: QueuedJobs) -> None:
    one_queue(queued)
    queued.create("b", "team", 2)
    queued.wait_trains("b", 2)
    queued.create("a", "team", 4, elastic=ELASTIC)
    smaller = queued.wait_trains("a", 2)
    queued.jobs.delete("b")
    grown = queued.wait_trains("a", 4, smaller["status"]["world"]["round"])
    unharmed(grown)
    queued.wait_lent("a", 4)


def preempted(queued: QueuedJobs, **elastic: Any) -> Object:
    """Let four replicas train and a job of high priority ask for three. Return the job that is evicted."""
    one_queue(queued)
    queued.create("a", "team", 4, elastic=ELASTIC | elastic)
    job = queued.wait_trains("a", 4)
    queued.create("high", "team", 3, queued.priority)
    queued.wait_evicted("a")
    return job


def shrinks_and_grows_back(queued: QueuedJobs, before: Object) -> None:
    """Check that the job shrinks and grows, 4 -> 1 -> 4, without losing a step. The seconds are printed."""
    begun = time.monotonic()
    small = queued.wait_trains("a", 1, before["status"]["world"]["round"])
    queued.wait_trains("high", 3)
    print(f"from eviction to a step of the preemptor: {time.monotonic() - begun:.1f} s")
    queued.wait_lent("a", 1)
    unharmed(queued.jobs.get("a"))
    assert small["status"]["progress"]["step"] >= before["status"]["progress"]["step"]
    queued.jobs.delete("high")
    begun = time.monotonic()
    grown = queued.wait_trains("a", 4, small["status"]["world"]["round"])
    print(f"from the preemptor's deletion to a step of all four: {time.monotonic() - begun:.1f} s")
    unharmed(grown)
    queued.wait_lent("a", 4)
    # The operator deletes slices that were replaced.
    until(lambda: len(queued.workloads("a")) == 1, "one Workload", lambda: queued.describe("a"))


def test_a_preempted_job_shrinks_and_grows_back(queued: QueuedJobs) -> None:
    shrinks_and_grows_back(queued, preempted(queued))


def test_a_preempted_job_is_suspended_when_it_wants_that(queued: QueuedJobs) -> None:
    """With `onPreemption: Suspend`, all pods of the job are deleted, and it waits in the queue."""
    before = preempted(queued, onPreemption="Suspend")
    queued.wait_trains("high", 3)
    until(lambda: not queued.jobs.pods("a") or queued.lent("a") == 1, "room", lambda: queued.describe("a"))
    queued.jobs.delete("high")
    queued.wait_trains("a", 4, before["status"]["world"]["round"])


def test_a_preemptor_that_needs_all_suspends_the_job(queued: QueuedJobs) -> None:
    one_queue(queued)
    queued.create("a", "team", 4, elastic=ELASTIC)
    before = queued.wait_trains("a", 4)
    queued.create("high", "team", 4, queued.priority)
    queued.wait_trains("high", 4)
    queued.jobs.wait_reason("a", "Queued")
    assert not queued.jobs.pods("a")
    queued.jobs.delete("high")
    queued.wait_trains("a", 4, before["status"]["world"]["round"])


def test_a_team_reclaims_what_another_one_borrowed(queued: QueuedJobs) -> None:
    """Both jobs train meanwhile, and the borrower grows again when the other team's job has ended."""
    queued.create_flavor()
    for team in ("red", "blue"):
        queued.create_queue(team, 2, cohortName=queued.namespace)
    queued.create("a", "red", 4, elastic=ELASTIC)
    before = queued.wait_trains("a", 4)
    queued.create("b", "blue", 2)
    queued.wait_trains("b", 2)
    smaller = queued.wait_trains("a", 2, before["status"]["world"]["round"])
    unharmed(smaller)
    message = queued.jobs.condition(queued.jobs.get("a"), "Ready").get("message", "")
    assert queued.current("b")["metadata"]["uid"] not in message, "the message names another team's object"
    queued.jobs.delete("b")
    unharmed(queued.wait_trains("a", 4, smaller["status"]["world"]["round"]))


def test_a_suspended_job_gives_its_quota_back(queued: QueuedJobs) -> None:
    one_queue(queued)
    queued.create("a", "team", 4)
    queued.wait_trains("a", 4)
    queued.create("b", "team", 4)
    queued.jobs.wait_reason("b", "Queued")
    queued.jobs.patch("a", {"suspend": True})
    queued.jobs.wait_true("a", "Suspended")
    queued.wait_trains("b", 4)
    queued.jobs.patch("a", {"suspend": False})
    queued.jobs.wait_reason("a", "Queued")
    queued.jobs.delete("b")
    queued.wait_trains("a", 4)


def test_a_stopped_queue_suspends_its_jobs(queued: QueuedJobs) -> None:
    shared = one_queue(queued)
    queued.create("a", "team", 2, elastic=ELASTIC)
    queued.wait_trains("a", 2)
    stop(queued, shared, "HoldAndDrain")
    until(lambda: not queued.jobs.pods("a"), "no pods", lambda: queued.describe("a"))
    queued.wait_lent("a", 0)
    stop(queued, shared, "None")
    queued.wait_trains("a", 2)


def stop(queued: QueuedJobs, shared: str, policy: str) -> None:
    queued.client.call("PATCH", f"{KUEUE}/clusterqueues/{shared}", {"spec": {"stopPolicy": policy}})


def test_a_deleted_job_leaves_no_workload(queued: QueuedJobs) -> None:
    """The quota goes to another job only when the deleted job's pods are gone."""
    one_queue(queued)
    queued.create("a", "team", 4, elastic=ELASTIC)
    queued.wait_trains("a", 4)
    queued.create("b", "team", 4)
    queued.jobs.wait_reason("b", "Queued")
    queued.jobs.delete("a")
    queued.wait_no_workloads("a")
    queued.wait_trains("b", 4)


def test_kueue_restarts_while_a_job_shrinks(queued: QueuedJobs, kueue: Kueue) -> None:
    """Meanwhile all writes to Workloads are refused, and so are new pods."""
    before = preempted(queued)
    kueue.end()
    time.sleep(3)
    kueue.start()
    shrinks_and_grows_back(queued, before)


def replaced(item: Object) -> bool:
    return condition(item, "Finished").get("reason") == "WorkloadSliceReplaced"


@pytest.mark.parametrize(
    "moment", [evicted, functools.partial(shrunk, full=4), replaced], ids=["evicted", "shrunk", "replaced"]
)
def test_the_operator_is_killed_while_a_job_shrinks(
    queued: QueuedJobs, operator: Operator, moment: Callable[[Object], bool]
) -> None:
    """The operator is killed at the moment at which the Workload of `a` has that state."""
    one_queue(queued)
    queued.create("a", "team", 4, elastic=ELASTIC)
    before = queued.wait_trains("a", 4)
    killed: list[float] = []

    def watch(event: Object) -> None:
        owners = event["object"]["metadata"].get("ownerReferences", ())
        if not killed and any(owner["name"] == "a" for owner in owners) and moment(event["object"]):
            assert operator.process
            os.kill(operator.process.pid, signal.SIGKILL)
            killed.append(time.monotonic())

    with queued.client.watching(f"{KUEUE}/namespaces/{queued.namespace}/workloads", watch):
        queued.create("high", "team", 3, queued.priority)
        until(lambda: killed, "the moment", lambda: queued.describe("a"))
    assert operator.process
    operator.process.wait(30)
    operator.start()
    shrinks_and_grows_back(queued, before)


def test_a_loss_does_not_evict_a_job_that_trains_on(queued: QueuedJobs, kueue: Kueue) -> None:
    """Kueue evicts jobs whose pods are not ready again in time. An elastic job is ready with fewer pods."""
    kueue.end()
    kueue.configure(waitForPodsReady={"timeout": "60s", "recoveryTimeout": "3s"})
    kueue.start()
    try:
        one_queue(queued)
        queued.create("a", "team", 3, elastic=ELASTIC)
        job = queued.wait_trains("a", 3)
        queued.jobs.kill_pod(queued.jobs.members(job)[1])
        for _ in range(60):
            assert not any(is_true(item, "Evicted") for item in queued.workloads("a")), queued.describe("a")
            time.sleep(0.1)
        queued.wait_trains("a", 3, job["status"]["world"]["round"])
    finally:
        kueue.end()
        kueue.configure()
        kueue.start()


def test_what_people_see_names_no_other_job(queued: QueuedJobs) -> None:
    one_queue(queued)
    queued.create("first", "team", 4)
    queued.wait_trains("first", 4)
    queued.create("b", "team", 4)
    job = queued.jobs.wait_reason("b", "Queued")
    assert "first" not in json.dumps(job["status"])
    assert queued.jobs.get("first")["metadata"]["uid"] not in json.dumps(job["status"])

"""Operator's cache: the newest version of an object counts, whatever the order of arrival."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from concertina.agents.hearing import AgentConnectivityMonitor
from concertina.controller.cache import cluster_cache as cluster
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.status_patches import claim_tests
from concertina.kube.errors import NamespaceEnds, from_status
from concertina.kube.parse.refusals import refusal
from concertina.kube.parse.views import OwnedPod
from concertina.plan.lifecycle import line
from concertina.plan.observed import (
    AgentView,
    BlockedBy,
    CreateRefusal,
    NodeView,
    PodPhase,
    PodView,
    QueuePlace,
    Refusal,
)


class Known:
    def __init__(self) -> None:
        self.changed: list[str] = []
        self.cache = ClusterCache(self.changed.append, lambda uid: {})

    def heard(self) -> list[str]:
        names, self.changed[:] = sorted(set(self.changed)), []
        return names


def job(uid: str, version: int, uri: str = "", created: int = 0, namespace: str = "n", **status: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}},
    }
    if uri:
        spec["checkpoint"] = {"uri": uri}
    metadata = {
        "name": f"job-{uid}",
        "namespace": namespace,
        "uid": uid,
        "generation": 1,
        "resourceVersion": str(version),
        "creationTimestamp": f"2026-01-01T00:00:{created:02}Z",
    }
    return {"metadata": metadata, "spec": spec, "status": status}


def pod(name: str, job_uid: str, node: str = "", index: int = 0, attempt: int = 0, phase: str = "Pending",
        restarts: int = 0) -> OwnedPod:  # fmt: skip
    view = PodView(name, f"uid-{name}", index, attempt, 0.0, PodPhase(phase), False, node=node, restarts=restarts)
    return OwnedPod(job_uid, "n", view)


@pytest.mark.parametrize(
    ("manager", "is_served"),
    [(None, True), ("concertina.dev/operator", True), ("kueue.x-k8s.io/multikueue", False)],
)
def test_a_job_that_another_controller_manages_is_left_alone(manager: str | None, is_served: bool) -> None:
    known = Known()
    managed = job("a", 1)
    if manager is not None:
        managed["spec"]["managedBy"] = manager
    known.cache.on_job(managed)
    assert (known.cache.job("a") is not None) == is_served
    assert (known.cache.observe("a") is not None) == is_served


def test_an_older_word_than_the_answer_to_our_own_write_is_ignored() -> None:
    known = Known()
    known.cache.on_job(job("a", 10))
    known.heard()
    known.cache.on_job(job("a", 12, rounds=2))
    known.cache.on_job(job("a", 11, rounds=1))
    observed = known.cache.observe("a")
    assert observed is not None
    assert observed.job.status.rounds == 2
    assert known.heard() == ["a"]


def test_a_job_that_nobody_can_read_is_left_alone_and_the_others_are_known(caplog: pytest.LogCaptureFixture) -> None:
    known, bad = Known(), job("bad", 10)
    bad["metadata"]["creationTimestamp"] = "when"
    for each in (bad, job("a", 10)):
        known.cache.on_job(each)
    assert known.cache.job("bad") is None
    assert known.heard() == ["a"]
    assert "TrainingJob n/job-bad can't be read" in caplog.text
    changed = job("a", 11, rounds=2)
    changed["metadata"]["creationTimestamp"] = "when"
    known.cache.on_job(changed)
    observed = known.cache.observe("a")
    assert observed is not None
    assert observed.job.status.rounds == 0, "as it was last read"


def test_a_pod_of_another_namespace_is_none_of_a_jobs_whatever_it_says_of_its_owner() -> None:
    known = Known()
    stranger = replace(pod("a-0-0", "a"), namespace="other")
    known.cache.on_pod(None, stranger)
    known.cache.on_job(job("a", 10))
    known.heard()
    known.cache.on_pod(stranger, stranger)
    known.cache.on_pod(None, replace(pod("a-1-0", "a"), namespace="other"))
    observed = known.cache.observe("a")
    assert observed is not None
    assert observed.pods == ()
    assert known.heard() == []


def test_a_word_that_says_nothing_new_triggers_nothing() -> None:
    known = Known()
    known.cache.on_job(job("a", 10))
    known.heard()
    known.cache.on_job(job("a", 11))
    assert known.heard() == []


def test_numbers_that_this_operator_has_written_are_no_news_but_what_came_with_them_is() -> None:
    known = Known()
    known.cache.on_job(job("a", 10))
    known.heard()
    known.cache.on_job(job("a", 11, replicas=2), only_numbers=True)
    observed = known.cache.observe("a")
    assert observed is not None
    assert observed.job.status.replicas == 2
    assert known.heard() == []
    suspended = job("a", 12, replicas=3)
    suspended["metadata"]["generation"] = 2
    known.cache.on_job(suspended, only_numbers=True)
    assert known.heard() == ["a"]


def test_a_pod_that_only_starts_decides_nothing_before_the_first_round() -> None:
    urgent: list[str] = []
    little: list[str] = []
    cache = ClusterCache(urgent.append, lambda uid: {}, changed_a_little=little.append)

    def heard() -> tuple[set[str], set[str]]:
        both = set(urgent), set(little)
        urgent.clear()
        little.clear()
        return both

    cache.on_job(job("a", 1))
    heard()
    created, bound, running = pod("p", "a"), pod("p", "a", node="n1"), pod("p", "a", node="n1", phase="Running")
    waits = replace(bound, view=replace(bound.view, waiting="ErrImagePull"))
    another = replace(bound, view=replace(bound.view, uid="uid-of-another"))
    for old, new in ((None, created), (created, bound), (bound, bound)):
        cache.on_pod(old, new)
        assert heard() == (set(), {"a"})
    for old, new in (
        (bound, waits),
        (waits, bound),
        (bound, another),
        (another, bound),
        (bound, running),
        (running, None),
    ):
        cache.on_pod(old, new)
        assert heard()[0] == {"a"}, (old, new)
    cache.on_job(job("a", 2, world={"round": 1}))
    heard()
    cache.on_pod(None, created)
    assert heard() == ({"a"}, set())


def test_pods_are_found_by_their_owner_whichever_is_heard_first() -> None:
    known = Known()
    known.cache.on_pod(None, pod("late", "a", index=1))
    known.cache.on_job(job("a", 1))
    known.cache.on_pod(None, pod("new", "a", index=0, attempt=1))
    known.cache.on_pod(None, pod("old", "a", index=0))
    known.cache.on_pod(None, pod("other", "b"))
    observed = known.cache.observe("a")
    assert observed is not None
    assert [view.name for view in observed.pods] == ["old", "new", "late"]
    known.cache.on_pod(pod("old", "a"), pod("old", "a", phase="Running"))
    known.cache.on_pod(pod("new", "a", attempt=1), None)
    observed = known.cache.observe("a")
    assert observed is not None
    assert [(view.name, view.phase) for view in observed.pods] == [("old", "Running"), ("late", "Pending")]
    assert known.cache.observe("b") is None


def test_a_pod_that_has_lost_its_owner_is_none_of_the_jobs_any_more() -> None:
    """An owner reference is removed by hand, or by a deletion that orphans pods."""
    known = Known()
    known.cache.on_job(job("a", 1))
    known.cache.on_job(job("b", 1))
    owned, orphan, adopted = pod("a-0-0", "a"), pod("a-0-0", ""), pod("a-0-0", "b")

    def owners() -> list[str]:
        return [uid for uid in ("a", "b") if known.cache.observe(uid).pods]  # type: ignore[union-attr]

    known.cache.on_pod(None, owned)
    assert owners() == ["a"]
    known.heard()
    known.cache.on_pod(owned, orphan)
    assert owners() == []
    assert known.heard() == ["a"]
    known.cache.on_pod(orphan, adopted)
    assert owners() == ["b"]
    known.cache.on_pod(adopted, owned)
    assert owners() == ["a"]
    known.cache.forget_job("a")
    known.cache.on_pod(owned, orphan)
    known.cache.on_pod(orphan, None)
    assert known.cache._orphans == {}


def test_a_pod_that_no_pass_saw_going_is_seen_as_ended_until_one_has() -> None:
    known, torchrun = Known(), job("a", 1)
    torchrun["spec"]["launcher"] = "Torchrun"
    known.cache.on_job(torchrun)
    for name, index in (("gone", 0), ("seen-going", 1)):
        known.cache.on_pod(None, pod(name, "a", index=index, phase="Running"))

    def look(*, complete: bool = True) -> list[tuple[str, bool, bool]]:
        observed = known.cache.observe("a")
        assert observed is not None
        if complete:
            known.cache.planned("a", observed)
        return [(view.name, view.ended, view.deleting) for view in observed.pods]

    def going(name: str, index: int) -> OwnedPod:
        owned = pod(name, "a", index=index, phase="Running")
        return replace(owned, view=replace(owned.view, deleting=True))

    look()
    known.cache.on_pod(pod("seen-going", "a"), going("seen-going", 1))
    look()
    for name, index in (("gone", 0), ("seen-going", 1)):
        known.cache.on_pod(None, going(name, index))
        known.cache.on_pod(going(name, index), None)
    assert look(complete=False) == [("gone", True, True)]
    known.heard()
    assert look() == [("gone", True, True)], "the pass before was not complete"
    assert known.heard() == ["a"], "what comes without it"
    assert look() == []
    assert known.heard() == []


def test_a_pod_that_is_gone_makes_room_for_one_that_was_refused() -> None:
    known = Known()
    known.cache.on_job(job("a", 1))
    known.cache.on_pod(None, pod("of-another-job", "b"))
    known.cache.create_refused("a", Refusal.QUOTA, "exceeded quota")
    known.heard()
    assert known.cache.observe("a").refused.message == "exceeded quota"  # type: ignore[union-attr]
    known.cache.on_pod(pod("of-another-job", "b"), None)
    assert known.heard() == ["a"]
    assert known.cache.observe("a").refused is None  # type: ignore[union-attr]


def test_a_node_concerns_the_jobs_that_have_pods_on_it() -> None:
    known = Known()
    for uid, node in (("a", "x"), ("b", "y")):
        known.cache.on_job(job(uid, 1))
        known.cache.on_pod(None, pod(f"pod-{uid}", uid, node=node))
    known.heard()
    known.cache.on_node(None, NodeView("x", ready=False))
    assert known.heard() == ["a"]
    observed = known.cache.observe("a")
    assert observed is not None
    assert not observed.nodes["x"].ready
    known.cache.on_node(NodeView("x", ready=False), None)
    assert known.heard() == ["a"]


RUN = "s3://bucket/run"
BEGUN = {"world": {"round": 1, "claim": {"round": 1, "claimId": "c", "committed": True}}}


def holder(known: Known, uid: str) -> str:
    """Return the name of the job that has the folder of this one."""
    observed = known.cache.observe(uid)
    assert observed is not None
    return observed.uri_holder.name if observed.uri_holder else ""


def sharing(known: Known, uid: str) -> tuple[str, ...]:
    observed = known.cache.observe(uid)
    assert observed is not None
    return observed.uri_sharing


def with_volume(of: dict[str, Any], path: str, **source: Any) -> dict[str, Any]:
    """Add a volume at this path to the job's template."""
    pod_spec = of["spec"]["template"]["spec"]
    pod_spec["containers"][0]["volumeMounts"] = [{"name": "v", "mountPath": path}]
    pod_spec["volumes"] = [{"name": "v", **source}]
    return of


def claim_of(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}


def test_of_live_jobs_with_one_checkpoint_uri_the_oldest_that_has_begun_holds_it() -> None:
    known = Known()
    known.cache.on_job(job("young", 1, uri="s3://bucket//run/", created=9, **BEGUN))
    known.cache.on_job(job("old", 2, uri=RUN, created=3, **BEGUN))
    known.cache.on_job(job("other", 3, uri="s3://bucket/other", created=1, **BEGUN))
    assert holder(known, "young") == "n/job-old"
    assert holder(known, "old") == ""
    assert holder(known, "other") == ""
    known.heard()
    complete = {
        "type": "Complete", "status": "True", "reason": "R", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    known.cache.on_job(job("old", 4, uri=RUN, created=3, conditions=[complete], **BEGUN))
    assert known.heard() == ["old", "young"]
    assert holder(known, "young") == ""
    assert sharing(known, "young") == ()


def test_a_job_that_has_not_begun_keeps_nobody_from_its_checkpoint_uri() -> None:
    known = Known()
    known.cache.on_job(job("old", 1, uri=RUN, created=3))
    known.cache.on_job(job("young", 2, uri=RUN, created=9))
    assert (holder(known, "old"), holder(known, "young")) == ("", "")
    known.heard()
    known.cache.on_job(job("young", 3, uri=RUN, created=9, **BEGUN))
    assert known.heard() == ["old", "young"]
    assert (holder(known, "old"), holder(known, "young")) == ("n/job-young", "")


def test_jobs_of_two_namespaces_are_not_compared() -> None:
    known = Known()
    known.cache.on_job(job("old", 1, uri=RUN, created=3, namespace="team", **BEGUN))
    known.cache.on_job(job("young", 2, uri=RUN, created=9, **BEGUN))
    assert holder(known, "young") == ""
    assert sharing(known, "young") == ()


def test_one_uri_with_another_secret_or_volume_may_be_another_folder() -> None:
    """The store decides, by the uids of all live jobs that may use the folder."""
    known, path = Known(), "file:///checkpoints/run"
    with_secret = job("secret", 1, uri=RUN, created=3, **BEGUN)
    with_secret["spec"]["checkpoint"]["secretName"] = "minio"
    known.cache.on_job(with_secret)
    known.cache.on_job(job("young", 2, uri=RUN, created=9))
    known.cache.on_job(with_volume(job("a", 3, uri=path, created=3, **BEGUN), "/checkpoints", **claim_of("a")))
    known.cache.on_job(with_volume(job("b", 4, uri=path, created=4, **BEGUN), "/checkpoints/", **claim_of("b")))
    known.cache.on_job(with_volume(job("c", 5, uri=path, created=5), "/checkpoints", **claim_of("a")))
    assert [holder(known, uid) for uid in ("young", "b", "c")] == ["", "", "n/job-a"]
    assert sharing(known, "young") == ("secret",)
    assert sharing(known, "b") == ("a", "c")


@pytest.mark.parametrize("strange", [5, [5], {"a": []}, [{"mountPath": []}], [{"mountPath": "/c", "name": {}}]])
def test_a_template_of_a_strange_shape_has_a_folder_all_the_same(strange: Any) -> None:
    known, bad = Known(), job("bad", 1, uri="file:///c/run")
    pod_spec = bad["spec"]["template"]["spec"]
    pod_spec["containers"][0]["volumeMounts"] = pod_spec["volumes"] = strange
    known.cache.on_job(bad)
    assert holder(known, "bad") == ""


def test_a_job_takes_the_place_of_the_one_that_it_names() -> None:
    known = Known()
    taking = job("young", 2, uri=RUN, created=9)
    taking["spec"]["checkpoint"]["takeOver"] = "old"
    known.cache.on_job(job("old", 1, uri=RUN, created=3, **BEGUN))
    known.cache.on_job(taking)
    assert (holder(known, "old"), holder(known, "young")) == ("", "")
    taking["metadata"]["resourceVersion"], taking["status"] = "3", BEGUN
    known.cache.on_job(taking)
    assert (holder(known, "old"), holder(known, "young")) == ("n/job-young", "")


def test_a_job_that_is_forgotten_gives_its_uri_free() -> None:
    known = Known()
    known.cache.on_job(job("old", 2, uri=RUN, created=3, **BEGUN))
    known.cache.on_job(job("young", 1, uri=RUN, created=9))
    known.heard()
    known.cache.forget_job("old")
    assert known.heard() == ["young"]
    assert holder(known, "young") == ""
    assert known.cache.observe("old") is None


def test_a_late_answer_brings_no_job_back_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "REMEMBERED", 2)
    known = Known()
    known.cache.on_job(job("a", 1))
    known.cache.forget_job("a")
    known.heard()
    known.cache.on_job(job("a", 2))
    assert known.cache.observe("a") is None
    assert known.heard() == []
    for uid in ("b", "c"):
        known.cache.on_job(job(uid, 1))
        known.cache.forget_job(uid)
    known.cache.on_job(job("c", 2))
    assert known.cache.observe("c") is None
    assert len(known.cache._forgotten) == 2


def test_for_how_long_a_pod_is_known_no_clock_says() -> None:
    known = Known()
    known.cache.on_pod(None, pod("a-0-0", "a"))
    known.cache.on_job(job("a", 1))
    known.cache.on_pod(pod("a-0-0", "a"), pod("a-0-0", "a", phase="Running"))
    (first,) = known.cache.observe("a").seen_for.values()  # type: ignore[union-attr]
    time.sleep(0.01)
    (later,) = known.cache.observe("a").seen_for.values()  # type: ignore[union-attr]
    assert 0 <= first < later < 60, "it was created long ago, by the API server's clock"
    again = pod("a-0-0", "a", phase="Running", restarts=1)
    assert known.cache.observe("a").started_again_for == {}  # type: ignore[union-attr]
    known.cache.on_pod(pod("a-0-0", "a", phase="Running"), again)
    (since,) = known.cache.observe("a").started_again_for.values()  # type: ignore[union-attr]
    known.cache.on_pod(again, again)
    (on,) = known.cache.observe("a").started_again_for.values()  # type: ignore[union-attr]
    assert 0 <= since < on < 60
    known.cache.on_pod(again, None)
    assert known.cache.observe("a").seen_for == {}  # type: ignore[union-attr]
    assert known.cache.observe("a").started_again_for == {}  # type: ignore[union-attr]


def test_the_more_jobs_the_rarer_are_writes_of_progress() -> None:
    known = Known()
    known.cache.on_job(job("0", 1))
    assert known.cache.observe("0").progress_every == 1.5  # type: ignore[union-attr]
    for number in range(1, 1000):
        known.cache.on_job(job(str(number), 1))
    assert known.cache.observe("0").progress_every == 50.0  # type: ignore[union-attr]


def test_counts_of_a_job_without_a_round_are_written_rarely() -> None:
    known = Known()
    known.cache.on_job(job("0", 1))
    assert known.cache.observe("0").words_every == 5.0  # type: ignore[union-attr]
    known.cache.on_job(job("0", 2, rounds=1))
    assert known.cache.observe("0").words_every == 1.5  # type: ignore[union-attr]


def test_the_longer_a_job_takes_to_decide_the_longer_is_it_left_alone() -> None:
    known = Known()
    assert known.cache.gap("a") == 0.0
    known.cache.on_job(job("a", 1))
    assert known.cache.gap("a") == 0.2, "it waits for its pods"
    known.cache.on_job(job("a", 2, world={"round": 1}))
    cached = known.cache.job("a")
    assert cached is not None
    for decided_in, gap in ((0.0, 0.0), (0.03, 0.12), (10.0, 1.0)):
        cached.decided_in = decided_in
        assert known.cache.gap("a") == pytest.approx(gap)


def test_a_write_tests_the_claim_as_it_was_observed() -> None:
    def tested(status: dict[str, Any]) -> dict[str, Any]:
        tests = claim_tests(status)
        assert all(test["op"] == "test" for test in tests)
        return {test["path"].removeprefix("/status"): test["value"] for test in tests}

    assert tested({}) == {"": None}
    assert tested({"rounds": 1}) == {"/world": None, "/restarts": None, "/skipped": None}
    assert tested({"world": {"round": 1}, "restarts": {}}) == {
        "/world/claim": None,
        "/restarts/total": None,
        "/skipped": None,
    }
    claim = {"round": 2, "claimId": "c", "message": "<any> text"}
    assert tested({"world": {"claim": claim}, "restarts": {"total": 0}}) == {
        "/world/claim/round": 2,
        "/world/claim/claimId": "c",
        "/world/claim/committed": None,
        "/restarts/total": 0,
        "/skipped": None,
    }
    left_out = [{"begin": 76, "end": 80}]
    assert tested({"world": {}, "restarts": {"total": 3}, "skipped": left_out}) == {
        "/world/claim": None,
        "/restarts/total": 3,
        "/skipped": left_out,
    }


def unplaced(name: str, job_uid: str) -> OwnedPod:
    manifest = pod(name, job_uid)
    return replace(manifest, view=replace(manifest.view, waiting="Unschedulable"))


def place(known: Known, uid: str) -> QueuePlace | None:
    observed = known.cache.observe(uid)
    assert observed is not None
    return observed.place


def test_jobs_that_wait_for_room_have_turns() -> None:
    known = Known()
    for uid, created in (("a", 1), ("b", 2), ("c", 3)):
        known.cache.on_job(job(uid, 1, created=created))
    for uid in ("a", "b"):
        known.cache.on_pod(None, unplaced(f"{uid}-0", uid))
    known.cache.on_pod(None, pod("c-0", "c", node="n"))
    assert (place(known, "a"), place(known, "b")) == (QueuePlace(), QueuePlace(ahead=("n", "job-a"))), "nothing is held"
    known.cache.on_job(job("b", 2, created=2, internal={"requeueState": {"count": 1, "since": "2026-01-01T00:00:00Z"}}))
    assert (place(known, "a"), place(known, "b")) == (
        QueuePlace(turn=True, fits=True),
        QueuePlace(ahead=("n", "job-a")),
    )
    assert place(known, "c") == QueuePlace()
    known.heard()
    known.cache.on_pod(unplaced("a-0", "a"), pod("a-0", "a", node="n"))
    assert known.heard() == ["a", "b"], "b has released its room, and tries again"
    assert (place(known, "a"), place(known, "b")) == (QueuePlace(), QueuePlace())


def test_the_text_of_a_nodes_fault_changes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some conditions have the time in their message."""
    known = Known()
    worked_out: list[bool] = []
    monkeypatch.setattr(known.cache._capacity, "room_changed", lambda: worked_out.append(True))
    healthy, *faulty = (NodeView("n", ready=True, fault=fault) for fault in ("", "since 8:00", "since 8:01"))
    known.cache.on_node(healthy, faulty[0])
    assert worked_out == [True]
    known.cache.on_node(*faulty)
    assert worked_out == [True]


def test_a_burst_of_changes_is_worked_out_once_and_wakes_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand jobs wait, one of which holds a part of the room, and the others have released theirs."""
    later: list[Callable[[], None]] = []
    changed: list[str] = []
    cache = ClusterCache(changed.append, lambda uid: {}, later=lambda seconds, act: later.append(act))

    def work_out() -> list[str]:
        """Return the jobs that are woken. The computation may take some slices."""
        changed.clear()
        while later:
            later.pop(0)()
        return sorted(changed)

    away = {"requeueState": {"count": 1, "since": "2026-01-01T00:00:00Z"}}
    for number in range(1, 1000):
        cache.on_job(job(f"{number:03}", 1, internal=away))
    held, waits = pod("000-0", "000", node="n"), unplaced("000-1", "000")
    two = job("000", 1)
    two["spec"]["replicas"] = 2
    cache.on_job(two)
    for each in (held, waits):
        cache.on_pod(None, each)
    assert len(later) == 1
    assert cache.observe("000").place is None, "not worked out yet"  # type: ignore[union-attr]
    assert len(work_out()) == 1000
    assert cache.observe("000").place == QueuePlace(turn=True, fits=True)  # type: ignore[union-attr]
    assert cache.observe("999").place == QueuePlace(ahead=("n", "job-000"))  # type: ignore[union-attr]
    times: list[int] = []

    def worked_out(jobs: Mapping[str, line.Waiting], before: line.Line, real: Any = line.worked_out) -> line.Line:
        times.append(len(jobs))
        return real(jobs, before)  # type: ignore[no-any-return]

    monkeypatch.setattr(line, "worked_out", worked_out)
    for version in range(3, 40):
        cache.on_job(job("500", version, internal={"requeueState": {**away["requeueState"], "priority": version}}))
        cache.observe("500")
    assert times == [], "a pass works nothing out"
    assert work_out() == ["000", "500"], "the turn has passed from one to the other"
    cache.on_job(job("new", 1, internal=away))
    assert work_out() == ["new"]
    cache.on_node(None, NodeView("x", ready=True))
    assert work_out() == []
    assert times == [1000, 1001]


def test_a_job_whose_namespace_is_being_deleted_stands_in_nobodys_way() -> None:
    known = Known()
    for uid in ("a", "b"):
        known.cache.on_job(job(uid, 10))
        waits = pod(f"{uid}-0-0", uid)
        known.cache.on_pod(None, replace(waits, view=replace(waits.view, waiting="Unschedulable")))
    assert place(known, "b") == QueuePlace(ahead=("n", "job-a"))
    status = {"message": "no", "details": {"causes": [{"reason": "NamespaceTerminating", "message": "it ends"}]}}
    refused = from_status(403, json.dumps(status).encode())
    known.cache.create_refused(
        "a", refusal(refused), refused.message, namespace_ends=isinstance(refused, NamespaceEnds)
    )
    assert place(known, "b") == QueuePlace()
    gone = known.cache.observe("a")
    assert gone is not None
    assert gone.job.deleting


def test_a_job_that_cannot_be_judged_fails_no_look_at_another() -> None:
    known = Known()
    for uid, namespace in (("odd", "elsewhere"), ("a", "n")):
        known.cache.on_job(job(uid, 1, namespace=namespace))
    known.cache.on_pod(None, unplaced("a-0", "a"))
    known.cache.on_node(None, NodeView("x", ready=True, allocatable={"pods": Decimal(1)}))
    odd = replace(unplaced("odd-0", "odd"), namespace="elsewhere")
    odd = replace(odd, view=replace(odd.view, requests={"pods": "many"}))  # type: ignore[dict-item] # whatever it is
    known.cache.on_pod(None, odd)
    known.heard()
    assert place(known, "a") == QueuePlace()
    assert known.heard() == []
    sound = replace(odd, view=replace(odd.view, requests={"pods": Decimal(1)}))
    known.cache.on_pod(odd, sound)
    assert place(known, "odd") == QueuePlace(ahead=("n", "job-a"))


def test_names_of_pods_that_are_anothers_are_known() -> None:
    known = Known()
    before = pod("job-new-0-0", "old")
    known.cache.on_pod(None, before)
    known.cache.on_pod(None, replace(pod("job-new-1-0", "old"), namespace="elsewhere"))
    known.cache.on_job(job("new", 1))
    known.cache.on_pod(None, pod("job-new-2-0", "new"))
    known.cache.on_pod(None, pod("job-newer-0-0", "newer"))

    def taken() -> set[str]:
        observed = known.cache.observe("new")
        assert observed is not None
        return set(observed.taken)

    assert taken() == {"job-new-0-0"}
    known.heard()
    known.cache.name_taken("new", "job-new-5-0")
    assert known.heard() == ["new"], "another is to be found"
    assert taken() == {"job-new-0-0", "job-new-5-0"}
    known.cache.on_pod(before, None)
    assert taken() == {"job-new-5-0"}


def test_what_was_refused_is_tried_again_when_the_spec_has_changed() -> None:
    known = Known()
    known.cache.on_job(job("a", 1))

    def refused() -> CreateRefusal | None:
        observed = known.cache.observe("a")
        assert observed is not None
        return observed.refused

    known.cache.create_refused("a", Refusal.PERMANENT, "no")
    first = refused()
    assert first
    known.cache.create_refused("a", Refusal.PERMANENT, "no")
    again = refused()
    assert again
    assert again.since == first.since
    known.cache.on_pod(pod("other", "b"), None)
    assert refused(), "that makes room in a quota and mends nothing else"
    changed = job("a", 2)
    changed["metadata"]["generation"] = 2
    known.cache.on_job(changed)
    assert refused() is None


def refuse(known: Known, uid: str, limited: int) -> None:
    quota = f"exceeded quota: few, requested: pods=1, used: pods={limited}, limited: pods={limited}"
    known.cache.create_refused(uid, Refusal.QUOTA, f'pods "{uid}-0-0" is forbidden: {quota}')


def test_no_job_waits_for_one_that_room_would_not_help() -> None:
    known = Known()
    for uid, namespace, created in (("a", "n", 1), ("near", "n", 2), ("far", "m", 3)):
        known.cache.on_job(job(uid, 1, namespace=namespace, created=created))
        known.cache.on_pod(None, replace(unplaced(f"{uid}-0", uid), namespace=namespace))

    def ahead() -> tuple[object, ...]:
        return tuple(found.ahead if (found := place(known, uid)) else None for uid in ("a", "near", "far"))

    assert ahead() == (None, ("n", "job-a"), ("n", "job-a"))
    refuse(known, "a", limited=1)
    assert ahead() == (None, ("n", "job-a"), ("n", "job-near"))
    assert place(known, "a").hindrance is BlockedBy.QUOTA  # type: ignore[union-attr]
    refuse(known, "a", limited=0)
    assert ahead() == (None, None, ("n", "job-near"))
    known.cache.created("a")
    assert ahead() == (None, ("n", "job-a"), ("n", "job-a"))
    excluded = unplaced("a-0", "a")
    excluded = replace(excluded, view=replace(excluded.view, excluded=True))
    known.cache.on_pod(unplaced("a-0", "a"), excluded)
    assert ahead() == (None, None, ("n", "job-near"))
    known.cache.on_pod(excluded, unplaced("a-0", "a"))
    assert ahead() == (None, ("n", "job-a"), ("n", "job-a"))


def test_a_node_that_comes_or_goes_changes_which_job_is_too_large() -> None:
    known = Known()
    node = NodeView("x", ready=True, allocatable={"pods": Decimal(1)})
    for uid in ("a", "b"):
        known.cache.on_job(job(uid, 1))
        waits = unplaced(f"{uid}-0", uid)
        requests = {"pods": Decimal(2 if uid == "a" else 1)}
        known.cache.on_pod(None, replace(waits, view=replace(waits.view, requests=requests)))
    known.cache.on_node(None, node)
    assert place(known, "b") == QueuePlace()
    larger = replace(node, allocatable={"pods": Decimal(2)})
    known.cache.on_node(node, larger)
    assert place(known, "b") == QueuePlace(ahead=("n", "job-a"))
    known.cache.on_node(larger, replace(larger, cordoned=True))
    assert place(known, "b") == QueuePlace()


def test_jobs_that_have_trained_vote_on_whether_the_operator_hears() -> None:
    known, hearing = Known(), AgentConnectivityMonitor()
    known.cache = ClusterCache(known.changed.append, lambda uid: {}, hearing=hearing)
    for number in range(3):
        known.cache.on_job(job(str(number), 1, world={"round": 1 if number else 0}))
        for view in (AgentView(connected=True, wanted_at=1.0), AgentView(wanted_at=1.0, lost_at=2.0)):
            hearing.update(str(number), "a-0-0", view)

    def suspected() -> bool:
        observed = known.cache.observe("1")
        assert observed is not None
        return observed.operator_isolated

    assert not suspected(), "one of them has never trained"
    known.cache.on_job(job("0", 2, world={"round": 1}))
    assert suspected()
    known.cache.forget_job("2")
    assert not suspected()

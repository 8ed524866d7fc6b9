"""Phase of a pod whose containers have ended, as the kubelet decides it."""

import pytest

from concertina.local.node.node_status import ContainerState, PodFacts, pod_status


@pytest.mark.parametrize(
    ("policy", "code", "deleted", "phase"),
    [
        ("Always", 0, False, "Running"),
        ("Always", 255, False, "Running"),
        ("Always", 137, True, "Failed"),
        ("OnFailure", 0, False, "Succeeded"),
        ("OnFailure", 1, False, "Running"),
        ("Never", 0, False, "Succeeded"),
        ("Never", 1, False, "Failed"),
        ("Never", 0, True, "Succeeded"),
    ],
)
def test_only_a_container_that_is_not_started_again_ends_its_pod(
    policy: str, code: int, deleted: bool, phase: str
) -> None:
    ended = ContainerState("main", "image", {"terminated": {"exitCode": code}})
    facts = PodFacts(policy, "127.0.1.1", "127.0.1.2", "", inits=[], mains=[ended], deleted=deleted)
    assert pod_status(facts, {})["phase"] == phase


def test_an_init_container_that_has_ended_is_not_said_to_run_again() -> None:
    done = {"terminated": {"exitCode": 0}}

    def said(state: dict[str, object], previous: dict[str, object]) -> list[object]:
        inits = [ContainerState("agent", "image", state)]
        facts = PodFacts("OnFailure", "127.0.1.1", "127.0.1.2", "", inits=inits, mains=[], deleted=False)
        return [each["state"] for each in pod_status(facts, previous)["initContainerStatuses"]]

    first = {"initContainerStatuses": [{"name": "agent", "state": done}]}
    assert said({"waiting": {"reason": "PodInitializing"}}, first) == [done]
    assert said({"running": {}}, {}) == [{"running": {}}]
    assert said({"terminated": {"exitCode": 1}}, first) == [{"terminated": {"exitCode": 1}}]

"""The phase of a pod whose containers have ended, as the kubelet decides it."""

import pytest

from concertina.local.node.status import ContainerState, PodFacts, pod_status


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

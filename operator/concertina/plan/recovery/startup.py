"""What keeps pods from starting until a person mends it: images, settings that are missing, the Python in the image."""

from __future__ import annotations

import re

from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Pods, stalled
from concertina.plan.pods.pods import shortage
from concertina.plan.types import PodView
from concertina_protocol import EXIT_OLD_PYTHON

WAITING = {
    "ErrImagePull": "ImageUnavailable",
    "ImagePullBackOff": "ImageUnavailable",
    "InvalidImageName": "ImageUnavailable",
    "ErrImageNeverPull": "ImageUnavailable",
    "CreateContainerConfigError": "ContainerConfigError",
    "CreateContainerError": "ContainerConfigError",
}
"""Why a container waits, to the reason of the condition Stalled. They go on by themselves once that is mended."""
NOT_STARTED = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
NOT_THERE = re.compile(r"executable file not found|no such file or directory|permission denied|exec format error")
"""In a container runtime's message: the program is at fault, not the node."""
AGAIN = "Then set spec.suspend to true, change the template, and set it to false"


def waiting(ctx: JobContext) -> Decision | None:
    """No replica can start, for a reason that Kubernetes tries again."""
    live = ctx.replicas.live.values()
    reasons = [WAITING.get(pod.waiting, "") for pod in live]
    if not reasons or not all(reasons):
        return None
    return stalled(reasons[0], shortage(ctx), Pods.WANTED)


def refused(ctx: JobContext) -> Decision | None:
    """The image can't run what it is asked to: the next pod would fare no better. The pods stay, to be looked at."""
    if ctx.world.members:
        return None
    for pod in ctx.observed.pods:
        if pod.phase == "Failed" and (found := _fault(ctx, pod)):
            return stalled(*found, Pods.KEPT)
    return None


def _fault(ctx: JobContext, pod: PodView) -> tuple[str, str] | None:
    trainer = ctx.spec.template.trainer
    if pod.exit_code == EXIT_OLD_PYTHON and pod.exit_message:
        return "PythonTooOld", f"image {trainer.image}: {pod.exit_message[:500]}. {AGAIN}"
    if pod.exit_reason in NOT_STARTED and NOT_THERE.search(pod.exit_message):
        python = next((entry.value for entry in trainer.env if entry.name == "CONCERTINA_PYTHON"), None) or "python3"
        return "NoPython", (
            f"replica {pod.name} can't start {python}, in which the agent runs, in image {trainer.image}: give the "
            "container trainer an environment variable CONCERTINA_PYTHON with the path of the image's Python (3.9 or "
            f"newer), or use an image that has one. {AGAIN}. The runtime says: {pod.exit_message[:300]}"
        )
    return None

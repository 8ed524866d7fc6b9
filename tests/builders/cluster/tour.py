"""First steps of a new user on the cluster of KUBECONFIG: install and test the chart, run the demo job and drills.

`python -m builders.cluster.tour` reads the variables of `make test-e2e`, and removes its namespace and its release at
the end. With CONCERTINA_E2E_TRAINER_IMAGE, the bundled trainer trains on data in CONCERTINA_E2E_SHARED, a folder that
this machine and all nodes see. Without it, a script trains in the agent's image, because torch is large.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builders.cluster import drills, e2e, images
from builders.cluster.e2e import Cluster, condition
from concertina.local.binaries import programs

RELEASE = "tour"
DRILLS = ("kill-worker", "kill-coordinator", "operator-kill")
"""Scenarios that need no access to nodes, and no script that saves its state."""
STEPS, ENDLESS = 300, 1_000_000
SCRIPT = """
import time, trainingjob
for step in range(1, 1 + {steps}):
    time.sleep(0.05)
    trainingjob.report(step=step, steps={steps}, loss=1 / step)
"""


def bundled() -> bool:
    """Return whether the bundled trainer trains."""
    return bool(e2e.setting("TRAINER_IMAGE"))


def job(name: str, steps: int, shared: str) -> e2e.Object:
    """Return a job of three replicas, of which it may lose one."""
    resources = {"requests": {"cpu": "100m", "memory": "256Mi"}}
    elastic = {"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 2}}
    if not bundled():
        command = ["python3", "-u", "-c", SCRIPT.format(steps=steps)]
        container = {"name": "trainer", "image": f"{e2e.AGENT_IMAGE}:{e2e.TAG}", "command": command}
        template = e2e.pod({**container, "resources": resources})
        return e2e.own_job(name, template, replicas=3, elastic=elastic)
    container = e2e.trainer(resources=resources)
    container["volumeMounts"] = [*container.get("volumeMounts", ()), {"name": "shared", "mountPath": shared}]
    template = e2e.pod(container)
    template["volumes"].append({"name": "shared", "hostPath": {"path": shared, "type": "Directory"}})
    training = {**drills.TRAINER, "steps": steps, "data": {"uri": f"{shared}/data"}}
    checkpoint = {"uri": f"file://{shared}/{name}", "everySteps": 100, "keep": 2}
    return e2e.own_job(name, template, replicas=3, elastic=elastic, trainer=training, checkpoint=checkpoint)


def helm(kubeconfig: str, *arguments: str) -> str:
    return programs.run_helm(Path(kubeconfig), *arguments, "--namespace", e2e.NAMESPACE)


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """Install the chart as a user does, and remove it with its namespace."""
    texts = {
        "image.repository": e2e.IMAGE, "image.tag": e2e.TAG,
        "agentImage.repository": e2e.AGENT_IMAGE, "agentImage.tag": e2e.TAG,
    }  # fmt: skip
    options = [f"--set-string={name}={value}" for name, value in texts.items()]
    options += ["--create-namespace", "--take-ownership", "--wait", "--timeout=5m"]
    chart = str(e2e.ROOT / "charts" / "concertina")
    try:
        helm(cluster.kubeconfig, "install", RELEASE, chart, f"--set=watchNamespaces={{{e2e.NAMESPACE}}}", *options)
        yield
    finally:
        helm(cluster.kubeconfig, "uninstall", RELEASE, "--ignore-not-found")
        cluster.kubectl("delete", "namespace", e2e.NAMESPACE, "--ignore-not-found", "--wait=false")


def prepare(shared: str) -> None:
    """Build the data that the bundled trainer reads. Pods of any user write their checkpoints beside them."""
    Path(shared).mkdir(parents=True, exist_ok=True)
    Path(shared).chmod(0o777)
    if not (Path(shared) / "data").exists():
        drills.build_data(f"{shared}/data", {})


def run_demo(cluster: Cluster, shared: str) -> None:
    """Run the demo job to its end."""
    with cluster.running(job("demo", STEPS, shared)):
        status = cluster.until("success", lambda seen: condition(seen, "Complete")["status"] == "True", "demo")
    say(f"demo: complete after {status['progress']['step']} steps")


def play_drills(cluster: Cluster, shared: str) -> list[str]:
    """Run the drills on one job, and return those that failed."""
    failed = []
    with cluster.running(job("drilled", ENDLESS, shared)):
        cluster.training(3, name="drilled")
        for scenario in DRILLS:
            played = drills.drill(scenario, "--yes", "-o", "json", "-n", e2e.NAMESPACE, job="drilled")
            say(f"drill {scenario}: {'PASS' if played.returncode == 0 else 'FAIL'}")
            if played.returncode:
                failed.append(scenario)
                say("; ".join(json.loads(played.stdout)["reasons"]) if played.stdout else played.stderr)
    return failed


def say(sentence: str) -> None:
    print(sentence, flush=True)


def main() -> int:
    kubeconfig, shared = os.environ.get("KUBECONFIG", ""), e2e.setting("SHARED")
    if not kubeconfig:
        sys.exit("set KUBECONFIG to the cluster of the tour")
    if bundled() and not shared:
        sys.exit("the bundled trainer needs CONCERTINA_E2E_SHARED: a folder that this machine and all nodes see")
    cluster = Cluster(kubeconfig)
    agent, operator = f"{e2e.AGENT_IMAGE}:{e2e.TAG}", f"{e2e.IMAGE}:{e2e.TAG}"
    loaded = images.load([operator, agent, *([e2e.TRAINER_IMAGE] if bundled() else [])])
    say(f"images: {len(loaded)} loaded")
    if bundled():
        prepare(shared)
    with installed(cluster):
        say(f"chart: installed in {e2e.NAMESPACE}")
        say(helm(cluster.kubeconfig, "test", RELEASE, "--logs", "--timeout=3m").strip().splitlines()[-1])
        run_demo(cluster, shared)
        failed = play_drills(cluster, shared)
    say(f"tour: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

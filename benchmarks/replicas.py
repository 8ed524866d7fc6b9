"""Maximum size of a job on this machine: `python benchmarks/replicas.py [SIZES ...] [--json FILE]`.

On a local cluster, a job of each size starts, loses a replica, has all replicas again, and is deleted. The agents are
real and the workers sleep, so the benchmark measures the rounds, with all replicas on this machine's cores. (Each agent
pings all other agents, so the work of a round grows with the square of the size.)
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from until import until

from concertina.demo import stage as stages
from concertina.demo.stage import Stage

LIMIT = 240.0
NODES = 4
PATH = "/apis/concertina.dev/v1beta1/namespaces/default/trainingjobs"
STAY = "import time; time.sleep(3600)"


def job(name: str, replicas: int) -> dict[str, Any]:
    container = {"name": "trainer", "image": "concertina/trainer:bench", "command": ["python3", "-c", STAY]}
    elastic = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
    pod = {"containers": [container], "terminationGracePeriodSeconds": 1}
    spec = {"replicas": replicas, "elastic": elastic, "template": {"spec": pod}}
    return {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}


def seconds(begun: float, what: str, check: Callable[[], Any]) -> float:
    """Return the seconds from `begun` until `check` returns True. The result is infinite if that takes too long."""
    try:
        until(what, LIMIT, check)
    except TimeoutError as error:
        print(error, flush=True)
        return float("inf")
    print(f"{what}: {time.time() - begun:.1f} s", flush=True)
    return time.time() - begun


def play(stage: Stage, size: int, samples: dict[str, list[float]]) -> bool:
    """Run one job, and return whether it started."""
    name = f"of-{size}"

    def world() -> dict[str, Any]:
        status = stage.job(name).get("status") or {}
        ready = next(
            (condition["reason"] for condition in status.get("conditions", ()) if condition["type"] == "Ready"), ""
        )
        return status["world"] if ready == "Training" else {}

    begun = time.time()
    stage.cluster.api.call("POST", PATH, job(name, size))
    first = seconds(begun, "the first round", lambda: world().get("replicas") == size)
    samples[f"{size} replicas: all in one round"].append(first)
    if first == float("inf"):
        return False
    before = world()
    lost = before["members"][-1]["replica"]
    begun = time.time()
    stage.cluster.api.call("DELETE", f"/api/v1/namespaces/default/pods/{lost}?gracePeriodSeconds=0")
    after = seconds(begun, "a round without it", lambda: world().get("round", 0) > before["round"])
    samples[f"{size} replicas: next round after one is lost"].append(after)
    whole = seconds(begun, "all again", lambda: world().get("replicas") == size and lost not in str(world()))
    samples[f"{size} replicas: all again"].append(whole)
    begun = time.time()
    stage.cluster.api.call("DELETE", f"{PATH}/{name}")
    samples[f"{size} replicas: deleted"].append(seconds(begun, "no pod", lambda: not stage.pods(name)))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    samples: dict[str, list[float]] = defaultdict(list)
    with stages.standing("bench-replicas", NODES, report.step) as stage:
        for size in options.sizes:
            if not play(stage, size, samples):
                break
    report.show("A job of so many replicas, all on this machine", samples)
    report.write(options.json, "replicas", samples)


if __name__ == "__main__":
    main()

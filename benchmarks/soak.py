"""Soak test: random drills on several jobs at once, followed by a check of the trained positions and of leaks.

    python benchmarks/soak.py [--minutes 10] [--jobs 2] [--replicas 2] [--every 30] [--seed 0] [--json F] [--plot F]
                              [--hostile]

The drills are those of `concertina drill`, chosen at random from the seed. At the end each job is suspended, which
writes a durable checkpoint. The job's logs must then contain the steps 1 ... n without a gap (`soak_ledger`), where n
is the step of that checkpoint. The exit status is 1 if a check fails. With --hostile, an agent of another namespace
sends messages as fast as it can during the test, and the operator must throttle that agent.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import soak_ledger
from floods import held_back
from recovery_concertina import bundled
from rich.console import Console
from soak_watch import Logs, Memory, left_behind
from until import until

from concertina.api.accounting import Goodput
from concertina.demo import stage as stages
from concertina.demo.stage import Stage
from concertina.drill.faults import tenants
from concertina.drill.run import run
from concertina.drill.scenarios import SCENARIOS
from concertina.drill.target import DrillTarget
from concertina.kube.errors import ApiError
from concertina.local import cluster
from concertina.local.errors import LocalClusterError
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.watch import Late

CONSOLE = Console(stderr=True)
WINDOW_SECONDS = 30
"""Failure window in seconds. It is longer than one drill, but not longer than the time between two drills."""
HOSTILE = "hostile"
"""Namespace of another tenant."""
TRAINING_JOBS = f"/apis/concertina.dev/v1beta1/namespaces/{HOSTILE}/trainingjobs"
SHARED = frozenset({
    "kill-node", "stop-node", "operator-kill", "apiserver-restart", "storage-outage", "hostile-agent", "long-queue",
})  # fmt: skip
"""Drills that affect components of all jobs. Only one of them runs at a time."""
PLAYED = [name for name, scenario in SCENARIOS.items() if not isinstance(scenario.local, str)]
IDEAL_SECONDS = 1.0
"""Shortest possible recovery in seconds. The ideal goodput assumes one such recovery for each failure."""
BUCKETS = tuple(f"{what}Seconds" for what in Goodput().by_class)
SLOPE = 20.0
"""Growth of memory in MiB per hour above which it counts as a leak."""
TELLING_MINUTES = 10.0
"""Minimum duration, in minutes, of the measurement of one operator process for detecting a leak."""
ENDS_OPERATOR = ("operator-kill", "operator-stop")
"""Drills that end the operator's process.

These drills run only in the first half. The operator's process of the second half then runs long enough to show whether
its memory grows.
"""


@dataclass
class Played:
    at: float
    ended: float
    job: str
    scenario: str
    passed: bool
    first_step: float | None
    words: str


@dataclass
class Outcome:
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    operator: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


async def drill_on(target: Target, name: str, options: argparse.Namespace, over: float, shared: asyncio.Lock,
                   played: list[Played]) -> None:  # fmt: skip
    """Run drills (injected faults) on one job until the time `over`."""
    chance, due = random.Random(f"{options.seed} {name}"), time.time()
    async with target.connect() as (client, namespace):
        job = DrillTarget(client, namespace, name, cluster.serving(client.access.server))
        while True:
            due = due + options.every if options.regular else time.time() + chance.expovariate(1 / options.every)
            await asyncio.sleep(max(0.0, due - time.time()))
            scenario = chance.choice(options.scenarios)
            if time.time() > over:
                return
            if scenario in ENDS_OPERATOR and time.time() > over - 30 * options.minutes:
                continue
            async with shared if scenario in SHARED else nullcontext():
                result = await one(job, scenario)
            played.append(result)
            CONSOLE.log(f"{name}, {scenario}: {'PASS' if result.passed else 'FAIL'} {result.words}")


async def one(job: DrillTarget, scenario: str) -> Played:
    """Run one drill, and return its result.

    With several jobs, the drill's own expectations may fail. Only the checks at the end count.
    """
    at, scenario_row = time.time(), SCENARIOS[scenario]
    try:
        verdict = await run(job, scenario, scenario_row, scenario_row.fault(job), lambda _: None)
    except (Late, UserError, ApiError, LocalClusterError) as error:
        return Played(at, time.time(), job.name, scenario, False, None, str(error)[:300])
    words = verdict.done if verdict.passed else "; ".join(verdict.reasons)
    return Played(at, time.time(), job.name, scenario, verdict.passed, verdict.seen.seconds.first_step, words[:300])


def manifest(name: str, replicas: int) -> dict[str, Any]:
    """Return a job like that of the recovery benchmark, with a separate checkpoint folder."""
    job = bundled()
    job["metadata"]["name"] = name
    job["spec"] |= {"replicas": replicas, "elastic": {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}}
    job["spec"]["failurePolicy"]["windowSeconds"] = WINDOW_SECONDS
    job["spec"]["checkpoint"]["uri"] = f"s3://{stages.BUCKET}/{name}"
    return job


def begin_flood(stage: Stage, replicas: int) -> None:
    """Start an agent of another tenant that sends messages as fast as it can."""
    stage.cluster.create_namespace(HOSTILE)
    stage.cluster.api.call("POST", TRAINING_JOBS, tenants.hostile_job(manifest("like", replicas), HOSTILE))
    until("a flood that is held back", 240, functools.partial(held_back, stage, HOSTILE))


def training(stage: Stage, name: str) -> bool:
    conditions = stage.job(name).get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["reason"] == "Training" for condition in conditions)


def suspended(stage: Stage, name: str) -> bool:
    conditions = stage.job(name).get("status", {}).get("conditions", [])
    return any(condition["type"] == "Suspended" and condition["status"] == "True" for condition in conditions)


def spent(stage: Stage, name: str) -> dict[str, float]:
    """Return how a job has spent its lifetime so far, in seconds, by goodput class such as training or restoring."""
    goodput = stage.job(name)["status"].get("goodput", {})
    return {what: goodput.get(what, 0.0) for what in BUCKETS}


def settle(stage: Stage, logs: Logs, before: dict[str, dict[str, float]], outcome: Outcome, played: list[Played],
           seconds: float) -> None:  # fmt: skip
    """Suspend all jobs, and check their trained positions and their goodput.

    `before` contains the seconds of each job by goodput class at the start of the drills.
    """
    names = list(before)
    after = {name: spent(stage, name) for name in names}
    for name in names:
        stage.cluster.kubectl("patch", "trainingjob", name, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    for name in names:
        until(f"{name} suspended", 240, functools.partial(suspended, stage, name))
        status = stage.job(name)["status"]
        final = status.get("lastCheckpoint", {}).get("step", 0)
        verdict = soak_ledger.judge(soak_ledger.rounds(logs.lines(name)), final)
        injected = sum(drill.job == name for drill in played)
        outcome.jobs[name] = {
            "steps": final,
            "rounds": status.get("rounds", 0),
            "replayed": verdict.replayed,
            "unheard": verdict.unheard,
            "worst_loss_difference": round(verdict.worst_difference, 6),
            "drills": injected,
            "goodput": status.get("goodput", {}),
            "goodput_under_drills_percent": percent(before[name], after[name]),
            "best_possible_percent": round(100 * (1 - min(1.0, injected * IDEAL_SECONDS / seconds)), 2),
        }
        outcome.wrong += [f"{name}: {sentence}" for sentence in verdict.wrong]
        if verdict.worst_difference > 0.01:
            outcome.wrong.append(f"{name}: a step trained again has another loss, by {verdict.worst_difference:.2%}")


def percent(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the goodput in percent for the time between two readings, without the job's first start."""
    passed = {what: after[what] - before[what] for what in BUCKETS if what != "unknownSeconds"}
    forward = passed["productiveSeconds"] + passed["communicationSeconds"]
    return round(100 * forward / (sum(passed.values()) or 1.0), 2)


def soak(options: argparse.Namespace) -> tuple[Outcome, list[Played], Memory]:
    names = [f"soak-{number}" for number in range(options.jobs)]
    outcome, played = Outcome(), list[Played]()
    nodes = options.jobs * options.replicas
    with stages.standing(f"soak-{os.getpid()}", nodes, lambda _: nullcontext(CONSOLE.log)) as stage:
        for _ in stages.build_data(stage.storage):
            pass
        memory, logs = Memory(stage), Logs(stage, names)
        try:
            for name in names:
                stage.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest(name, options.replicas)))
            for name in names:
                until(f"{name} at work", 240, functools.partial(training, stage, name))
            if options.hostile:
                begin_flood(stage, options.replicas)
            begun, before = time.time(), {name: spent(stage, name) for name in names}
            target, shared = Target(stage.cluster.record.kubeconfig, None, "default"), asyncio.Lock()

            async def all_jobs() -> None:
                over = begun + 60 * options.minutes
                await asyncio.gather(*(drill_on(target, name, options, over, shared, played) for name in names))

            asyncio.run(all_jobs())
            if options.hostile:
                # The operator may be a new one, whose log begins anew.
                until("a flood that is held back at the end", 240, functools.partial(held_back, stage, HOSTILE))
                stage.cluster.kubectl("delete", "namespace", HOSTILE, "--timeout=240s")
            settle(stage, logs, before, outcome, played, time.time() - begun)
            uids = [stage.job(name)["metadata"]["uid"] for name in names]
            for name in names:
                stage.cluster.kubectl("delete", "trainingjob", name, "--wait=true", "--timeout=60s")
            outcome.wrong += [f"left behind: {what}" for what in left_behind(stage, uids)]
        finally:
            logs.close()
            memory.close()
    slope, minutes = memory.slope([drill.ended for drill in played if drill.scenario == "long-queue"])
    if slope > SLOPE and minutes >= TELLING_MINUTES:
        outcome.wrong.append(f"the operator's memory grows by {slope:.0f} MiB an hour")
    outcome.operator = {
        "worst_mib": max((size for points in memory.series.values() for _, size in points), default=0.0),
        "mib_an_hour": round(slope, 2),
        "measured_minutes": round(minutes, 1),
    }
    return outcome, played, memory


def plot(path: Path, played: list[Played], memory: Memory) -> None:
    """Plot the operator's memory over time, with a line for each drill."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.5))
    start = min((points[0][0] for points in memory.series.values()), default=0.0)
    for points in memory.series.values():
        axes.plot([(at - start) / 60 for at, _ in points], [size for _, size in points], color="tab:blue")
    for drill in played:
        axes.axvline((drill.at - start) / 60, color="tab:gray" if drill.passed else "tab:red", alpha=0.4, linewidth=1)
    axes.set(xlabel="minutes (a line: a drill, red where its own promise did not hold)", ylabel="operator, MiB", ylim=0)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2, help="of each job; one on a node")
    parser.add_argument("--every", type=float, default=30, help="mean seconds between a job's drills")
    parser.add_argument(
        "--regular", action="store_true", help="a drill begins exactly so often: for a goodput at a failure rate"
    )
    parser.add_argument("--hostile", action="store_true", help="an agent of another namespace floods the operator")
    parser.add_argument("--scenarios", nargs="+", choices=PLAYED, default=PLAYED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    outcome, played, memory = soak(options)
    rows = {name: [p.first_step for p in played if p.scenario == name and p.first_step] for name in options.scenarios}
    report.show("soak: from the fault to the next step", rows)
    for name, facts in outcome.jobs.items():
        print(f"{name}: {facts}")
    print(f"operator: {outcome.operator}")
    series = {str(pid): points[::15] for pid, points in memory.series.items()}
    facts = {"minutes": options.minutes, "seed": options.seed, "wrong": outcome.wrong, "jobs": outcome.jobs}
    drills = [vars(drill) for drill in played]
    report.write(options.json, "soak", rows, **facts, operator={**outcome.operator, "series": series}, drills=drills)
    if options.plot:
        plot(options.plot, played, memory)
    print("\n".join(outcome.wrong) or f"all well after {len(played)} drills: every position once, nothing left behind")
    raise SystemExit(bool(outcome.wrong))


if __name__ == "__main__":
    main()

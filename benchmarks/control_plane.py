"""What the operator costs at scale: `python benchmarks/control_plane.py [JOBSxREPLICAS ...] [--only SCENARIO ...]`.

On a real control plane with simulated nodes, whose pods are stand-ins for agents (`control_plane_agent`), the operator
runs as a process of its own. For each size all jobs are made at once, and then, in this order or those named alone:
`run` (until all train), `steady` (they do), `kill-member` (one after the other), `kill-operator` (and start it again).
Printed: seconds, the operator's requests by verb and resource, and the processor time of everything that takes part:
it shares this machine's cores."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import control_plane_hosts as hosts
import report
from control_plane_cluster import AS_IT_COMES, AUDIT, Meter, Operator, Requests, Usage, control_plane
from control_plane_hosts import Hosts, KillPod
from control_plane_jobs import Jobs

from concertina.kube import access
from concertina.kube.client import Client

SYNC_SECONDS = 1.0
"""Until the API server has written what it was asked."""


@dataclass(frozen=True)
class Size:
    jobs: int
    replicas: int

    @classmethod
    def parse(cls, text: str) -> Size:
        jobs, _, replicas = text.partition("x")
        return cls(int(jobs), int(replicas))

    def __str__(self) -> str:
        return f"{self.jobs}x{self.replicas}"


Table = dict[str, list[float]]


@dataclass
class Results:
    """Tables by title and unit."""

    tables: dict[tuple[str, str], Table] = field(default_factory=dict)

    def add(self, title: str, unit: str, rows: Mapping[str, float]) -> None:
        table = self.tables.setdefault((title, unit), {})
        for row, value in rows.items():
            table.setdefault(row, []).append(value)

    def flat(self) -> Table:
        return {
            f"{title}: {row} ({unit})": values
            for (title, unit), table in self.tables.items()
            for row, values in table.items()
        }


@dataclass(frozen=True)
class Bench:
    size: Size
    options: argparse.Namespace
    operator: Operator
    hosts: Hosts
    meter: Meter
    requests: Requests
    jobs: Jobs
    results: Results

    def seconds(self, scenario: str, rows: Mapping[str, float]) -> None:
        self.results.add(f"{self.size}, {scenario}", "s", rows)

    def used(self, scenario: str, before: Usage) -> Usage:
        after = self.meter.usage()
        spent = after.since(before)
        passed = after.at - before.at
        self.results.add(f"{self.size}, {scenario}: processor time", "s", spent)
        self.results.add(
            f"{self.size}, {scenario}: cores in use", "cores", {who: used / passed for who, used in spent.items()}
        )
        self.results.add(f"{self.size}, {scenario}: memory at the highest", "MiB", after.memory)
        return after


async def run(bench: Bench) -> None:
    before, begun = bench.meter.usage(), time.time()
    bench.requests.more()
    making = asyncio.create_task(bench.jobs.create(bench.size.jobs, bench.size.replicas))
    await asyncio.sleep(0)
    reached = await bench.jobs.until("train", begun, bench.options.limit, lambda name, job: job.trains)
    await making
    bench.seconds("run", {f"{mark} of the jobs train": at for mark, at in reached.items()})
    bench.used("run", before)
    await asyncio.sleep(SYNC_SECONDS)
    counted = {what: number / bench.size.jobs for what, number in bench.requests.more().most_common()}
    bench.results.add(f"{bench.size}, run: requests of the operator", "a job", counted)
    if reached["all"] == float("inf"):
        raise TimeoutError(f"not all of {bench.size} train within {bench.options.limit:.0f} s")


async def steady(bench: Bench) -> None:
    before = bench.meter.usage()
    bench.requests.more()
    rounds = {name: job.round for name, job in bench.jobs.seen.items()}
    await asyncio.sleep(bench.options.steady)
    after = bench.used("steady", before)
    await asyncio.sleep(SYNC_SECONDS)
    passed = after.at - before.at
    counted = {what: number / passed for what, number in bench.requests.more().most_common()}
    bench.results.add(f"{bench.size}, steady: requests of the operator", "a second", counted)
    bench.results.add(f"{bench.size}, steady", "jobs", {"a round was begun": _begun(bench, rounds)})
    behind = sorted(after.at - job.progress_at for job in bench.jobs.seen.values())
    bench.seconds("steady", {"progress in the status is old, half": behind[len(behind) // 2], "worst": behind[-1]})


async def kill_member(bench: Bench) -> None:
    chance = random.Random(0)
    names = chance.sample(sorted(bench.jobs.seen), min(bench.options.kills, len(bench.jobs.seen)))
    for number, name in enumerate(names):
        job = bench.jobs.seen[name]
        before, claims = job.round, max(job.claims)
        place = number % len(job.members)
        died = await asyncio.to_thread(bench.hosts.kill, KillPod(job.members[place]))
        while job.round == before and time.time() < died + bench.options.limit:
            await asyncio.sleep(0.01)
        claimed = min((at for round, at in job.claims.items() if round > claims), default=float("inf"))
        committed = min((at for round, at in job.rounds.items() if round > before), default=float("inf"))
        who = "a lead dies" if place == 0 else "a member dies"
        bench.seconds("kill-member", {f"{who}: until the claim": claimed - died, "until the commit": committed - died})
        print(f"  {who} of {name}: claim {claimed - died:.2f} s, commit {committed - died:.2f} s", flush=True)


async def kill_operator(bench: Bench) -> None:
    rounds = {name: job.round for name, job in bench.jobs.seen.items()}
    bench.operator.end()
    before = bench.meter.usage()
    begun = await bench.operator.start()
    bench.seconds("kill-operator", {"until the new one works": time.time() - begun})
    reached = await bench.jobs.until(
        "tell their progress", begun, bench.options.limit, lambda name, job: job.progress_at > begun
    )
    bench.seconds("kill-operator", {f"until {mark} of the jobs tell progress": at for mark, at in reached.items()})
    bench.used("kill-operator", before)
    bench.results.add(f"{bench.size}, kill-operator", "jobs", {"a round was begun": _begun(bench, rounds)})


def _begun(bench: Bench, rounds: Mapping[str, int]) -> int:
    """Jobs that have claimed or committed another round since."""
    seen = bench.jobs.seen
    return sum(max([seen[name].round, *seen[name].claims]) > round for name, round in rounds.items())


SCENARIOS: Mapping[str, Callable[[Bench], Awaitable[None]]] = {
    "run": run,
    "steady": steady,
    "kill-member": kill_member,
    "kill-operator": kill_operator,
}


async def play(size: Size, options: argparse.Namespace, results: Results) -> None:
    with control_plane("bench-control-plane", print) as cluster:
        operator = Operator(cluster, options.operator)
        network = cluster.record.endpoints.address.rpartition(".")[0].rpartition(".")[0]
        with hosts.running(
            options.processes, options.nodes, cluster.kubeconfig, network, cluster.record.logs
        ) as simulated:
            await asyncio.to_thread(cluster.wait_nodes, [f"node-{number}" for number in range(options.nodes)])
            print(f"{options.nodes} nodes are ready", flush=True)
            await operator.start()
            async with Client(await access.load(str(cluster.kubeconfig))) as client:
                meter = Meter(cluster, operator, tuple(host.pid for host in simulated.each))
                requests = Requests(cluster.directory / AUDIT)
                bench = Bench(size, options, operator, simulated, meter, requests, Jobs(client), results)
                following = asyncio.create_task(bench.jobs.follow())
                try:
                    for name, scenario in SCENARIOS.items():
                        if name in ("run", *options.only):
                            print(f"{size}: {name} ...", flush=True)
                            await scenario(bench)
                finally:
                    following.cancel()
                    operator.close()
                    for error, times in operator.errors().most_common():
                        print(f"the operator logged {times} times: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=Size.parse, nargs="*", default=[Size(20, 4), Size(100, 4)])
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="beside run")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2, help="that nodes and agents share")
    parser.add_argument("--steady", type=float, default=30.0, help="seconds")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that anything may take")
    parser.add_argument("--operator", default=AS_IT_COMES, help="what runs it; a profiler's command, say")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = Results()
    for size in options.sizes:
        try:
            asyncio.run(play(size, options, results))
        except TimeoutError as error:
            print(error, flush=True)
            break
    for (title, unit), table in results.tables.items():
        report.show(title, table, unit)
    report.write(options.json, "control-plane", results.flat(), nodes=options.nodes, processes=options.processes)


if __name__ == "__main__":
    main()

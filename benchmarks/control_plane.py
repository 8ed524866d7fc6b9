"""Cost of the operator at scale: `python benchmarks/control_plane.py [JOBSxREPLICAS ...] [--only SCENARIO ...]`.

The operator runs as a separate process on a real control plane with simulated nodes. The pods on these nodes are
simulated agents (`control_plane_agent`). For each size, all jobs are created at once, and the scenario `run` lasts
until all jobs train. The other scenarios follow in this order: `steady`, `kill-member` (several members, one after the
other), `kill-operator` and `kill-api-server` (each is started again), `kill-nodes` (several nodes at once), and
`delete-jobs` (some jobs, which are then created again). With --only, just the given scenarios follow.

The benchmark prints seconds, the operator's requests by verb and resource, and the processor time of all processes. All
processes share this machine's cores. The logs are not deleted if a scenario did not reach its goal.

With `--large N ...`, an operator starts in a cluster with N of the largest jobs that the API server accepts
(`control_plane_memory`). Each N has a separate control plane. Without sizes and without --large, there are defaults for
both. With `--peers FOLDER`, other operators then run the same number of jobs, each on a separate control plane
(`control_plane_peers`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import control_plane_hosts as hosts
import control_plane_kinds as kinds
import control_plane_memory
import control_plane_peers as peers
import report
from control_plane_cluster import (
    AS_IT_COMES,
    AUDIT,
    SYNC_SECONDS,
    Meter,
    Operator,
    Requests,
    Usage,
    control_plane,
    start_again,
)
from control_plane_hosts import Hosts, KillNode, KillPod
from control_plane_jobs import Jobs

from concertina.kube import access
from concertina.kube.client import Client
from concertina.local.cluster import LocalCluster
from concertina.local.errors import LocalClusterError
from concertina.local.state import lifetime

LOOK_SECONDS = 0.1
SECOND_THOUGHTS_SECONDS = 15.0
"""Seconds within which a new operator would start a round if it considered a replica lost."""


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


@dataclass(frozen=True)
class Bench:
    size: Size
    options: argparse.Namespace
    cluster: LocalCluster
    operator: Operator
    hosts: Hosts
    meter: Meter
    requests: Requests
    jobs: Jobs
    tables: dict[str, dict[str, list[float]]]

    def say(self, scenario: str, what: str, value: float) -> None:
        """Record a measured value. `what` contains the unit unless the unit is seconds."""
        self.tables.setdefault(f"{self.size}, {scenario}", {}).setdefault(what, []).append(value)

    def say_reached(self, scenario: str, what: str, reached: Mapping[str, float]) -> None:
        for mark, seconds in reached.items():
            self.say(scenario, f"until {mark} of the jobs {what}", seconds)

    def begin(self) -> Usage:
        """Start a measurement, and return the current usage. Pass it to `measured` as `before`."""
        self.requests.more()
        self.hosts.longest_standstill()
        return self.meter.usage()

    async def measured(
        self, scenario: str, before: Usage, share: float, unit: str, until_it_trains: bool = False
    ) -> None:
        """Record the usage and the requests since `before`. The number of requests is divided by `share`.

        With `until_it_trains`, requests for a job are not counted after that job has started to train.
        """
        after = self.meter.usage()
        for who, spent in after.cpu_since(before).items():
            self.say(scenario, f"{who}: processor time", spent)
        for who, memory in after.memory().items():
            self.say(scenario, f"{who}: memory at the highest, MiB", memory)
        self.say(scenario, "nodes and agents: longest standstill", self.hosts.longest_standstill())
        await asyncio.sleep(SYNC_SECONDS)
        asked = [
            request
            for request in self.requests.more()
            if not until_it_trains or request.at <= self.jobs.of(request.name).trained_at
        ]
        self.say(scenario, f"requests {unit}", len(asked) / share)
        for what, number in Counter(request.what for request in asked).most_common():
            self.say(scenario, f"{what}: requests {unit}", number / share)


async def run(bench: Bench) -> None:
    names = [f"job-{number}" for number in range(bench.size.jobs)]
    before, begun = bench.begin(), time.time()
    async with asyncio.TaskGroup() as both:  # The wait ends with an error if a job is refused.
        both.create_task(bench.jobs.create(names, bench.size.replicas))
        await asyncio.sleep(0)
        reached = await bench.jobs.until("train", begun, bench.options.limit, lambda name, job: job.trains)
    bench.say_reached("run", "train", reached)
    bench.say("run", "jobs that begin smaller than wanted", sum(job.is_smaller for job in bench.jobs.seen.values()))
    await bench.measured("run", before, bench.size.jobs, "a job until it trains", until_it_trains=True)
    if reached["all"] == float("inf"):
        raise TimeoutError(f"not all of {bench.size} train within {bench.options.limit:.0f} s")


async def steady(bench: Bench) -> None:
    before, rounds = bench.begin(), _rounds(bench)
    await asyncio.sleep(bench.options.steady)
    now = time.time()
    behind = sorted(now - (job.progress_at or job.trained_at) for job in bench.jobs.seen.values())
    bench.say("steady", "progress in the status is old, half of the jobs", behind[len(behind) // 2])
    bench.say("steady", "progress in the status is old, worst", behind[-1])
    bench.say("steady", "jobs that begin a round", _begun(bench, rounds))
    cores = bench.meter.usage().cpu_since(before)["operator"] / (now - before.at)
    bench.say("steady", "operator, cores", cores)
    await bench.measured("steady", before, now - before.at, "a second")


async def kill_member(bench: Bench) -> None:
    chance = random.Random(0)
    names = chance.sample(sorted(bench.jobs.seen), min(bench.options.kills, len(bench.jobs.seen)))
    for number, name in enumerate(itertools.islice(itertools.cycle(names), bench.options.kills)):
        job = bench.jobs.seen[name]
        await _all_train(bench, [name])
        before, claims = job.round, max(job.claims)
        place = number % len(job.members)
        died = await asyncio.to_thread(bench.hosts.kill, KillPod(job.members[place]))
        while job.round == before and time.time() < died + bench.options.limit:
            await asyncio.sleep(0.01)
        claimed = min((at for round, at in job.claims.items() if round > claims), default=float("inf"))
        committed = min((at for round, at in job.rounds.items() if round > before), default=float("inf"))
        who = "a member dies" if place else "a coordinator dies"
        bench.say("kill-member", f"{who}: until the claim is seen", claimed - died)
        bench.say("kill-member", f"{who}: until the commit is seen", committed - died)
        print(f"  {who} of {name}: claim {claimed - died:.2f} s, commit {committed - died:.2f} s", flush=True)


async def _all_train(bench: Bench, names: Collection[str] | None = None) -> None:
    """Wait until all jobs, or the jobs in `names`, train.

    The wait also covers the recovery from an earlier fault. A job may need several rounds for that.
    """
    await bench.jobs.until("train", time.time(), bench.options.limit, lambda _, job: job.trains, names)


async def kill_operator(bench: Bench) -> None:
    await _all_train(bench)
    rounds, heard = _rounds(bench), await bench.operator.heard()
    bench.operator.end()
    before = bench.begin()
    begun = await bench.operator.start()
    bench.say("kill-operator", "until the new one works", time.time() - begun)
    while (again := await bench.operator.heard()) < heard and time.time() < begun + bench.options.limit:
        await asyncio.sleep(LOOK_SECONDS)
    bench.say("kill-operator", "until all coordinators are heard", time.time() - begun if again >= heard else math.inf)
    bench.say("kill-operator", "coordinators that were heard before", heard)
    await asyncio.sleep(SECOND_THOUGHTS_SECONDS)
    bench.say("kill-operator", "jobs that begin a round", _begun(bench, rounds))
    await bench.measured("kill-operator", before, bench.size.jobs, "a job")


async def kill_api_server(bench: Bench) -> None:
    await _all_train(bench)
    rounds = _rounds(bench)
    before, begun = bench.begin(), time.time()
    await asyncio.to_thread(start_again, bench.cluster, "kube-apiserver")
    bench.say("kill-api-server", "until it is ready", time.time() - begun)
    reached = await bench.jobs.until(
        "tell their progress", begun, bench.options.limit, lambda _, job: job.progress_at > begun
    )
    bench.say_reached("kill-api-server", "tell their progress", reached)
    bench.say("kill-api-server", "jobs that begin a round", _begun(bench, rounds))
    await bench.measured("kill-api-server", before, bench.size.jobs, "a job")


async def kill_nodes(bench: Bench) -> None:
    await _all_train(bench)
    on_nodes = await bench.jobs.on_nodes()
    dead = sorted(on_nodes, key=lambda node: -len(on_nodes[node]))[: bench.options.dead]  # Some nodes are empty.
    lost = sum((on_nodes[node] for node in dead), Counter[str]())
    before = {name: bench.jobs.seen[name].round for name in lost}
    used, begun = bench.begin(), time.time()
    for name in dead:
        await asyncio.to_thread(bench.hosts.kill, KillNode(name))
    bench.say("kill-nodes", "jobs with a replica on one of them", len(before))
    bench.say("kill-nodes", "replicas on them", lost.total())
    bench.say("kill-nodes", "all are dead", time.time() - begun)
    reached = await bench.jobs.until(
        "go on",
        begun,
        bench.options.limit,
        lambda name, job: job.round > before[name] and job.trains,
        before,
    )
    bench.say_reached("kill-nodes", "train in a new round", reached)
    await bench.measured("kill-nodes", used, max(1, len(before)), "a job")


async def delete_jobs(bench: Bench) -> None:
    names = sorted(bench.jobs.seen)[: bench.options.deleted]
    before, begun = bench.begin(), time.time()
    deleting = asyncio.create_task(bench.jobs.delete(names))
    reached = await bench.jobs.until("are gone", begun, bench.options.limit, lambda _, job: not job.uid, names)
    await deleting
    bench.say_reached("delete-jobs", "are gone", reached)
    begun = time.time()
    async with asyncio.TaskGroup() as both:
        both.create_task(bench.jobs.create(names, bench.size.replicas))
        await asyncio.sleep(0)
        reached = await bench.jobs.until("train", begun, bench.options.limit, lambda _, job: job.trains, names)
    bench.say_reached("delete-jobs", "that are made again train", reached)
    await bench.measured("delete-jobs", before, len(names), "a job")


def _rounds(bench: Bench) -> dict[str, int]:
    """Return the number of the newest round that the operator has begun for each job."""
    return {name: max(job.claims, default=0) for name, job in bench.jobs.seen.items()}


def _begun(bench: Bench, before: Mapping[str, int]) -> int:
    return sum(now > before[name] for name, now in _rounds(bench).items())


SCENARIOS: Mapping[str, Callable[[Bench], Coroutine[Any, Any, None]]] = {
    "run": run,
    "steady": steady,
    "kill-member": kill_member,
    "kill-operator": kill_operator,
    "kill-api-server": kill_api_server,
    "kill-nodes": kill_nodes,
    "delete-jobs": delete_jobs,
}


async def _beside(following: asyncio.Task[None], scenario: Coroutine[Any, Any, None]) -> None:
    """Run `scenario`. If `following`, the task that watches the jobs, fails meanwhile, raise its error at once.

    Without that task, the scenario would wait forever.
    """
    playing = asyncio.ensure_future(scenario)
    try:
        await asyncio.wait((playing, following), return_when=asyncio.FIRST_COMPLETED)
        await (playing if playing.done() else following)
    finally:
        playing.cancel()


async def play(size: Size, options: argparse.Namespace, tables: dict[str, dict[str, list[float]]]) -> None:
    with control_plane(print) as cluster:
        operator = Operator(cluster, options.operator)
        network = cluster.record.endpoints.address.rpartition(".")[0].rpartition(".")[0]
        with hosts.running(
            options.processes, options.nodes, cluster.kubeconfig, network, cluster.record.logs
        ) as simulated:
            await asyncio.to_thread(cluster.wait_nodes, [f"node-{number}" for number in range(options.nodes)])
            print(f"{options.nodes} nodes are ready", flush=True)
            await operator.start()
            async with Client(await access.load(str(cluster.kubeconfig))) as client:
                meter = Meter(cluster, {"operator": operator}, tuple(host.pid for host in simulated.each))
                requests = Requests(cluster.directory / AUDIT)
                bench = Bench(
                    size, options, cluster, operator, simulated, meter, requests, Jobs(client, options.workers), tables
                )
                following = asyncio.create_task(bench.jobs.follow())
                try:
                    for name, scenario in SCENARIOS.items():
                        if name in ("run", *options.only):
                            print(f"{size}: {name} ...", flush=True)
                            await _beside(following, scenario(bench))
                finally:
                    following.cancel()
                    operator.close()
                    for error, times in operator.errors().most_common():
                        print(f"the operator logged {times} times: {error}", flush=True)
    if not any(math.isinf(value) for table in tables.values() for values in table.values() for value in values):
        lifetime.forget(cluster.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=Size.parse, nargs="*")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="beside run")
    parser.add_argument("--workers", type=int, default=1, help="of each replica")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2, help="that nodes and agents share")
    parser.add_argument("--steady", type=float, default=30.0, help="seconds")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--dead", type=int, default=5, help="nodes that die at once, those with most jobs")
    parser.add_argument("--deleted", type=int, default=100, help="jobs that are deleted and made again")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that anything may take")
    parser.add_argument("--operator", default=AS_IT_COMES, help="what runs it; a profiler's command, say")
    parser.add_argument("--large", type=int, nargs="+", default=[], help="jobs of the largest size")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", type=Path, help="a folder with operators to run as many jobs beside, each alone")
    options = parser.parse_args()
    present_peers = kinds.found(options.peers) if options.peers else ()
    tables: dict[str, dict[str, list[float]]] = {}
    sizes, large = options.sizes, options.large
    if not sizes and not large:
        sizes, large = [Size(20, 4), Size(100, 4)], [30, 300]
    for size in sizes:
        try:
            asyncio.run(play(size, options, tables))
        except TimeoutError as error:
            print(error, flush=True)
            break
    for objects in large:
        asyncio.run(control_plane_memory.play(objects, tables.setdefault(f"{objects} large objects", {})))
    for size, peer in itertools.product(sizes, present_peers):
        table = tables[f"{size}, run, {peer.kind}"] = {}
        try:
            asyncio.run(peers.play(peer, size.jobs, size.replicas, options, table))
        except (TimeoutError, LocalClusterError) as error:
            print(f"{peer.kind}: {error}", flush=True)
    for title, table in tables.items():
        report.show(title, table)
    samples = {f"{title}: {row}": values for title, table in tables.items() for row, values in table.items()}
    report.write(options.json, "control-plane", samples, nodes=options.nodes, processes=options.processes)


if __name__ == "__main__":
    main()

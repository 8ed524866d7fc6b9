"""Faults of agents and workers: killed, stopped, restarted, slow."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from concertina.plan.observed import PodPhase

if TYPE_CHECKING:
    from simulation.parts.agents import AgentProcess
    from simulation.runs.world import World


def some(world: World, random: Random) -> AgentProcess | None:
    alive = [process for process in world.agents.values() if process.alive]
    return random.choice(alive) if alive else None


def kill_worker(world: World, random: Random) -> None:
    process = some(world, random)
    if process is not None and process.collective is not None:
        world.tell(f"a worker of {process.replica} is killed")
        process.collective.kill_worker(process, 9)


def die_passing_on(world: World, random: Random) -> None:
    """Let a coordinator die before it passes on one of the next messages: a Prepare, or an Assign."""
    world.passes_left = random.randint(0, 5)


def kill_agent(world: World, random: Random) -> None:
    if process := some(world, random):
        world.tell(f"the agent {process.replica} is killed")
        process.die()
        world.cluster.process_ended(process.pod, 137)


def restart_agent(world: World, random: Random) -> None:
    if process := some(world, random):
        world.tell(f"the container of {process.replica} restarts in place")
        world.cluster.restart_agent(process.pod)


def stop_agent(world: World, random: Random) -> None:
    if process := some(world, random):
        seconds = random.uniform(0.5, 30)
        world.tell(f"the agent {process.replica} is stopped for {seconds:.1f} s")
        world.trouble(process.host, seconds)
        world.clock.freeze(process, seconds)


def stop_workers(world: World, random: Random) -> None:
    process, seconds = some(world, random), random.uniform(1, 30)
    if process is not None and process.collective is not None:
        world.tell(f"the workers of {process.replica} are stopped for {seconds:.1f} s")
        process.collective.stopped[process.replica] = world.clock.now + seconds


def hang_worker(world: World, random: Random) -> None:
    """Make one worker compute forever. The others wait for it, and nothing fails."""
    process, seconds = some(world, random), random.uniform(1, 30)
    run = process.collective if process is not None else None
    if process is None or run is None or not run.first_step_at or run.over:
        return
    if world.cluster.spec.failure_policy.on_hang == "Replace":
        seconds = 1e9
    world.tell(f"rank {process.ranks[0]} of {process.replica} hangs{f' for {seconds:.1f} s' if seconds < 1e9 else ''}")
    run.hung[process.replica] = world.clock.now + seconds
    world.invariants.stood_still[process.replica] = world.clock.now


def out_of_memory(world: World, random: Random) -> None:
    """Kill a container for lack of memory, including its agent."""
    if process := some(world, random):
        world.tell(f"the container of {process.replica} runs out of memory")
        process.die()
        world.cluster.process_ended(process.pod, 137, "OOMKilled")


def break_replica(world: World, random: Random) -> None:
    index, seconds = random.randrange(world.replicas), random.uniform(2, 30)
    world.tell(f"containers of replica {index} end as soon as they start, for {seconds:.1f} s")
    world.cluster.broken[index] = world.clock.now + seconds
    pods = [pod for pod in world.cluster.pods.values() if pod.index == index and pod.phase is PodPhase.RUNNING]
    for pod in pods:
        world.cluster.restart_agent(world.cluster.hosted[pod.name])


def damage_snapshots(world: World, random: Random) -> None:
    """Damage the snapshots of one step, or of all steps, in one replica's memory.

    The snapshot of the last step is left out: a damaged one can't be shipped, and no later one takes its place. Nothing
    is damaged while storage is away, because a restart from the checkpoint needs it, and a job may have only two of
    them.
    """
    process = some(world, random)
    if process is not None and world.storage.up:
        keys = [key for key in process.pod.volume if key[0].step < world.steps]
        newest = max((id.step for id, _ in keys), default=0)
        hit = keys if random.random() < 0.5 else [key for key in keys if key[0].step == newest]
        world.tell(f"{len(hit)} shards that {process.replica} holds are damaged")
        process.pod.damaged.update(hit)


def slow_starts(world: World, random: Random) -> None:
    """Set a condition of the run: imports take their time."""
    world.warm_seconds = random.uniform(2, 60)
    world.tell(f"agents need up to {world.warm_seconds:.0f} s to warm up")

"""Faults and changes of what stands around the job: API server, storage, operators, and people."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.runs.world import World


def delete_pod(world: World, random: Random) -> None:
    pods = sorted(world.cluster.pods)
    if pods:
        name, force = random.choice(pods), random.random() < 0.3
        world.tell(f"someone deletes {name}{' by force' if force else ''}")
        world.cluster.remove(name, force)


def preempt_all(world: World, random: Random) -> None:
    """The scheduler needs the room of the whole job."""
    grace = random.choice((0.5, 3.0, 10.0))
    world.tell(f"all pods are preempted, with {grace:g} s to go")
    for name in sorted(world.cluster.pods):
        world.cluster.preempt(name, grace)


def storage_down(world: World, random: Random) -> None:
    seconds = random.uniform(0.5, 15)
    world.tell(f"storage is away for {seconds:.1f} s")
    world.storage.down_until = world.clock.now + seconds


def api_down(world: World, random: Random) -> None:
    seconds = random.uniform(0.5, 10)
    world.tell(f"the API server is away for {seconds:.1f} s")
    world.cluster.down_until = world.clock.now + seconds


def quota(world: World, random: Random) -> None:
    seconds = random.uniform(1, 15)
    world.tell(f"the quota is used up for {seconds:.1f} s")
    world.cluster.quota_until = world.clock.now + seconds


def scale(world: World, random: Random) -> None:
    spec = world.cluster.spec
    floor = (spec.elastic and spec.elastic.min_replicas) or 1
    replicas = random.randint(floor, world.replicas + 1)
    world.tell(f"kubectl scale --replicas={replicas}")
    world.cluster.edit(replicas=replicas)


def suspend(world: World, random: Random) -> None:
    world.tell("spec.suspend is set")
    world.cluster.edit(suspend=True)
    world.clock.after(random.uniform(0.5, 20), resume, world)


def resume(world: World) -> None:
    if world.cluster.spec.suspend:
        world.tell("spec.suspend is unset")
        world.cluster.edit(suspend=False)


def kill_operator(world: World, random: Random) -> None:
    operator = world.operators[-1]
    if operator.alive:
        operator.kill()
        world.clock.after(random.uniform(0.1, 5), world.start_operator)


def second_operator(world: World, random: Random) -> None:
    """The first is deposed, and does not know it yet."""
    old = world.operators[-1]
    world.start_operator()
    if old.alive:
        world.clock.after(random.uniform(0.5, 15), old.kill_if_alive)


def stop_operator(world: World, random: Random) -> None:
    """Paused (SIGSTOP); often another one takes over before it wakes up, deposed, with all that it meant to do."""
    old, seconds = world.operators[-1], random.uniform(0.5, 20)
    if not old.alive:
        return
    world.tell(f"{old.name} is stopped for {seconds:.1f} s")
    world.clock.freeze(old, seconds)
    if random.random() < 0.5:
        world.start_operator()
        world.clock.after(seconds + random.uniform(0.05, 5), old.kill_if_alive)


def crashing_operators(world: World, random: Random) -> None:
    """A condition: operators die between two writes."""
    world.operator_crash = random.choice((0.01, 0.05))

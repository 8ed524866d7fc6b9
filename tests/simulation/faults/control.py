"""Faults and changes of the job's surroundings: API server, storage, operators, and people."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from concertina.kube.errors import Forbidden, Invalid, WebhookFailed
from simulation.parts.cluster import Conflict

if TYPE_CHECKING:
    from simulation.runs.world import World


def delete_pod(world: World, random: Random) -> None:
    pods = sorted(world.cluster.pods)
    if pods:
        name, force = random.choice(pods), random.random() < 0.3
        world.tell(f"someone deletes {name}{' by force' if force else ''}")
        world.cluster.remove(name, force)


def preempt_all(world: World, random: Random) -> None:
    """Make the scheduler preempt all pods of the job."""
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


HOOK = 'admission webhook "policy.example.com"'
REFUSALS: tuple[Exception, ...] = (
    Forbidden(403, "Forbidden", f"{HOOK} denied the request: not in these hours"),
    Forbidden(403, "Forbidden", 'pods "job" is forbidden: error looking up service account: serviceaccount not found'),
    Forbidden(403, "Forbidden", 'pods "job" is forbidden: not yet ready to handle request'),
    Invalid(422, "Invalid", 'Pod "job" is invalid: spec.containers[0].image: Invalid value: a policy is being changed'),
    WebhookFailed(500, "InternalError", 'failed calling webhook "policy.example.com": connection refused'),
    Conflict("the server was unable to return a response in the time allotted"),
)
"""Answers to creates of pods while an admission plugin or a webhook fails, or answers too late."""


def refused_pods(world: World, random: Random) -> None:
    """Refuse all creates of pods for a while. The existing replicas must continue."""
    error, seconds = random.choice(REFUSALS), random.uniform(3, 40)
    world.tell(f"no pod can be made for {seconds:.1f} s: {error}")
    world.cluster.refuse(error, seconds)
    _watch_on(world)


def _watch_on(world: World) -> None:
    if world.cluster.refuses:
        world.invariants.goes_on()
        world.clock.after(1.0, _watch_on, world)


def slow_api(world: World, random: Random) -> None:
    """Make the API server take seconds for each write, and deliver its events late, in order."""
    least, most, seconds = random.uniform(0.1, 1), random.uniform(1, 6), random.uniform(3, 20)
    world.tell(f"the API server answers after {least:.1f} to {most:.1f} s, for {seconds:.1f} s")
    world.cluster.slow_down(least, most, seconds)


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


def delete_held_job(world: World, random: Random) -> None:
    world.tell("the job is deleted, and a finalizer holds it")
    world.cluster.delete_job("example.com/archive")


def kill_operator(world: World, random: Random) -> None:
    operator = world.operators[-1]
    if operator.alive:
        operator.kill()
        world.clock.after(random.uniform(0.1, 5), world.start_operator)


def second_operator(world: World, random: Random) -> None:
    """Start a second operator that deposes the first one, which does not know that yet."""
    old = world.operators[-1]
    world.start_operator()
    if old.alive:
        world.clock.after(random.uniform(0.5, 15), old.kill_if_alive)


def stop_operator(world: World, random: Random) -> None:
    """Pause an operator (SIGSTOP).

    Often another operator takes over before it continues. It is then deposed, and still has everything that it was
    about to do.
    """
    old, seconds = world.operators[-1], random.uniform(0.5, 20)
    if not old.alive:
        return
    world.tell(f"{old.name} is stopped for {seconds:.1f} s")
    world.clock.freeze(old, seconds)
    if random.random() < 0.5:
        world.start_operator()
        world.clock.after(seconds + random.uniform(0.05, 5), old.kill_if_alive)


def crashing_operators(world: World, random: Random) -> None:
    """Set a condition of the run: operators die between two writes."""
    world.operator_crash = random.choice((0.01, 0.05))

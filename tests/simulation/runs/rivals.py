"""Jobs that need the same nodes: several worlds on one clock, whose pods take each other's room."""

from __future__ import annotations

import dataclasses
from random import Random

from concertina.api.status import JobStatus
from concertina.kube.parse.room import fits_quota
from concertina.plan.facts import sizes
from concertina.plan.lifecycle import room
from concertina.plan.lifecycle.admission import Waiting, by_quota, waiting
from concertina.plan.observed import Competitor, Hindrance
from simulation.parts.clock import START, Clock, Violation
from simulation.parts.network import Network
from simulation.parts.operators import OperatorProcess
from simulation.runs.schedule import SPAN, Strike
from simulation.runs.world import World

LIMIT = 3000.0
"""Virtual seconds within which all jobs have to be complete: turns last minutes."""
LAG = 6.0
"""Seconds by which an operator's picture of the line may be late."""
FAULTS = ("kill_worker", "kill_agent", "restart_agent", "delete_pod", "quota", "api_down", "kill_operator")


class Rivalry:
    """A node has room for one pod. No two of the jobs fit at once. In every fourth seed one more job, which would go
    first, can never start: no node is what it asks for, it is too large, or a quota is too small for it."""

    def __init__(self, seed: int, faults: bool = True) -> None:
        self.clock = Clock(seed)
        self.network = Network(self.clock)
        random = self.clock.random
        self.nodes = random.randint(2, 5)
        self.worlds: list[World] = []
        self._ahead: dict[int, float] = {}
        """Number of a job -> when another was last seen to wait that comes first."""
        self._beside: dict[int, float] = {}
        """The same of any other that waits in line."""
        self._waiting: dict[int, tuple[Competitor, Hindrance | None] | None] = {}
        for _ in range(random.choice((2, 2, 3))):
            strikes = sorted(random.uniform(0.0, SPAN) for _ in range(random.randint(0, 3))) if faults else ()
            schedule = tuple(Strike(at, random.choice(FAULTS), random.getrandbits(32)) for at in strikes)
            world = World(seed, schedule=schedule, rivalry=self)
            world.cluster.priority = random.choice((0, 0, 10))
            self.worlds.append(world)
            world.start_operator()
        self.able = len(self.worlds)
        """So many of the jobs can start: the first ones."""
        if seed % 4 == 1:
            self._add_one_that_can_not_start(Random(f"impossible of {seed}"), seed)

    def _add_one_that_can_not_start(self, random: Random, seed: int) -> None:
        world = World(seed, schedule=(), rivalry=self)
        cluster, why = world.cluster, random.choice((Hindrance.EXCLUDED, Hindrance.TOO_LARGE, Hindrance.BEYOND_QUOTA))
        world.replicas = self.nodes + (random.randint(1, 2) if why is Hindrance.TOO_LARGE else 0)
        cluster.spec = cluster.spec.model_copy(update={"replicas": world.replicas, "elastic": None})
        cluster.excluded = why is Hindrance.EXCLUDED
        cluster.quota = random.randint(0, world.replicas - 1) if why is Hindrance.BEYOND_QUOTA else None
        cluster.priority = 20
        self.worlds.append(world)
        world.start_operator()

    def replicas(self) -> int:
        return self.clock.random.randint(self.nodes // 2 + 1, self.nodes)

    def full(self, node: str) -> bool:
        pods = (pod for world in self.worlds for pod in world.cluster.pods.values())
        return any(pod.node == node and not pod.ended for pod in pods)

    # --- the line

    def seen_by(self, operator: OperatorProcess) -> tuple[Competitor, ...]:
        """As the shell finds them, in `concertina.controller.cache`: who waits is told as soon as the line changes."""
        mine = self.worlds.index(operator.world)
        line = {number: self._wait(world.operators[-1]) for number, world in enumerate(self.worlds) if world.operators}
        line[mine] = self._wait(operator)
        for number, place in line.items():
            competitor = (place.competitor, place.hindrance) if place else None
            if self._waiting.get(number) != competitor:
                self._waiting[number] = competitor
                for other, waits in line.items():
                    if other != number and waits and (waits.held or waits.away):
                        self.worlds[other].operators[-1].trigger()
        namespace = operator.job_view.namespace
        return tuple(
            place.competitor
            for number, place in line.items()
            if place and number != mine and line[mine] and place.needs_room_in(namespace)
        )

    def hindrance(self, operator: OperatorProcess) -> Hindrance | None:
        least, refused = sizes.least(operator.job_view.spec), operator.refused
        quota = fits_quota(refused.message) if refused else None
        return room.hindrance(least, operator.pods.values(), operator.nodes, quota)

    def _wait(self, operator: OperatorProcess) -> Waiting | None:
        found = waiting(operator.job_view, operator.pods.values(), by_quota(operator.refused))
        return dataclasses.replace(found, hindrance=self.hindrance(operator)) if found else None

    def status_written(self, world: World, old: JobStatus, new: JobStatus) -> None:
        """Nobody gives way to nobody: who goes first keeps what it has, for its turn at least; and nobody waits for
        what can never start."""
        number, now = self.worlds.index(world), self.clock.now
        for other, waits in self._waiting.items():
            if other == number or not waits or waits[0].deferred or other >= self.able:
                continue
            self._beside[number] = now
            if self._first(waits[0], other, number, old):
                self._ahead[number] = now
        if not new.internal.gang.since or old.internal.gang.since or number >= self.able:
            return
        if self._beside.get(number, 0.0) < now - LAG:
            raise Violation(f"{world.name} gives way, and nobody else can start: {new.internal.gang.message}")
        if not new.internal.gang.until and self._ahead.get(number, 0.0) < now - LAG:
            raise Violation(f"{world.name} gives way, and nobody is ahead of it: {new.internal.gang.message}")

    def _first(self, competitor: Competitor, other: int, number: int, status: JobStatus) -> bool:
        """Priority, then who has trained, then age."""
        mine = (-self.worlds[number].cluster.priority, not status.world.members, number)
        return (-competitor.priority, not competitor.trained, other) < mine

    # --- a run

    def run(self) -> None:
        """Raises Violation."""
        able = self.worlds[: self.able]
        if not self.clock.run(START + LIMIT, lambda: all(world.over() for world in able)):
            late = [f"{world.name}: {world.status.condition('Running')}" for world in able if not world.over()]
            raise Violation(f"not complete after {LIMIT:.0f} s: {late}")
        for world in able:
            world.check()

    def story(self) -> str:
        sizes = ", ".join(
            f"{world.name} {world.replicas} (at least {world.cluster.spec.min_replicas}) of priority "
            f"{world.cluster.priority}"
            for world in self.worlds
        )
        lines = [f"{at - START:8.3f}  {text}" for at, text in self.clock.story[-80:]]
        return "\n".join([f"{self.nodes} nodes; {sizes}", *lines])

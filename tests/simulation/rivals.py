"""Jobs that need the same nodes: several worlds on one clock, whose pods take each other's room."""

from __future__ import annotations

from concertina.api.status import JobStatus
from concertina.plan.gang import Waiting, by_quota, waiting
from concertina.plan.types import Rival
from simulation.clock import Clock, Violation
from simulation.network import Network
from simulation.operators import OperatorProcess
from simulation.schedule import SPAN, Strike
from simulation.world import World

LIMIT = 3000.0
"""Virtual seconds within which all jobs have to be complete: turns last minutes."""
LAG = 6.0
"""Seconds by which an operator's picture of the line may be late."""
FAULTS = ("kill_worker", "kill_agent", "restart_agent", "delete_pod", "quota", "api_down", "kill_operator")


class Rivalry:
    """A node has room for one pod. No two of the jobs fit at once."""

    def __init__(self, seed: int, faults: bool = True) -> None:
        self.clock = Clock(seed)
        self.network = Network(self.clock)
        random = self.clock.random
        self.nodes = random.randint(2, 5)
        self.worlds: list[World] = []
        self._ahead: dict[int, float] = {}
        """Number of a job -> when another was last seen to wait that comes first."""
        self._waiting: dict[int, Rival | None] = {}
        for _ in range(random.choice((2, 2, 3))):
            strikes = sorted(random.uniform(0.0, SPAN) for _ in range(random.randint(0, 3))) if faults else ()
            schedule = tuple(Strike(at, random.choice(FAULTS), random.getrandbits(32)) for at in strikes)
            world = World(seed, schedule=schedule, rivalry=self)
            world.cluster.priority = random.choice((0, 0, 10))
            self.worlds.append(world)
            world.start_operator()

    def replicas(self) -> int:
        return self.clock.random.randint(self.nodes // 2 + 1, self.nodes)

    def full(self, node: str) -> bool:
        pods = (pod for world in self.worlds for pod in world.cluster.pods.values())
        return any(pod.node == node and not pod.ended for pod in pods)

    # --- the line

    def seen_by(self, operator: OperatorProcess) -> tuple[Rival, ...]:
        """As the shell finds them, in `concertina.world`: who waits is told as soon as the line changes."""
        mine = self.worlds.index(operator.world)
        line = {number: self._wait(world.operators[-1]) for number, world in enumerate(self.worlds) if world.operators}
        line[mine] = self._wait(operator)
        for number, place in line.items():
            rival = place.rival if place else None
            if self._waiting.get(number) != rival:
                self._waiting[number] = rival
                for other, waits in line.items():
                    if other != number and waits and (waits.held or waits.away):
                        self.worlds[other].operators[-1].trigger()
        return tuple(place.rival for number, place in line.items() if place and number != mine and line[mine])

    def _wait(self, operator: OperatorProcess) -> Waiting | None:
        return waiting(operator.job_view, operator.pods.values(), by_quota(operator.refused))

    def status_written(self, world: World, old: JobStatus, new: JobStatus) -> None:
        """Nobody gives way to nobody: who goes first keeps what it has, for its turn at least."""
        number, now = self.worlds.index(world), self.clock.now
        for other, rival in self._waiting.items():
            if other != number and rival and not rival.aside and self._first(rival, other, number, old):
                self._ahead[number] = now
        if new.gang.since and not old.gang.since and not new.gang.until and self._ahead.get(number, 0.0) < now - LAG:
            raise Violation(f"{world.name} gives way, and nobody is ahead of it: {new.gang.message}")

    def _first(self, rival: Rival, other: int, number: int, status: JobStatus) -> bool:
        """Priority, then who has trained, then age."""
        mine = (-self.worlds[number].cluster.priority, not status.world.members, number)
        return (-rival.priority, not rival.trained, other) < mine

    # --- a run

    def run(self) -> None:
        """Raises Violation."""
        if not self.clock.run(1000.0 + LIMIT, lambda: all(world.over() for world in self.worlds)):
            late = [f"{world.name}: {world.status.condition('Running')}" for world in self.worlds if not world.over()]
            raise Violation(f"not complete after {LIMIT:.0f} s: {late}")
        for world in self.worlds:
            world.check()

    def story(self) -> str:
        sizes = ", ".join(
            f"{world.name} {world.replicas} (at least {world.cluster.spec.min_replicas}) of priority "
            f"{world.cluster.priority}"
            for world in self.worlds
        )
        lines = [f"{at - 1000:8.3f}  {text}" for at, text in self.clock.story[-80:]]
        return "\n".join([f"{self.nodes} nodes; {sizes}", *lines])

"""Jobs that compete for the same nodes: several worlds on one clock, whose pods take each other's room."""

from __future__ import annotations

from random import Random

from concertina.api.status import JobStatus
from concertina.controller.cache.capacity_queue import CapacityQueue
from concertina.controller.cache.job import CachedJob
from concertina.plan.lifecycle.admission import TURN_TIMEOUT, by_quota
from concertina.plan.lifecycle.line import waiting
from concertina.plan.observed import BlockedBy, NodeView, QueuePlace
from simulation.parts.clock import START, Clock, Violation
from simulation.parts.network import Network
from simulation.parts.operators import OperatorProcess
from simulation.runs.schedule import SPAN, Strike
from simulation.runs.world import World

LIMIT = 3000.0
"""Virtual seconds within which all jobs have to be complete; turns last minutes."""
LAG = 6.0
"""Seconds by which an operator's view of the queue may be late."""
FAULTS = ("kill_worker", "kill_agent", "restart_agent", "delete_pod", "quota", "api_down", "kill_operator")


class Rivalry:
    """Competition of several jobs, of which no two fit at once. A node has room for one pod.

    In every fourth seed there is one more job that would come first and can never start: no node fulfils its requests,
    it is too large, or a quota is too small for it.
    """

    def __init__(self, seed: int, faults: bool = True) -> None:
        self.clock = Clock(seed)
        self.network = Network(self.clock)
        random = self.clock.random
        self.nodes = random.randint(2, 5)
        self.worlds: list[World] = []
        self._jobs: dict[str, CachedJob] = {}
        """Jobs by uid, as the last look of their operators found them."""
        self._nodes: dict[str, NodeView] = {}
        self._queue = CapacityQueue(self._jobs, self._nodes, self._trigger, self.clock.after)
        self._waits: dict[int, int] = {}
        """Priority of the pods, by the number of each job that waited at the last look."""
        self._beside: dict[int, dict[int, float]] = {}
        """For each job, the time at which each other job that can start was last seen to wait."""
        self._turns: dict[int, float] = {}
        """Time at which the current turn of a job began, by its number."""
        for _ in range(random.choice((2, 2, 3))):
            strikes = sorted(random.uniform(0.0, SPAN) for _ in range(random.randint(0, 3))) if faults else ()
            schedule = tuple(Strike(at, random.choice(FAULTS), random.getrandbits(32)) for at in strikes)
            world = World(seed, schedule=schedule, rivalry=self)
            world.cluster.priority = random.choice((0, 0, 10))
            self.worlds.append(world)
            world.start_operator()
        self.able = len(self.worlds)
        """Number of jobs that can start: the first ones."""
        if seed % 4 == 1:
            self._add_one_that_can_not_start(Random(f"impossible of {seed}"), seed)

    def _add_one_that_can_not_start(self, random: Random, seed: int) -> None:
        world = World(seed, schedule=(), rivalry=self)
        cluster, why = world.cluster, random.choice((BlockedBy.EXCLUDED, BlockedBy.TOO_LARGE, BlockedBy.BEYOND_QUOTA))
        world.replicas = self.nodes + (random.randint(1, 2) if why is BlockedBy.TOO_LARGE else 0)
        cluster.spec = cluster.spec.model_copy(update={"replicas": world.replicas, "elastic": None})
        cluster.excluded = why is BlockedBy.EXCLUDED
        cluster.quota = random.randint(0, world.replicas - 1) if why is BlockedBy.BEYOND_QUOTA else None
        cluster.priority = 20
        self.worlds.append(world)
        world.start_operator()

    def replicas(self) -> int:
        return self.clock.random.randint(self.nodes // 2 + 1, self.nodes)

    def full(self, node: str) -> bool:
        pods = (pod for world in self.worlds for pod in world.cluster.pods.values())
        return any(pod.node == node and not pod.ended for pod in pods)

    # --- the line

    def place(self, operator: OperatorProcess) -> QueuePlace | None:
        """Return the job's place as the shell computes it, in `concertina.controller.cache`."""
        world, view, refused = operator.world, operator.job_view, operator.refused
        number = self.worlds.index(world)
        self._jobs[world.uid] = CachedJob(view, 0, {}, dict(operator.pods), refused=refused)
        if self._nodes != operator.nodes:
            self._nodes.clear()
            self._nodes.update(operator.nodes)
            self._queue.room_changed()
        self._queue.job_changed(world.uid)
        waits = waiting(view, operator.pods.values(), by_quota(refused))
        if waits:
            self._waits[number] = waits.priority
        else:
            self._waits.pop(number, None)
        return self._queue.place(world.uid)

    def _trigger(self, uid: str) -> None:
        for world in self.worlds:
            if world.uid == uid and world.operators:
                world.operators[-1].trigger()

    def status_written(self, world: World, old: JobStatus, new: JobStatus) -> None:
        """Check the turns of the jobs after a status was written.

        A job keeps its room while no other job waits, and for its whole turn. It releases its room to no job of a lower
        priority before it has had a turn. No job waits for a job that can never start.

        Raises:
            Violation: If it does not hold.
        """
        number, now = self.worlds.index(world), self.clock.now
        beside = self._beside.setdefault(number, {})
        beside.update(
            {other: now for other in self._waits if other not in (number, *range(self.able, len(self.worlds)))}
        )
        before, after, began = old.internal.requeue_state, new.internal.requeue_state, self._turns.get(number, now)
        if not after.turn:
            self._turns.pop(number, None)
        elif after.turn != before.turn:
            self._turns[number] = now
        passes = after.passed != before.passed and after.passed is not None
        if number >= self.able or not (passes or (after.since and not before.since)):
            return
        others = [other for other, at in beside.items() if at > now - LAG]
        if not others:
            raise Violation(f"{world.name} gives way, and nobody else can start: {after.message}")
        if passes:
            if now - began < TURN_TIMEOUT - LAG and "would not help" not in after.message:
                raise Violation(f"{world.name} gives way after {now - began:.1f} s of its turn: {after.message}")
        elif not before.passed and not any(
            self.worlds[other].cluster.priority >= world.cluster.priority for other in others
        ):
            raise Violation(f"{world.name} gives way to one of a lower priority: {after.message}")

    # --- a run

    def run(self) -> None:
        """Run all jobs to their ends.

        Raises:
            Violation: If it does not hold.
        """
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

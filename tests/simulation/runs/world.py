"""One run: a job, its cluster, operators and faults, from a seed."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import concertina_protocol as p
from concertina.api.status import JobStatus
from simulation.faults import control
from simulation.faults.table import BY_NAME
from simulation.invariants import Invariants
from simulation.parts.agents import AgentProcess
from simulation.parts.clock import START, Clock, Violation
from simulation.parts.cluster import Cluster
from simulation.parts.collective import Collective
from simulation.parts.lineage import steps_of
from simulation.parts.network import Network
from simulation.parts.operators import OperatorProcess
from simulation.parts.storage import Storage
from simulation.parts.survivors import Stay, Survivors
from simulation.rollbacks import Rollbacks
from simulation.runs.job import job_spec
from simulation.runs.schedule import SPAN, Schedule, Strike, draw

if TYPE_CHECKING:
    from simulation.runs.rivals import Rivalry

LARGER = 8
"""Number of replicas of a job in blocks."""
LIMIT = 400.0
"""Virtual seconds after the last fault within which the job has to be complete."""


class World:
    def __init__(
        self,
        seed: int,
        calm: bool = False,
        schedule: Schedule | None = None,
        salt: int = 0,
        rivalry: Rivalry | None = None,
        parallelism: Mapping[str, int] | None = None,
        key: str = "",
        stay: Stay = Stay.ENDS,
    ) -> None:
        """Create the world of a seed.

        Args:
            schedule: Faults instead of those that the seed draws.
            salt: Another sequence of random numbers for the same job.
            rivalry: Competition with other jobs for the cluster.
            parallelism: Parallelism of a larger job, in blocks.
            key: Id of the operators' master key.
            stay: Whether workers outlive their rounds.
        """
        self.key = key
        self.seed, self.rivalry = seed, rivalry
        self.clock = rivalry.clock if rivalry else Clock(seed)
        chance, random = self.clock.chance, self.clock.random
        self.name = f"job{len(rivalry.worlds) if rivalry else ''}"
        self.uid = f"{self.name}-uid"
        self.network = rivalry.network if rivalry else Network(self.clock)
        self.storage = Storage(self.clock, self.uid)
        self.invariants = Invariants(self)
        self.survivors = Survivors(self, stay, seed, salt)
        self.rollbacks = Rollbacks(self)
        self.spoilt: dict[int, float] = {}
        """Loss of a batch that contains a sample, by the sample's position."""
        self.agents: dict[str, AgentProcess] = {}
        """Agents by pod name; a process that died remains until another one takes its place."""
        self.replicas = rivalry.replicas() if rivalry else random.choice((1, 2, 2, 3, 3, 4))
        self.parallelism = parallelism or {}
        if parallelism:
            self.replicas = LARGER
        least = self.replicas if chance(0.3) else random.randint(1, self.replicas)
        self.workers = random.choice((1, 1, 2))
        self.steps = random.randint(12, 40)
        self.step_seconds = random.choice((0.2, 0.5, 1.0))
        if seed % 8 == 3:  # long enough for stragglers to be found
            self.steps, self.step_seconds = random.randint(60, 90), 0.2
        self.slow_nodes: dict[str, float] = {}
        """Factor by which steps take longer on a node, by node."""
        self.starved: dict[str, float] = {}
        """Seconds by which the workers of a node's agents end late, by node."""
        self.checkpoint_every = random.choice((3, 5, 10))
        self.claims = 0
        self.calm = calm
        job = job_spec(self, least, calm)
        nodes = rivalry.nodes if rivalry else self.replicas + random.randint(0, 1)
        self.cluster = Cluster(self, nodes, job)
        self.collectives: dict[tuple[int, str], Collective] = {}
        self.operators: list[OperatorProcess] = []
        self.troubles: dict[str, float] = {}
        if salt:
            self.clock.random.seed(f"{seed}/{salt}")
        self.mended = False
        self.operator_crash, self.warm_seconds = 0.0, 0.5
        self.passes_left: int | None = None
        """Number of messages that are still passed on before a coordinator dies; None if none dies of it."""
        self.clocks: dict[str, float] = {}
        """Seconds by which a host's clock is ahead, by host."""
        for strike in draw(seed, calm) if schedule is None else schedule:
            if strike.at:
                self.clock.after(strike.at, self._strike, strike)
            else:
                BY_NAME[strike.name](self, strike.random)
        self.clock.after(SPAN, self._mend)
        if rivalry is None:
            self.start_operator()

    def _strike(self, strike: Strike) -> None:
        if not self.calm or self.status.progress is not None:
            BY_NAME[strike.name](self, strike.random)

    def _mend(self) -> None:
        self.mended = True
        self.tell("all faults end")
        self.network.heal()
        self.clock.thaw()
        control.resume(self)
        for node in sorted(self.network.dead):
            self.cluster.node_back(node)
        self.storage.down_until = 0.0
        self.cluster.mend()
        self.slow_nodes.clear()
        self.starved.clear()
        self.invariants.slow_until = dict.fromkeys(self.cluster.nodes, self.clock.now + 20.0)
        for collective in self.collectives.values():
            collective.stopped.clear()
            if self.cluster.spec.failure_policy.on_hang == "Report":
                collective.hung.clear()

    def tell(self, text: str) -> None:
        self.clock.tell(f"{self.name}: {text}" if self.rivalry else text)

    def clock_of(self, host: str) -> float:
        return self.clocks.get(host, 0.0)

    def warm_up(self) -> float:
        return self.clock.between(0.05, self.warm_seconds)

    def collective(self, assign: p.Assign) -> Collective:
        key = (assign.round, assign.claim)
        known = self.collectives.setdefault(key, Collective(self, assign))
        if known.assign != assign:
            raise Violation(f"round {assign.round} is assigned in two ways")
        return known

    def start_operator(self) -> None:
        name = f"operator-{len(self.operators)}"
        self.tell(f"{name} starts")
        self.operators.append(OperatorProcess(self, name, self.key))

    def crashes_operator(self, operator: OperatorProcess) -> bool:
        """Return whether the operator dies between two writes. If so, it is killed, and another one starts soon."""
        early = self.calm and self.status.progress is None
        if self.mended or early or not self.clock.chance(self.operator_crash):
            return False
        operator.kill()
        self.clock.after(self.clock.between(0.1, 3.0), self.start_operator)
        return True

    def dies_passing_on(self) -> bool:
        """Return whether the coordinator dies instead of passing a message on, and count the message otherwise."""
        left = self.passes_left
        self.passes_left = left - 1 if left else None
        return left == 0

    def trouble(self, node: str, seconds: float) -> None:
        """Allow that pods of this node are taken for lost, until a while after."""
        self.troubles[node] = max(self.troubles.get(node, 0.0), self.clock.now + seconds + 10.0)

    def troubled(self, node: str) -> bool:
        return self.troubles.get(node, 0.0) > self.clock.now - self.cluster.late

    @property
    def status(self) -> JobStatus:
        return self.cluster.status

    def over(self) -> bool:
        return self.status.completion_time is not None

    def run(self) -> None:
        """Run the job to its end.

        Raises:
            Violation: If it does not hold.
        """
        if not self.clock.run(START + SPAN + LIMIT, self.over):
            ready = self.status.condition("Running")
            raise Violation(f"not complete {LIMIT} s after the last fault: {ready}")
        self.check()

    def check(self) -> None:
        """Check the state at the end.

        Raises:
            Violation: If it does not hold.
        """
        failed = self.status.condition("Failed")
        if failed and failed.status == "True":
            if self.invariants.deceived and failed.reason == "ReachedMaxRestarts":
                return  # The coordinator has reported too often that it failed.
            raise Violation(f"failed: {failed.message}")
        latest = self.storage.latest
        if latest is None or not latest.complete or latest.step != self.steps:
            raise Violation(f"complete, but LATEST is {latest}")
        lineage = self.storage.checkpoints[latest.uri]
        self.rollbacks.over(lineage)
        if steps_of(lineage) != self.steps:
            raise Violation(f"complete after {steps_of(lineage)} of {self.steps} steps")
        if self.calm and (self.status.rounds > 1 or self.status.restarts.total or self.cluster.deletes):
            raise Violation(f"a disturbed operator was noticed: {self.status.rounds} rounds, {self.cluster.deletes}")

    def story(self, last: int = 60) -> str:
        lines = [f"{at - START:8.3f}  {text}" for at, text in self.clock.story[-last:]]
        size = f"{self.replicas} replicas, at least {self.cluster.spec.min_replicas}, {self.workers} workers each"
        stay = f"survivors: {self.survivors.stay.name}"
        return "\n".join([f"seed {self.seed}: {size}, {self.steps} steps, {stay}", *lines])


class Failure(NamedTuple):
    story: str
    kind: str
    """Broken rule, without the figures."""
    invariant: bool
    """Whether an invariant detected the failure, and no other error was raised."""


def failure(
    seed: int, calm: bool = False, schedule: Schedule | None = None, salt: int = 0, stay: Stay | None = None
) -> Failure | None:
    """Return the failure of a run, or None if every invariant held. The seed draws `stay` if it is None."""
    world = World(seed, calm, schedule, salt, stay=stay or Stay.of(seed))
    try:
        world.run()
    except Violation as violation:
        return Failure(f"{world.story()}\n{violation}", _kind(str(violation)), True)
    except Exception as error:
        return Failure(f"{world.story()}\n{traceback.format_exc()}", _kind(repr(error)), False)
    return None


def _kind(text: str) -> str:
    return re.sub(r"\d+|:.*", "", text)[:60]

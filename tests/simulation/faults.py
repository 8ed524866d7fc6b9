"""What goes wrong, drawn from the seed: until FAULTS_END, then everything is mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.agents import AgentProcess
    from simulation.world import World

SPAN = 40.0


class Faults:
    def __init__(self, world: World, calm: bool) -> None:
        """`calm`: only the operator is disturbed, once training is under way, which must not be noticed."""
        self.world, self.clock, self.calm = world, world.clock, calm
        clock = world.clock
        self.ended = False
        self.operator_crash = clock.random.choice((0.0, 0.01, 0.05))
        world.network.unruly = not calm and clock.chance(0.6)
        table = CALM if calm else FAULTS
        for _ in range(clock.random.randint(0, 8)):
            clock.after(clock.between(0.0, SPAN), self._strike, clock.random.choice(table))
        clock.after(SPAN, self._mend)

    def _strike(self, fault: Callable[[Faults], None]) -> None:
        if not self.calm or self.world.status.progress is not None:
            fault(self)

    def operator_should_crash(self) -> bool:
        if self.calm and self.world.status.progress is None:
            return False
        return not self.ended and self.clock.chance(self.operator_crash)

    def _mend(self) -> None:
        self.ended = True
        self.clock.tell("all faults end")
        world = self.world
        world.network.heal()
        self._resume()
        for node in sorted(world.network.dead):
            world.cluster.node_back(node)
        world.storage.down_until = world.cluster.down_until = world.cluster.quota_until = 0.0
        world.cluster.broken.clear()

    # --- the faults

    def _process(self) -> AgentProcess | None:
        alive = [process for process in self.world.agents.values() if process.alive]
        return self.clock.random.choice(alive) if alive else None

    def _node(self) -> str:
        return self.clock.random.choice(sorted(self.world.cluster.nodes))

    def kill_worker(self) -> None:
        process = self._process()
        if process is not None and process.collective is not None:
            self.clock.tell(f"a worker of {process.replica} is killed")
            process.collective.kill_worker(process, 9)

    def kill_agent(self) -> None:
        if process := self._process():
            self.clock.tell(f"the agent {process.replica} is killed")
            process.die()
            self.world.cluster.process_ended(process.pod, 137)

    def restart_agent(self) -> None:
        if process := self._process():
            self.clock.tell(f"the container of {process.replica} restarts")
            self.world.cluster.restart_agent(process.pod)

    def delete_pod(self) -> None:
        pods = sorted(self.world.cluster.pods)
        if pods:
            name, force = self.clock.random.choice(pods), self.clock.chance(0.3)
            self.clock.tell(f"someone deletes {name}{' by force' if force else ''}")
            self.world.cluster.remove(name, force)

    def break_replica(self) -> None:
        index, seconds = self.clock.random.randrange(self.world.replicas), self.clock.between(2, 30)
        self.clock.tell(f"containers of replica {index} end as soon as they start, for {seconds:.1f} s")
        self.world.cluster.broken[index] = self.clock.now + seconds
        pods = [pod for pod in self.world.cluster.pods.values() if pod.index == index and pod.phase == "Running"]
        for pod in pods:
            self.world.cluster.restart_agent(self.world.cluster.hosted[pod.name])

    def kill_node(self) -> None:
        node = self._node()
        self.world.trouble(node, SPAN)
        self.world.cluster.kill_node(node)
        self.clock.after(self.clock.between(5, 30), self.world.cluster.node_back, node)

    def isolate_node(self) -> None:
        node, seconds = self._node(), self.clock.between(0.5, 25)
        self.clock.tell(f"{node} is cut off for {seconds:.1f} s")
        self.world.trouble(node, seconds)
        self.world.network.isolate(node, seconds)
        self.world.cluster.watch_node(node)

    def cut_operator(self) -> None:
        node, seconds = self._node(), self.clock.between(0.5, 25)
        operator = self.world.operators[-1].name
        self.clock.tell(f"{operator} and {node} can't reach each other for {seconds:.1f} s")
        self.world.trouble(node, seconds)
        self.world.network.cut(operator, node, seconds)

    def cut_all_from_operator(self) -> None:
        """The world is silent as a whole, and trains on; kubelets still reach the API server."""
        seconds, operator = self.clock.between(1, 40), self.world.operators[-1].name
        self.clock.tell(f"{operator} reaches no node for {seconds:.1f} s")
        if any(self.world.network.reaches(operator, node) for node in self.world.cluster.nodes):
            self.world.invariants.blind[operator] = self.clock.now
        for node in self.world.cluster.nodes:
            self.world.trouble(node, seconds)
            self.world.network.cut(operator, node, seconds)

    def cut_nodes(self) -> None:
        a, b = self._node(), self._node()
        if a != b:
            seconds = self.clock.between(0.5, 20)
            self.clock.tell(f"{a} and {b} can't reach each other for {seconds:.1f} s")
            self.world.network.cut(a, b, seconds)

    def storage_down(self) -> None:
        seconds = self.clock.between(0.5, 15)
        self.clock.tell(f"storage is away for {seconds:.1f} s")
        self.world.storage.down_until = self.clock.now + seconds

    def api_down(self) -> None:
        seconds = self.clock.between(0.5, 10)
        self.clock.tell(f"the API server is away for {seconds:.1f} s")
        self.world.cluster.down_until = self.clock.now + seconds

    def scale(self) -> None:
        spec = self.world.cluster.spec
        floor = (spec.elastic and spec.elastic.min_replicas) or 1
        replicas = self.clock.random.randint(floor, self.world.replicas + 1)
        self.clock.tell(f"kubectl scale --replicas={replicas}")
        self.world.cluster.edit(replicas=replicas)

    def suspend(self) -> None:
        self.clock.tell("spec.suspend is set")
        self.world.cluster.edit(suspend=True)
        self.clock.after(self.clock.between(0.5, 20), self._resume)

    def _resume(self) -> None:
        if self.world.cluster.spec.suspend:
            self.clock.tell("spec.suspend is unset")
            self.world.cluster.edit(suspend=False)

    def quota(self) -> None:
        self.world.cluster.quota_until = self.clock.now + self.clock.between(1, 15)

    def kill_operator(self) -> None:
        operator = self.world.operators[-1]
        if operator.alive:
            operator.kill()
            self.clock.after(self.clock.between(0.1, 5), self.world.start_operator)

    def second_operator(self) -> None:
        """Deposed, and does not know it yet."""
        old = self.world.operators[-1]
        self.world.start_operator()
        if old.alive:
            self.clock.after(self.clock.between(0.5, 15), self._depose, old.name)

    def _depose(self, name: str) -> None:
        for operator in self.world.operators:
            if operator.name == name and operator.alive:
                operator.kill()


FAULTS = (
    Faults.kill_worker,
    Faults.kill_worker,
    Faults.kill_agent,
    Faults.kill_agent,
    Faults.restart_agent,
    Faults.break_replica,
    Faults.delete_pod,
    Faults.kill_node,
    Faults.isolate_node,
    Faults.cut_operator,
    Faults.cut_all_from_operator,
    Faults.cut_nodes,
    Faults.storage_down,
    Faults.api_down,
    Faults.quota,
    Faults.scale,
    Faults.suspend,
    Faults.kill_operator,
    Faults.second_operator,
)
CALM = (Faults.kill_operator, Faults.second_operator, Faults.api_down)

"""API server's objects of one job, its nodes and kubelets, and the operators' caches of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

import concertina_protocol as p
from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus
from concertina.kube.errors import Forbidden
from concertina.plan.actions import CreatePod, DeletePod
from concertina.plan.observed import NodeView, PodPhase, PodView
from concertina_agent.core import events as e
from simulation.parts.agents import AgentProcess
from simulation.parts.clock import changed
from simulation.parts.lineage import Lineage

if TYPE_CHECKING:
    from simulation.runs.world import World

GRACE = 3.0
NOT_READY_AFTER = 8.0
EVICT_AFTER = 15.0
BACK_OFF, BACK_OFF_MOST = 5.0, 40.0
"""First and longest delay in seconds of containers that are restarted in place. The kubelet's delays are twice as long
and more."""
TERMINATED = "Terminated"
SLOW_WRITES = 20.0
"""Maximum time in seconds from a pass to the last of its writes, while the API server is slow."""


class Conflict(Exception):
    """A write has failed its precondition, or the API server or a webhook is unreachable."""


class JobVersion(NamedTuple):
    """Version of the TrainingJob that the API server has stored."""

    number: int
    status: JobStatus
    spec: JobSpec
    generation: int
    held_by: tuple[str, ...] = ()
    """Finalizers of a job that was deleted."""


@dataclasses.dataclass
class SimPod:
    """Pod as its node has it: its volume outlives its agent's process."""

    name: str
    uid: str
    node: str = ""
    starts: int = 0
    seen: tuple[int, str] = (0, "")
    volume: dict[tuple[p.SnapshotId, int], Lineage] = dataclasses.field(default_factory=dict)

    unfinished: dict[tuple[p.SnapshotId, int], Lineage] = dataclasses.field(default_factory=dict)
    """Files that are being written. Nobody holds such a shard."""

    damaged: set[tuple[p.SnapshotId, int]] = dataclasses.field(default_factory=set)
    """Damaged files, which nobody knows of before they are read."""

    discarded: set[tuple[p.SnapshotId, int]] = dataclasses.field(default_factory=set)
    """Files that were found to be damaged."""

    def begin(self, id: p.SnapshotId, shard: int, data: Lineage) -> None:
        """Begin to write a shard. `data` is what the file contains until it is complete."""
        self.unfinished[(id, shard)] = data

    def keep(self, id: p.SnapshotId, shard: int, data: Lineage) -> None:
        self.unfinished.pop((id, shard), None)
        self.volume[(id, shard)] = data
        self.damaged.discard((id, shard))

    def forget(self, id: p.SnapshotId, shard: int) -> None:
        """Record that a file was read and found to be damaged."""
        self.volume.pop((id, shard), None)
        self.damaged.discard((id, shard))
        self.discarded.add((id, shard))

    def held(self) -> tuple[p.HeldSnapshot, ...]:
        shards: dict[p.SnapshotId, list[int]] = {}
        for id, shard in self.volume:
            shards.setdefault(id, []).append(shard)
        return tuple(p.HeldSnapshot(id, tuple(sorted(numbers))) for id, numbers in shards.items())


class Cluster:
    def __init__(self, world: World, nodes: int, spec: JobSpec) -> None:
        self.world, self.clock = world, world.clock
        self.spec, self.status, self.generation = spec, JobStatus(), 1
        self.held_by: tuple[str, ...] = ()
        self._writes = 0
        self.pods: dict[str, PodView] = {}
        room = {"pods": Decimal(1), "cpu": Decimal(1)} if world.rivalry else {}
        self.nodes = {
            f"node-{i}": NodeView(f"node-{i}", ready=True, zone=f"zone-{i % 2}", allocatable=room) for i in range(nodes)
        }
        self.hosted: dict[str, SimPod] = {}
        """Agents by pod name, as long as the pod exists."""
        self.grace = GRACE
        """Grace period of the job's pods in seconds."""
        self.priority = 0
        """Priority of the job's pods."""
        self.down_until = 0.0
        self.slow_until, self._slow = 0.0, (0.0, 0.0)
        """Time until which the API server is slow, and the minimum and maximum seconds that an answer or an event then
        takes."""
        self.quota_until = 0.0
        self.refused_until = 0.0
        self._refusal: Exception = Conflict()
        """Answer to creates of pods, and the time until which it applies."""
        self.quota: int | None = None
        """Maximum number of pods, permanently."""
        self.excluded = False
        """Whether no node fulfils the requests of the job's pods."""
        self.listeners: list[Callable[[str], None]] = []
        self.deletes: list[str] = []
        self.made: set[tuple[str, str]] = set()
        """Name and uid of each pod that this job ever had."""
        self.no_image_until: dict[str, float] = {}
        """Time until which a node can't pull the image, by node."""
        self.stopped_until: dict[str, float] = {}
        """Time until which a node's kubelet is stopped, like all processes there, by node."""
        self.broken: dict[int, float] = {}
        """Time until which the containers of a replica end as soon as they start, by replica index."""
        self.failed_starts: dict[int, dict[str, float]] = {}
        """Pods that ended in this way, and when the API server learned of it, by replica index."""
        self.ending: set[str] = set()
        """Nodes that are shutting down."""
        self._uids = 0

    def mend(self) -> None:
        self.down_until = self.quota_until = self.refused_until = 0.0
        self.slow_until = min(self.slow_until, self.clock.now)
        for trouble in (self.broken, self.no_image_until, self.stopped_until):
            trouble.clear()
        for node in list(self.nodes):
            self.mark_node(node, notice="", cordoned=False)

    @property
    def restarts_in_place(self) -> bool:
        return self.spec.template.spec.restart_policy == "OnFailure"

    # --- the API

    @property
    def job(self) -> JobVersion:
        return JobVersion(self._writes, self.status, self.spec, self.generation, self.held_by)

    def slow_down(self, least: float, most: float, seconds: float) -> None:
        self.slow_until, self._slow = self.clock.now + seconds, (least, most)

    def slowness(self) -> float:
        """Return the additional seconds that the API server takes for an answer or an event."""
        return self.clock.between(*self._slow) if self.clock.now < self.slow_until else 0.0

    @property
    def late(self) -> float:
        """Return the seconds that may have passed between an observation and the write that follows from it."""
        return SLOW_WRITES if self.clock.now < self.slow_until + SLOW_WRITES else 0.0

    def answers_too_late(self) -> bool:
        """Return whether a client gives up on a write that the API server has accepted."""
        return self.clock.now < self.slow_until and self.clock.chance(0.1)

    def refuse(self, error: Exception, seconds: float) -> None:
        """Refuse creates of pods for a while."""
        self.refused_until, self._refusal = self.clock.now + seconds, error

    @property
    def refuses(self) -> bool:
        """Return whether no pod can be created."""
        return self.clock.now < max(self.quota_until, self.refused_until)

    def _reachable(self, who: str) -> None:
        if self.clock.now < self.down_until or not self.world.network.reaches(who, "api"):
            raise Conflict("the API server does not answer")

    def write_status(self, who: str, observed: JobStatus, status: JobStatus) -> None:
        """Apply the JSON patch that tests the claim, the number of failures and the skipped samples.

        Raises:
            Conflict: If a precondition fails, or the API server can not be reached.
        """
        self._reachable(who)
        mine, theirs = observed.world.claim, self.status.world.claim
        if (mine and (mine.round, mine.claim_id, mine.committed)) != (
            theirs and (theirs.round, theirs.claim_id, theirs.committed)
        ):
            raise Conflict("the claim has changed")
        if observed.restarts.total != self.status.restarts.total:
            raise Conflict("failures have been counted")
        if observed.skipped != self.status.skipped:
            raise Conflict("samples have been left out")
        self.world.invariants.status_written(self.status, status)
        self.status = status
        self._changed("job")

    def edit(self, **fields: object) -> None:
        """Apply a user's change to the spec."""
        self.spec, self.generation = self.spec.model_copy(update=fields), self.generation + 1
        self._changed("job")

    def delete_job(self, finalizer: str) -> None:
        """Delete the job, as a user does, while a finalizer holds it."""
        self.held_by = (finalizer,)
        self._changed("job")

    def create(self, who: str, action: CreatePod) -> PodView:
        """Create a pod, and return it as the API server does; return the existing pod if there is one of this name.

        Raises:
            Forbidden: If a quota or the API server refuses the pod.
        """
        self._reachable(who)
        name = f"job-{action.index}-{action.attempt}"
        if self.clock.now < self.quota_until or (self.quota is not None and len(self.pods) >= self.quota):
            limit = f"pods={self.spec.replicas if self.quota is None else self.quota}"
            message = f"exceeded quota: small, requested: pods=1, used: {limit}, limited: {limit}"
            raise Forbidden(403, "Forbidden", f'pods "{name}" is forbidden: {message}')
        if self.clock.now < self.refused_until:
            raise self._refusal.with_traceback(None)  # All pods share one object.
        if name in self.pods:
            return self.pods[name]  # 409 with our uid is success
        self.world.invariants.creating(action)
        self._uids += 1
        pod = PodView(name, f"uid-{self._uids}", action.index, action.attempt, self.clock.now, PodPhase.PENDING, False)
        pod = changed(
            pod,
            avoids=action.never_nodes,
            grace=self.grace,
            priority=self.priority,
            requests={"pods": Decimal(1), "cpu": Decimal(1)},
        )
        self.hosted[name] = SimPod(name, pod.uid)
        self.made.add((name, pod.uid))
        self.world.tell(f"{who} creates {name}")
        self._put(pod)
        self.clock.after(self.clock.between(0.02, 0.5), self._schedule, pod.uid, name, action)
        return pod

    def delete(self, who: str, action: DeletePod) -> None:
        self._reachable(who)
        self.world.invariants.of_this_job(action)
        pod = self.pods.get(action.name)
        if pod is None or pod.uid != action.uid:
            return
        self.world.tell(f"{who} deletes {pod.name}{' by force' if action.force else ''}: {action.reason}")
        self.deletes.append(pod.name)
        self.world.invariants.deleting(who, action)
        self.remove(pod.name, force=action.force, grace=pod.grace)

    def preempt(self, name: str, grace: float) -> None:
        """Preempt a pod as the scheduler does: set the condition, and delete the pod."""
        self._put(changed(self.pods[name], disruption="PreemptionByScheduler"))
        self.remove(name, grace=grace)

    def remove(self, name: str, force: bool = False, grace: float = GRACE) -> None:
        pod = self.pods.get(name)
        if pod is None:
            return
        hosted = self.hosted[name]
        process = self.world.agents.get(name)
        if force or not pod.node or pod.ended:
            self._gone(name, pod.uid)
            if process and pod.node not in self.world.network.dead:
                # The kubelet kills the remaining processes as soon as it knows of the deletion.
                self.clock.after(1.0, self._kill_when_heard, process)
        elif not pod.deleting:
            self._put(changed(pod, deleting=True, grace=grace, deletion_at=self.clock.now + grace))
            self.clock.after(0.01, self._terminate, hosted, grace)

    def _put(self, pod: PodView) -> None:
        self.pods[pod.name] = pod
        self._changed(f"pod/{pod.name}")

    def _gone(self, name: str, uid: str) -> None:
        pod = self.pods.get(name)
        if pod is not None and pod.uid == uid:
            del self.pods[name]
            del self.hosted[name]
            self._changed(f"pod/{name}")

    def _changed(self, what: str) -> None:
        self._writes += 1
        for listener in self.listeners:
            listener(what)

    # --- kubelets

    def _up(self, node: str) -> bool:
        now = self.clock.now
        return self.world.network.reaches(node, "api") and now >= max(
            self.down_until, self.stopped_until.get(node, 0.0)
        )

    def _schedule(self, uid: str, name: str, action: CreatePod) -> None:
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid or pod.deleting:
            return
        nodes = [node.name for node in self.nodes.values() if self._takes_pods(node)]
        nodes = [node for node in nodes if node not in action.never_nodes and not self.excluded]
        free = [node for node in nodes if node not in action.avoid_nodes and not self._taken(node)] or nodes
        if not free:
            waits = {"waiting": "Unschedulable", "waiting_message": "no node is free", "excluded": self.excluded}
            self._put(changed(pod, **waits))
            self.clock.after(1.0, self._schedule, uid, name, action)
            return
        node = self.clock.random.choice(free)
        self.hosted[name].node = node
        self._put(changed(pod, node=node, waiting="", waiting_message=""))
        self.clock.after(self.clock.between(0.05, 0.5), self._start, uid, name)

    def _takes_pods(self, node: NodeView) -> bool:
        if self.world.rivalry is not None and self.world.rivalry.full(node.name):
            return False
        return (
            node.ready
            and node.name not in self.ending
            and not node.cordoned
            and not node.notice
            and self._up(node.name)
        )

    def _taken(self, node: str) -> bool:
        return any(pod.node == node and pod.phase in (PodPhase.PENDING, PodPhase.RUNNING) for pod in self.pods.values())

    def _start(self, uid: str, name: str) -> None:
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid or pod.deleting:
            return
        if not self._up(pod.node):
            self.clock.after(1.0, self._start, uid, name)
            return
        if self.clock.now < self.no_image_until.get(pod.node, 0.0):
            self._put(changed(pod, waiting="ImagePullBackOff", waiting_message="the registry does not answer"))
            self.clock.after(1.0, self._start, uid, name)
            return
        self._put(changed(pod, phase=PodPhase.RUNNING, ip=name, waiting="", waiting_message=""))
        self.clock.after(self.clock.between(0.02, 0.2), self._start_agent, self.hosted[name])

    def _start_agent(self, hosted: SimPod) -> None:
        if hosted.node in self.world.network.dead or self.hosted.get(hosted.name) is not hosted:
            return
        if self.clock.now < self.broken.get(self.pods[hosted.name].index, 0.0):
            self.process_ended(hosted, 128, "StartError")
        else:
            self.world.agents[hosted.name] = AgentProcess(self.world, hosted)

    def restart_agent(self, hosted: SimPod) -> None:
        """Let a container die and restart with its volume."""
        if process := self.world.agents.get(hosted.name):
            process.die()
        self.clock.after(self.clock.between(0.1, 1.0), self._start_agent, hosted)

    def _terminate(self, hosted: SimPod, grace: float) -> None:
        process = self.world.agents.get(hosted.name)
        if hosted.node in self.world.network.dead:
            return
        if not self._up(hosted.node):
            self.clock.after(1.0, self._terminate, hosted, grace)
            return
        if process is None or not process.alive:
            self._gone(hosted.name, hosted.uid)
            return
        process.handle(e.TerminationNotice(grace))
        self.clock.after(grace + 0.5, self._kill_when_heard, process)

    def _kill_when_heard(self, process: AgentProcess) -> None:
        if process.host in self.world.network.dead:
            return
        if not self._up(process.host):
            self.clock.after(1.0, self._kill_when_heard, process)
            return
        process.die()
        self._gone(process.replica, process.pod.uid)

    def process_ended(self, hosted: SimPod, code: int, reason: str = "") -> None:
        """Report a container that has ended, as the kubelet does."""
        if hosted.node in self.ending and code:
            reason = TERMINATED
        reason = reason or ("Error" if code else "Completed")
        self.clock.after(self.clock.between(0.1, 0.8), self._report_end, hosted, code, reason)

    def _report_end(self, hosted: SimPod, code: int, reason: str) -> None:
        pod = self.pods.get(hosted.name)
        if pod is None or pod.uid != hosted.uid or hosted.node in self.world.network.dead:
            return
        if pod.ended and not pod.deleting:
            return  # a pod ends once
        if not self._up(hosted.node):
            self.clock.after(1.0, self._report_end, hosted, code, reason)
        elif pod.deleting:
            self._gone(hosted.name, hosted.uid)
        elif code and reason != TERMINATED and self.restarts_in_place:
            self._restart_in_place(hosted, changed(pod, last_exit_code=code, last_exit_reason=reason))
        else:
            if reason == "StartError":
                self.failed_starts.setdefault(pod.index, {})[pod.name] = self.clock.now
            phase = PodPhase.FAILED if code else PodPhase.SUCCEEDED
            self._put(changed(pod, phase=phase, exit_code=code, exit_reason=reason))

    def _restart_in_place(self, hosted: SimPod, pod: PodView) -> None:
        """Restart a container under restartPolicy OnFailure: at once, then with growing delays."""
        wait = 0.1 if not pod.restarts else min(BACK_OFF_MOST, BACK_OFF * 2.0 ** (pod.restarts - 1))
        self._put(changed(pod, waiting="CrashLoopBackOff", waiting_message=f"back-off {wait:.0f} s"))
        self.clock.after(wait, self._restarted, hosted)

    def _restarted(self, hosted: SimPod) -> None:
        pod = self.pods.get(hosted.name)
        if pod is None or pod.uid != hosted.uid or pod.ended or hosted.node in self.world.network.dead:
            return
        if not self._up(hosted.node):
            self.clock.after(1.0, self._restarted, hosted)
            return
        self._put(changed(pod, restarts=pod.restarts + 1, waiting="", waiting_message=""))
        self._start_agent(hosted)

    # --- nodes

    def kill_node(self, node: str) -> None:
        self.clock.tell(f"{node} dies")
        self.world.network.dead.add(node)
        for process in self._processes_on(node):
            process.die()
        self.clock.after(NOT_READY_AFTER, self._mark, node)

    def shut_down(self, node: str, grace: float) -> None:
        """Shut down a node in order: its kubelet stops all containers, waits, and reports their pods as failed."""
        self.ending.add(node)
        self._set_ready(node, False)
        for process in self._processes_on(node):
            process.handle(e.TerminationNotice(grace))
        self.clock.after(grace, self._switch_off, node)

    def _switch_off(self, node: str) -> None:
        self.ending.discard(node)
        if node in self.world.network.dead:
            return
        for process in self._processes_on(node):
            process.die()
            pod = self.pods.get(process.replica)
            if pod is not None and self._up(node) and not pod.ended:
                self._put(changed(pod, phase=PodPhase.FAILED, exit_code=143, exit_reason=TERMINATED))
        self.kill_node(node)

    def _processes_on(self, node: str) -> list[AgentProcess]:
        return [process for process in self.world.agents.values() if process.host == node and process.alive]

    def node_back(self, node: str) -> None:
        if node not in self.world.network.dead:
            return
        self.clock.tell(f"{node} is back, empty")
        self.world.network.dead.discard(node)
        self._set_ready(node, True)
        for name, pod in list(self.pods.items()):
            if pod.node == node:
                process = self.world.agents.get(name)
                if process is None or not process.alive:
                    self.process_ended(self.hosted[name], 137)

    def watch_node(self, node: str) -> None:
        """Act as the node lifecycle controller for a node that is cut off."""
        self.clock.after(NOT_READY_AFTER, self._mark, node)

    def _mark(self, node: str) -> None:
        if self._up(node):
            self._set_ready(node, node not in self.ending)
            return
        if self.nodes[node].ready:
            self._set_ready(node, False)
            self.clock.after(EVICT_AFTER, self._evict, node)
        self.clock.after(1.0, self._mark, node)

    def _set_ready(self, node: str, ready: bool) -> None:
        if self.nodes[node].ready != ready:
            self.mark_node(node, ready=ready)

    def mark_node(self, node: str, **fields: object) -> None:
        """Change the Node object: taints, cordon, readiness."""
        self.nodes[node] = changed(self.nodes[node], **fields)
        self._changed(f"node/{node}")

    def _evict(self, node: str) -> None:
        if not self.nodes[node].ready:
            for name, pod in list(self.pods.items()):
                if pod.node == node:
                    self.remove(name)

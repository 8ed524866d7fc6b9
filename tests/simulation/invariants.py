"""Invariants that must hold whatever happens. Each is checked where the event occurs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import concertina_protocol as p
from concertina.api.restarts import Restart
from concertina.api.status import JobStatus, unix_seconds
from concertina.api.world import Claim
from concertina.plan.actions import CreatePod, DeletePod
from concertina.plan.facts import sizes
from concertina.plan.observed import Call, ConnectionRefusal, JobObservation, PodPhase, PodView
from concertina.plan.state.restore import void
from concertina_agent.core.states import OwnState
from simulation.faults.lies import FAR, LIE
from simulation.parts.clock import Violation

if TYPE_CHECKING:
    from simulation.parts.agents import AgentProcess
    from simulation.parts.collective import Collective
    from simulation.runs.world import World


LOOP_SECONDS, LOOP_ROUNDS = 60.0, 4
"""A loop is more than this number of rounds, within this number of seconds, that were meant to grow the world and did
not."""
IDLE_SECONDS = 20.0
"""Maximum time in seconds without training although enough replicas are present."""
CALL_TIMEOUT = 3.0
"""Timeout of a call, as `operators.CALL_TIMEOUT`."""
BY_WORD = ("CoordinatorLost", "CoordinatorFailed", "RoundOvertaken")
"""Reasons to abort a round that follow from messages, or from their absence."""


class Invariants:
    def __init__(self, world: World) -> None:
        self.world = world
        self.commits: dict[int, tuple[str, tuple[tuple[str, str], ...]]] = {}
        """Claim and members (replica, instance) by round, as the API server accepted them."""
        self.first_steps: set[int] = set()
        self.claimed_at: dict[int, float] = {}
        self.fruitless: list[float] = []
        """Times at which rounds were committed that were meant to grow the world, and did not."""
        self.stood_still: dict[str, float] = {}
        """Time at which a worker of a replica began to hang, by replica."""
        self.slow_until: dict[str, float] = {}
        """Time at which a node is no longer slow, by node."""
        self.clock_was_set = False
        """Whether an operator's clock was set."""
        self.farthest = 0.0
        """Maximum number of seconds by which an operator's clock was ahead, if one was set."""
        self.lies: set[str] = set()
        """Replicas that have ever lied."""
        self.deceived = False
        """Whether a liar was the coordinator, whose reports about its round are believed."""
        self.restarts: list[Restart] = []
        """All entries that status.restarts ever had."""
        self._idle_since: float | None = None

    def status_written(self, old: JobStatus, new: JobStatus) -> None:
        """Check that rounds and claims only grow, and that a round is committed once.

        Raises:
            Violation: If it does not hold.
        """
        before, after = old.world, new.world
        self._believed(new)
        if after.claim:
            self.claimed_at.setdefault(after.claim.round, self.world.clock.now)
        if old.completion_time and not new.completion_time:
            raise Violation("a job that has ended goes on")
        if after.round < before.round:
            raise Violation(f"the world goes back from round {before.round} to {after.round}")
        if before.claim and (after.claim is None or after.claim.round < before.claim.round):
            raise Violation(f"the claim goes back from {before.claim} to {after.claim}")
        if after.claim and before.claim and after.claim.round == before.claim.round:
            if after.claim.claim_id != before.claim.claim_id:
                raise Violation(f"round {after.claim.round} is claimed twice")
            if before.claim.committed and not after.claim.committed:
                raise Violation(f"round {after.claim.round} is uncommitted")
        if after.members and after.claim and after.claim.committed and after.claim.round == after.round:
            members = tuple((member.replica, member.instance) for member in after.members)
            known = self.commits.setdefault(after.round, (after.claim.claim_id, members))
            if known != (after.claim.claim_id, members):
                raise Violation(f"round {after.round} is committed twice: {known} and {members}")
            if after.round > before.round:
                self._no_loop(old, new)
                self._together(new)
                self._newest(old, new)
        if new.steps_replayed < 0 or new.rounds < old.rounds:
            raise Violation("counters go back")
        self._counted(old, new)
        self._accused(old, new)
        self._undisturbed(old, new)
        self.world.rollbacks.status_written(old, new)
        if self.world.rivalry is not None:
            self.world.rivalry.status_written(self.world, old, new)

    def _counted(self, old: JobStatus, new: JobStatus) -> None:
        """Check that each second is in one class, and that recovery has causes.

        The steps of the bundled trainer are known.

        Raises:
            Violation: If it does not hold.
        """
        before, after = old.goodput, new.goodput
        if min(after.by_class.values()) < 0 or after.unknown_seconds or (after.at and after.percent is None):
            raise Violation(f"time is counted wrongly: {after}")
        caused = sum(entry.seconds for entry in after.recovery)
        if abs(caused - after.recovery_seconds) > 0.05 + 0.001 * after.recovery_seconds:
            raise Violation(f"{after.recovery_seconds} s of recovery have causes for {caused} s")
        if before.at is None or after.at is None or self.world.clocks:
            return
        counted = sum(after.by_class.values()) - sum(before.by_class.values())
        passed = unix_seconds(after.at) - unix_seconds(before.at)
        if abs(counted - passed) > 0.05:
            raise Violation(f"{counted} s are counted of {passed} s")

    def answered(self, call: Call, reply: p.Message | None) -> None:
        """Check that the answer that counts for a call is one to this call's claim.

        Raises:
            Violation: If it does not hold.
        """
        if isinstance(reply, p.Prepared | p.Accepted) and (reply.round, reply.claim) != (call.round, call.claim):
            raise Violation(f"an answer for {reply.claim} of round {reply.round} counts for {call.claim}: {reply}")

    def answering(self, process: AgentProcess, message: p.Message) -> None:
        """Check that an agent answers a Prepare only when its workers are out of the earlier round.

        Until then, a worker that stays may still save a state, which the answer would not name.

        Raises:
            Violation: If it does not hold.
        """
        if isinstance(message, p.Prepared) and process.inside is not None:
            raise Violation(
                f"{process.replica} answers for round {message.round} while its workers are in {process.inside.round}"
            )

    def committing(self, observed: JobObservation, status: JobStatus) -> None:
        """Check that no replica becomes a member that has died after its answer, as far as this operator has heard.

        Raises:
            Violation: If it does not hold.
        """
        world = status.world
        if world.round == observed.job.status.world.round or self.lies:
            return
        running = {pod.name for pod in observed.pods if pod.phase is PodPhase.RUNNING}
        for member in world.members:
            view = observed.agent(member.replica)
            if member.replica not in running:
                raise Violation(f"round {world.round} has {member.replica}, which does not run")
            if not view.connected and view.refusal is ConnectionRefusal.NOT_LISTENING:
                raise Violation(f"round {world.round} has {member.replica}, where no agent listens any more")
            report = view.report if view.connected else None
            if report and report.instance != member.instance and report.round >= world.round:
                raise Violation(f"round {world.round} has {member.replica}, whose agent was restarted after its answer")

    def lied(self, process: AgentProcess) -> None:
        self.lies.add(process.replica)
        self._believed(self.world.status)

    def _believed(self, new: JobStatus) -> None:
        """Check that the status contains nothing from a liar that never coordinated a round.

        If a coordinator is not connected, though, the operator asks its members.

        Raises:
            Violation: If it does not hold.
        """
        self.deceived |= new.world.coordinator in self.lies
        if not self.lies or self.deceived:
            return
        claim, failure = new.world.claim, new.last_failure
        for message in (claim.message if claim else "", failure.message if failure else ""):
            if LIE in message and "its member" not in message:
                raise Violation(f"a liar is believed that coordinates nobody: {message}")
        if new.progress and new.progress.step >= FAR:
            raise Violation(f"a liar is believed that coordinates nobody: {new.progress}")

    def _accused(self, old: JobStatus, new: JobStatus) -> None:
        """Check that a replica reported to hang did so until a moment ago, and that stragglers are on slow nodes.

        Raises:
            Violation: If it does not hold.
        """
        if new.restarts is old.restarts and new.stragglers is old.stragglers:
            return
        fresh = [entry for entry in new.restarts.recent if entry not in old.restarts.recent]
        self.restarts += fresh
        if self.deceived:
            return
        for entry in fresh:
            if entry.reason == "Hang" and entry.replica not in self.stood_still:
                raise Violation(f"{entry.replica} is said to hang, and does not")
            if entry.reason in ("LossSpike", "LossNotFinite") and entry.replica:
                raise Violation(f"{entry.replica} is blamed for what all ranks have seen alike: {entry}")
            if entry.reason == "SilentCorruption" and entry.replica not in self.world.rollbacks.flips:
                raise Violation(f"{entry.replica} is said to be corrupted, and is not")
            if entry.reason == "SilentCorruption" and entry.node not in {bad.node for bad in new.avoided_nodes}:
                raise Violation(f"new pods don't keep off {entry.node}, where bits have flipped")
            if (
                entry.reason in ("Hang", "CollectiveHang")
                and self.world.cluster.spec.failure_policy.on_hang == "Report"
            ):
                raise Violation(f"a hang is acted on that was only to be reported: {entry}")
        for mark in new.stragglers:
            if mark not in old.stragglers and self.slow_until.get(mark.node, 0.0) < self.world.clock.now:
                raise Violation(
                    f"{mark.replica} on {mark.node} is said to be a straggler, and is as fast as the others"
                )

    def _undisturbed(self, old: JobStatus, new: JobStatus) -> None:
        """Check that no round that trains is aborted because this operator alone can't reach its coordinator.

        Raises:
            Violation: If it does not hold.
        """
        before, claim, world = old.world, new.world.claim, self.world
        if not before.claim or not claim or claim.round == before.claim.round or claim.reason not in BY_WORD:
            return
        if self.deceived:
            return
        here = [world.agents.get(member.replica) for member in before.members]
        pods = [world.cluster.pods.get(member.replica) for member in before.members]
        train = all(
            agent
            and agent.alive
            and agent.collective
            and agent.collective.round == before.round
            and agent.core.state is OwnState.RUNNING
            and not agent.collective.broken
            and not world.clock.stands(agent)
            for agent in here
        )
        operator, others = world.operators[-1].name, pods[1:]
        heard = all(pod and not pod.deleting and world.network.reaches(operator, pod.node) for pod in others)
        if train and heard and others and not any(pod and world.troubled(pod.node) for pod in others):
            raise Violation(f"round {before.round} trains, and is given up: {claim.message}")

    def _no_loop(self, old: JobStatus, new: JobStatus) -> None:
        """Check that training is not stopped again and again for replicas that the members can't reach.

        Raises:
            Violation: If it does not hold.
        """
        claim, members = new.world.claim, {member.replica for member in new.world.members}
        if claim is None or claim.reason != "Growing" or not members <= {m.replica for m in old.world.members}:
            return
        if self.lies:
            return
        now = self.world.clock.now
        self.fruitless = [at for at in self.fruitless if now - at < LOOP_SECONDS] + [now]
        if len(self.fruitless) > LOOP_ROUNDS:
            raise Violation(f"a loop: {len(self.fruitless)} rounds within {LOOP_SECONDS:.0f} s that gained nobody")

    def _together(self, new: JobStatus) -> None:
        """Check that replicas that can't reach each other, at the claim and now, are not in one round.

        Raises:
            Violation: If it does not hold.
        """
        pods, network = self.world.cluster.pods, self.world.network
        hosts = {pods[member.replica].node for member in new.world.members if member.replica in pods}
        for a, b in itertools.combinations(sorted(hosts), 2):
            if network.apart_at(a, b, self.claimed_at[new.world.round]):
                raise Violation(f"round {new.world.round} has members on {a} and {b}, which can't reach each other")

    def _newest(self, old: JobStatus, new: JobStatus) -> None:
        """Check that a round begins from the newest state that the asked and connected replicas hold together.

        Raises:
            Violation: If it does not hold.
        """
        claim, base, world = new.world.claim, new.world.base, self.world
        if claim is None or base is None or claim.from_storage or self.lies or world.network.unruly:
            return
        if world.clock.now - self.claimed_at[claim.round] > CALL_TIMEOUT:
            return  # Calls have timed out by then.
        asked = {name: process for name, process in world.agents.items() if self._is_preparing(process, claim)}
        reachable = [set(process.core.preparation.reachable or ()) for process in asked.values()]
        if not all(names.issuperset(asked) for names in reachable):
            return
        held: dict[p.SnapshotId, set[int]] = {}
        for process in asked.values():
            for some in process.pod.held():
                held.setdefault(some.id, set()).update(some.shards)
        whole = (id for id, shards in held.items() if len(shards) == id.shards and not void(id.round, id.step, old))
        newest = max((id.step for id in whole), default=0)
        if newest > base.step:
            raise Violation(f"round {new.world.round} begins from step {base.step}; {sorted(asked)} hold {newest}")

    def _is_preparing(self, process: AgentProcess, claim: Claim) -> bool:
        """Return whether the agent was asked, and is connected."""
        world, pod = self.world, self.world.cluster.pods.get(process.replica)
        if pod is None or pod.uid != process.pod.uid or pod.deleting or world.troubled(pod.node):
            return False
        asked = process.core.seen == (claim.round, claim.claim_id) and process.core.preparation is not None
        heard = world.network.reaches(world.operators[-1].name, pod.node) and not world.clock.stands(process)
        return asked and heard and process.alive

    def seen(self, process: AgentProcess, round: int, claim: str) -> None:
        if round < process.pod.seen[0]:
            raise Violation(f"{process.replica} has seen round {process.pod.seen[0]} and prepares round {round}")
        status = self.world.cluster.status
        self.claimed_at.setdefault(round, self.world.clock.now)
        if (round, claim) == (1, status.internal.first_claim):
            return
        if status.world.claim is None or status.world.claim.round < round:
            raise Violation(f"{process.replica} is asked to prepare round {round}, which nobody has claimed")

    def starting(self, process: AgentProcess, assign: p.Assign) -> None:
        """Check that workers start only for a committed round, as the member that was committed.

        Raises:
            Violation: If it does not hold.
        """
        members = tuple((member.replica, member.instance) for member in assign.members)
        if self.commits.get(assign.round) != (assign.claim, members):
            raise Violation(f"{process.replica} starts round {assign.round}, which is not committed like that")
        if process.core.seen != (assign.round, assign.claim):
            raise Violation(f"{process.replica} starts round {assign.round} and has seen {process.core.seen}")
        if process.instance not in {member.instance for member in assign.members}:
            raise Violation(f"{process.replica} starts round {assign.round} in the place of a process that has died")
        if process.inside is not None:
            raise Violation(
                f"{process.replica} starts round {assign.round} while its workers are in {process.inside.round}"
            )
        claim = self.world.status.world.claim
        if claim is not None and claim.round == assign.round:  # A zombie process may start a round that ended long ago.
            self._restorable(assign)

    def _restorable(self, assign: p.Assign) -> None:
        """Check that a round continues from one snapshot id, and that each named holder of a shard has it.

        Raises:
            Violation: If it does not hold.
        """
        restore = assign.restore
        if restore.id is None:
            return
        if sorted(restore.holders) != sorted(map(str, range(restore.id.shards))):
            raise Violation(f"round {assign.round} is to continue from a part of {restore.id}: {restore.holders}")
        named = {member.replica for member in (*assign.members, *assign.outside)}
        for shard, holders in restore.holders.items():
            for name in holders:
                if name not in named:
                    raise Violation(f"round {assign.round}: where {name}, which holds shard {shard}, is stands nowhere")
                pod = self.world.cluster.hosted.get(name)
                if pod is not None and (restore.id, int(shard)) not in pod.volume.keys() | pod.discarded:
                    raise Violation(f"round {assign.round}: {name} does not hold shard {shard} of {restore.id}")

    def stepping(self, collective: Collective) -> None:
        """Check before the first step of a round that none of its members still runs an older round.

        Every member that has seen the new round has stopped.

        Raises:
            Violation: If it does not hold.
        """
        for process in self.world.agents.values():
            other = process.collective
            if process.alive and other is not None and other.round < process.core.seen[0]:
                raise Violation(f"{process.replica} runs round {other.round} and has seen {process.core.seen}")
        for process in collective.here.values():
            if process.collective is not collective:
                raise Violation(f"{process.replica} steps in two rounds")
        if collective.round not in self.first_steps:
            self.first_steps.add(collective.round)
            self.world.clock.tell(f"round {collective.round}: first step")

    def goes_on(self) -> None:
        """Check, while no pod can be created, that the existing replicas train without the lost ones.

        Raises:
            Violation: If it does not hold.
        """
        now = self.world.clock.now
        if self.deceived or not self._could_train() or self._trains():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > IDLE_SECONDS:
            raise Violation(
                f"enough replicas are there, and for {now - self._idle_since:.0f} s none of them has trained"
            )

    def _could_train(self) -> bool:
        """Return whether enough replicas for a round can be reached, and nothing else prevents it.

        The first round waits for all replicas.
        """
        if not self.world.status.rounds:
            return False
        world, cluster, now = self.world, self.world.cluster, self.world.clock.now
        operator = world.operators[-1]
        if not operator.alive or world.clock.stands(operator) or cluster.spec.suspend or cluster.held_by:
            return False
        if not world.storage.up:
            return False
        if now < max(cluster.down_until, cluster.slow_until) or not world.network.reaches(operator.name, "api"):
            return False
        if any(world.troubled(host) for host in (*cluster.nodes, operator.name)):
            return False
        hosts = [process.host for process in world.agents.values() if self._at_hand(process)]
        reach = (world.network.reaches(a, b) for a in [*hosts, operator.name] for b in [*hosts, "s3"])
        return sizes.fitting(len(hosts), cluster.spec) > 0 and all(reach)

    def _at_hand(self, process: AgentProcess) -> bool:
        pod = self.world.cluster.pods.get(process.replica)
        if pod is None or pod.uid != process.pod.uid or pod.deleting or pod.phase is not PodPhase.RUNNING:
            return False
        node = self.world.cluster.nodes[pod.node]
        calm = node.ready and not (node.notice or node.cordoned)
        return calm and process.alive and not self.world.clock.stands(process) and process.core.report().ready

    def _trains(self) -> bool:
        """Return whether the round that was claimed last trains, and is not known to be broken."""
        runs = self.world.collectives.values()
        return any(run.over or (run.first_step_at and not run.broken) for run in runs if self._is_current(run))

    def _is_current(self, run: Collective) -> bool:
        claim = self.world.status.world.claim
        return claim is not None and (run.round, run.assign.claim) == (claim.round, claim.claim_id)

    def of_this_job(self, action: DeletePod) -> None:
        if (action.name, action.uid) not in self.world.cluster.made:
            raise Violation(f"{action.name} ({action.uid}) is deleted, and was never this job's")

    def deleting(self, who: str, action: DeletePod) -> None:
        """Check that no pod is deleted while all agents are silent.

        Raises:
            Violation: If it does not hold.
        """
        world = self.world
        heard_at = max((operator.heard_at for operator in world.operators if operator.name == who), default=0.0)
        cut_off = not any(
            world.network.reaches(who, node) for node in world.cluster.nodes if node not in world.network.dead
        )
        # Until then, the operator's open streams seem to be in order.
        is_noticed = world.clock.now - heard_at > p.SILENCE_SECONDS + 1.0 + world.cluster.late
        if cut_off and is_noticed and "could not be reached" in action.reason:
            raise Violation(f"{who} can reach nobody, and deletes {action.name}: {action.reason}")

    def creating(self, action: CreatePod) -> None:
        """Check that no second pod is created for an index whose pod is healthy, as far as anybody could know.

        Raises:
            Violation: If it does not hold.
        """
        world = self.world
        self._backed_off(action)
        if self.deceived:
            return
        for pod in world.cluster.pods.values():
            if pod.index != action.index or pod.deleting or pod.phase not in (PodPhase.PENDING, PodPhase.RUNNING):
                continue
            process = world.agents.get(pod.name)
            failed = [entry for entry in self.restarts if entry.replica == pod.name]
            blamed = len(failed) > 1 or any(
                entry.action == "RecreatePod" and (entry.counted or entry.reason == "NetworkPartition")
                for entry in failed
            )
            if blamed or self._stranded(pod) or world.troubled(pod.node) or (process is not None and not process.alive):
                continue
            if pod.name in self.lies or (pod.waiting and self.farthest):
                continue  # How long a pod waits is measured by the operator's clock and the API server's.
            raise Violation(f"a second pod for index {action.index} while {pod.name} is well")

    def _stranded(self, pod: PodView) -> bool:
        """Return whether the pod has no node, or had none a moment ago, because it avoids a usable node."""
        avoided = self.world.cluster.status.avoided_nodes
        now = self.world.clock.now + 6.0 * bool(self.world.clocks) + self.farthest  # operators' clocks differ
        still = {entry.node for entry in avoided if unix_seconds(entry.until) > now}
        return pod.phase is PodPhase.PENDING and not still.issuperset(pod.avoids)

    def _backed_off(self, action: CreatePod) -> None:
        """Check that a replica whose containers can't start gets its pods at growing intervals.

        Raises:
            Violation: If it does not hold.
        """
        cluster = self.world.cluster
        counted_at = {
            entry.replica: unix_seconds(entry.at) for entry in cluster.status.restarts.recent if entry.counted
        }
        failed = cluster.failed_starts.get(action.index, {})
        # The interval counts from the first evidence of the end.
        ends = {name: min(at, counted_at[name]) for name, at in failed.items() if name in counted_at}
        if len(ends) < 3 or f"job-{action.index}-{action.attempt - 1}" not in ends:
            return
        if self.clock_was_set:
            return  # Nothing waits for a time in the future, which another operator's clock may have written.
        waited = self.world.clock.now - max(ends.values())
        doubt = 6.0 if self.world.clocks else 0.05  # operators' clocks differ
        if waited < min(30.0, 2.0 ** (len(ends) - 3)) - doubt:
            raise Violation(f"a pod {waited:.3f} s after {len(ends)} of replica {action.index} could not start")

"""The job's replicas: those that are alive, those that will be terminated, and those that the spec requests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from concertina.api.restarts import Restart
from concertina.api.spec import JobSpec
from concertina.plan.facts import notices, sizes
from concertina.plan.facts.cached import cached
from concertina.plan.facts.constants import FAULT_LASTS, UNANSWERED, since
from concertina.plan.facts.health import EvidenceSource, Health
from concertina.plan.facts.round import Round
from concertina.plan.observed import Call, JobObservation, PodPhase, PodView
from concertina_protocol import FailureReason, Prepared

RECREATE_POD = "RecreatePod"
"""Action in an entry of `status.restarts` (`escalation`) with which the operator replaces a pod by a new one."""


@dataclass(frozen=True)
class Replicas:
    observed: JobObservation
    spec: JobSpec
    now: float
    round: Round
    health: Health
    recent: tuple[Restart, ...]
    """Restarts within `failurePolicy.windowSeconds`."""
    avoided: frozenset[str]
    """Nodes that new pods currently avoid."""

    @cached
    def pods(self) -> Mapping[str, PodView]:
        """Pods of the job, keyed by name, whether or not their replicas are alive."""
        return {pod.name: pod for pod in self.observed.pods}

    @cached
    def to_replace(self) -> Mapping[str, str]:
        """Replicas whose pods are replaced because of a failure, each mapped to the failure's reason."""
        return {entry.replica: entry.reason for entry in self.recent if entry.action == RECREATE_POD}

    @cached
    def dead(self) -> Mapping[str, str]:
        """Pods that are dead or count as dead, each with the reason as a clause that follows 'replica x'.

        A pod can count as dead because its agent has been silent for a long time.
        """
        return {pod.name: why for pod in self.observed.pods if (why := self._why_dead(pod))}

    def _why_dead(self, pod: PodView) -> str:
        return self._why_dead_though_heard(pod) or self.health.by_contact(pod).sentence

    def _why_dead_though_heard(self, pod: PodView) -> str:
        verdict = self.health.by_objects(pod)
        if verdict.dead:
            return verdict.sentence
        if pod.name in self.to_replace:
            return f"is given up ({self.to_replace[pod.name]})"
        if pod.name in self.outdated and pod.name not in self.round.members:
            return "has an outdated pod template"
        if pod.unschedulable and not self.avoided.issuperset(pod.avoids):
            return "found no node, and may use an avoided node again"
        return ""

    @cached
    def silent(self) -> tuple[str, ...]:
        """Uids of pods whose agents are silent, without another sign of failure.

        The pod that is silent longest comes first. The operator treats these pods as dead now, or will do so if they
        stay silent.
        """
        ages = {}
        for pod in self.observed.pods:
            verdict = self.health.by_contact(pod)
            if verdict.evidence is EvidenceSource.SILENCE and (verdict.dead or verdict.waits):
                ages[pod.uid] = verdict.age or 0.0
        alone = [pod.uid for pod in self.observed.pods if pod.uid in ages and not self._why_dead_though_heard(pod)]
        return tuple(sorted(alone, key=lambda uid: -ages[uid]))

    @cached
    def of_another_template(self) -> frozenset[str]:
        """Names of pods that were created from an older pod template than the job's present one."""
        current_hash = self.observed.job.template_hash
        pods = (pod for pod in self.observed.pods if current_hash and not pod.deleting)
        return frozenset(pod.name for pod in pods if pod.template_hash not in ("", current_hash))

    @property
    def outdated(self) -> frozenset[str]:
        """Names of pods to replace because the job's pod template has changed.

        In a drain, all ranks stop after the same step. A suspended job replaces no pods: its round drains on the
        existing pods. A member of the round is replaced only after the round has been drained
        (`suspend.replace_outdated`).
        """
        return frozenset() if self.spec.suspend else self.of_another_template

    @cached
    def live(self) -> Mapping[str, PodView]:
        return {name: pod for name, pod in self.pods.items() if name not in self.dead}

    @cached
    def ready(self) -> frozenset[str]:
        """Live replicas that can join a round: their agents are connected and report that they can start workers."""
        views = ((name, self.observed.agent(name)) for name in self.live)
        return frozenset(name for name, view in views if view.connected and view.report and view.report.ready)

    @cached
    def gpu_faults(self) -> Mapping[str, str]:
        """Live replicas whose agent reports a faulty GPU, keyed by pod name, each with the fault as a clause."""
        faults = {}
        for name in self.live:
            newest = self.round.member_states.get(name) or self.observed.agent(name).report
            if newest and newest.gpu_fault:
                faults[name] = _printable(newest.gpu_fault)
        return faults

    @cached
    def hardware_faults(self) -> Mapping[str, str]:
        """Live replicas with a faulty GPU or on a faulty node, keyed by pod name, each with the fault as a clause."""
        by_node = {name: fault for name, pod in self.live.items() if (fault := self._node_fault(pod))}
        return {**by_node, **self.gpu_faults}

    def _node_fault(self, pod: PodView) -> str:
        node, job = self.observed.node(pod), self.observed.job
        if node.drilled_job == f"{job.namespace}/{job.name}":
            return "a drill plays that the node is faulty"
        return _printable(node.fault) if since(node.fault_since, self.now) >= FAULT_LASTS else ""

    # --- replicas that leave

    @cached
    def notices(self) -> Mapping[str, notices.PodNotice]:
        """Termination notices of replicas whose pods still exist, keyed by pod name."""
        observed, members, notice_by_replica = self.observed, self.round.members, {}
        # The coordinator's report on its members counts even when a claim is about to replace the round: a member that
        # has left keeps its notice until its pod has ended (decision "SIGTERM in an agent's reports").
        for pod in observed.pods:
            report_of_pod = observed.agent(pod.name).report
            member_state = self.round.member_states.get(pod.name) if pod.name in members else None
            grace = (report_of_pod.notice if report_of_pod else None) or (member_state.notice if member_state else None)
            if notice := notices.of(notices.NoticeInput(pod, observed.node(pod), grace, self.now)):
                notice_by_replica[pod.name] = notice
        return notice_by_replica

    def leaves(self, name: str) -> bool:
        """Return whether the replica should leave the round at once, because it will be terminated soon."""
        return name in self.notices and self.notices[name].urgent

    # --- replicas that are wanted

    @cached
    def pod_by_index(self) -> Mapping[int, str]:
        """Pods that may be in the next round, keyed by replica index. There is one pod for each index.

        This is the pod of the present member of that index, if the member can stay. Otherwise, it is the newest pod of
        the index. A pod on a cordoned node is used until another pod of the index is ready.
        """
        by_index: dict[int, list[str]] = {}
        for name, pod in self.live.items():
            if pod.index is not None and not self.leaves(name):
                by_index.setdefault(pod.index, []).append(name)
        return {index: max(names, key=self._preference) for index, names in by_index.items()}

    def _preference(self, name: str) -> tuple[bool, bool, bool, int]:
        member, stays = name in self.round.members, name not in self.notices
        return (stays and name in self.ready) or member, stays, member, self.pods[name].attempt

    @cached
    def wanted_indexes(self) -> frozenset[int]:
        """Indexes of the replicas that the spec requests, including standby replicas.

        The operator chooses indexes of members first, then indexes of other live pods, then the lowest free indexes.
        """
        wanted_count = sizes.most(self.spec) + self.spec.standby_replicas
        live = {pod.index: name for name, pod in self.live.items() if pod.index is not None}
        stay = sorted(live, key=lambda index: (live[index] not in self.round.members, index))[:wanted_count]
        free = (index for index in itertools.count() if index not in live)
        return frozenset(stay) | frozenset(itertools.islice(free, wanted_count - len(stay)))

    @cached
    def surplus(self) -> tuple[str, ...]:
        """Members in excess of the number of replicas that the spec requests: the members with the highest indexes."""
        alive = (name for _, name in sorted(self.pod_by_index.items()) if name in self.round.members)
        return tuple(alive)[sizes.most(self.spec) :]

    @cached
    def standby(self) -> tuple[str, ...]:
        """Live replicas that the spec requests in addition to a full round.

        After a failure, the next round includes one of these replicas in place of the lost replica (decision "Standby
        replicas are ordinary candidates").
        """
        if not self.spec.standby_replicas:
            return ()
        names = [name for index, name in self.pod_by_index.items() if index in self.wanted_indexes]
        names.sort(key=lambda name: (name not in self.round.members, name not in self.ready, self.pods[name].order))
        return tuple(names[sizes.most(self.spec) :])

    # --- replicas that are asked, and their answers

    @cached
    def candidates(self) -> tuple[str, ...]:
        """Replicas that may be in the next round, in order of replica index.

        Candidates are all members that are not known to be lost, and all replicas that are ready. While the members'
        pods have an outdated pod template, only members are candidates. A member that seems lost is left out if enough
        other candidates, with at least one member, remain.
        """
        may_join = self.round.members.keys().isdisjoint(self.of_another_template)
        names = tuple(
            name
            for index, name in sorted(self.pod_by_index.items())
            if index in self.wanted_indexes
            and self.can_answer(name)
            and ((may_join and name in self.ready) or (self.member_still(name) and name not in self.coming_back))
        )
        rest = tuple(name for name in names if name not in self.lost_members)
        is_enough = sizes.fitting(len(rest), self.spec) and not self.round.members.keys().isdisjoint(rest)
        return rest if is_enough else names

    @cached
    def coming_back(self) -> frozenset[str]:
        """Members whose agents were restarted and are still importing PyTorch.

        The next round starts without these members if any other member remains. If none remains, the result is empty,
        so that the round waits for all members.
        """
        members = {name: member for name, member in self.round.members.items() if name in self.pods}
        restarted, any_stays = set(), False
        for name, member in members.items():
            view = self.observed.agent(name)
            if view.connected and view.report and not member.is_agent(view.report.instance):
                restarted.add(name)
            elif self.member_still(name) and self.can_answer(name):
                any_stays = True
        return frozenset(restarted) - self.ready if any_stays else frozenset()

    @cached
    def suspects(self) -> frozenset[str]:
        """Members that the coordinator (the agent of rank 0) may have lost. The operator opens streams to them."""
        states = self.round.member_states
        silent = frozenset(name for name in self.round.members if name in states and states[name].silent)
        return silent | self._left_out

    @cached
    def lost_members(self) -> frozenset[str]:
        """Members that answer neither the coordinator nor this operator (decision "Two observers of a silent member").

        If one of the two observers can reach a member, the operator asks that member to join the next round, because
        the member may have the newest state.

        The coordinator is the agent of rank 0.
        """
        failures = {name: state.failure for name, state in self.round.member_states.items()}
        reported = {
            name for name, failure in failures.items() if failure and failure.reason == FailureReason.MEMBER_LOST
        }
        return frozenset(name for name in self.suspects & (reported | self._left_out) if self._unanswered(name))

    @cached
    def _left_out(self) -> frozenset[str]:
        """Members of the last round to which this operator has sent no Prepare call for the round that is being formed.

        A Prepare call asks a replica to join the round. Once the coordinator (the agent of rank 0) has prepared for the
        new round, it no longer reports which members it has lost. The missing calls then show this.
        """
        claim = self.round.claim
        if claim is None or claim.committed:
            return frozenset()
        calls = (view.prepare_of(claim) for view in self.observed.agents.values())
        lists = {id(call.candidates): call.candidates for call in calls if call}  # most calls share the same list
        named = {candidate.replica for candidates in lists.values() for candidate in candidates}
        return frozenset(self.round.members.keys() - named) if named else frozenset()

    def _unanswered(self, name: str) -> bool:
        view, claim = self.observed.agent(name), self.round.claim
        call = view.prepare_of(claim) if claim and not claim.committed else None
        answers = view.alive or (call is not None and call.reply is not None)
        return not answers and (view.silent_for(self.now) or 0.0) >= UNANSWERED

    def can_answer(self, name: str) -> bool:
        pod = self.pods[name]
        if not pod.ip or pod.phase is not PodPhase.RUNNING or self.health.by_contact(pod).waits:
            return False
        return self.health.may_answer(name)

    def member_still(self, name: str) -> bool:
        return name in self.round.members and self.round.members[name].is_pod(self.pods[name].uid)

    @cached
    def asked(self) -> Mapping[str, Call]:
        """Prepare calls that ask replicas to join the round that is being formed, keyed by replica.

        The calls are in order of replica index. The result is empty if no round is being formed.
        """
        claim = self.round.claim
        if claim is None or claim.committed:
            return {}
        calls = ((name, self.observed.agent(name).prepare_of(claim)) for name in self.candidates)
        return {name: call for name, call in calls if call}

    @cached
    def answers(self) -> Mapping[str, Prepared]:
        """Answers to the Prepare calls for the round that is being formed, keyed by replica.

        The message Prepare asks a replica to join the next round.
        """
        return {name: call.reply for name, call in self.asked.items() if isinstance(call.reply, Prepared)}

    @cached
    def all_done_at(self) -> float | None:
        """Unix time at which the last replica answered its Prepare call (which asks it to join a round) or failed.

        The result is None while a Prepare call is in progress.
        """
        done = [call.done_at for call in self.asked.values() if call.done_at is not None]
        return max(done, default=self.now) if len(done) == len(self.candidates) else None

    @cached
    def uninformed(self) -> frozenset[str]:
        """Replicas that answered their Prepare call before the operator added other candidates for the round.

        A Prepare call asks a replica to join the round, and lists the other candidates. Such an early answer does not
        say whether the replica can reach the candidates that were added later.
        """
        lists = {id(call.candidates): call.candidates for call in self.asked.values()}  # most calls share the same list
        complete = {
            list_id for list_id, named in lists.items() if {c.replica for c in named}.issuperset(self.candidates)
        }
        return frozenset(name for name in self.answers if id(self.asked[name].candidates) not in complete)

    @cached
    def connected(self) -> frozenset[str]:
        """Largest set of replicas that have answered their Prepare call and can all reach each other.

        A Prepare call asks a replica to join the next round and to check which other replicas it can reach.
        """
        return frozenset(sizes.mutually_reachable(self.answers, self.round.members))

    # --- addresses

    @cached
    def coordinator(self) -> str:
        """Name of the coordinator's pod; empty if that pod does not run.

        A pod that is being deleted still counts as running.

        The coordinator is the agent of rank 0.
        """
        if not self.round.committed:
            return ""
        coordinator = self.round.coordinator
        pod = self.pods.get(coordinator.replica)
        return pod.name if pod and coordinator.is_pod(pod.uid) and pod.phase is PodPhase.RUNNING else ""

    def address(self, replica: str) -> str:
        pod = self.pods[replica]
        return f"{pod.ip}:{pod.port}"


def _printable(text: str) -> str:
    """Return a text as one line without control characters, because it comes from a driver or from a tenant's agent."""
    return "".join(character if character.isprintable() else " " for character in text)

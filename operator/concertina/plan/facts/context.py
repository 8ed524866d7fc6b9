"""What every policy asks about one observation, worked out once and only when asked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import concertina_protocol as protocol
from concertina.api.spec import JobSpec
from concertina.api.status import Claim, JobStatus, Member, Restart, World, unix_seconds
from concertina.plan.facts import constants, notices, sizes
from concertina.plan.facts.cached import cached
from concertina.plan.types import AgentView, Call, ConnectionRefusal, NodeView, Observed, PodView

UNKNOWN_AGENT = AgentView()
UNKNOWN_NODE = NodeView(name="", ready=True)
REPLACE_POD = "ReplacePod"
"""The rung of the recovery ladder (`ladder`) that condemns a pod."""


@dataclass(frozen=True)
class JobContext:
    observed: Observed
    spec: JobSpec
    now: float

    @cached
    def status(self) -> JobStatus:
        return self.observed.job.status

    @cached
    def world(self) -> World:
        return self.status.world

    @cached
    def claim(self) -> Claim | None:
        return self.world.claim

    @cached
    def committed(self) -> bool:
        """Whether there is a round with members, and no claim of a later one."""
        claim, world = self.claim, self.world
        return claim is not None and claim.committed and claim.round == world.round and bool(world.members)

    # --- pods

    @cached
    def pods(self) -> Mapping[str, PodView]:
        return {pod.name: pod for pod in self.observed.pods}

    @cached
    def deaths(self) -> Mapping[str, str]:
        """Pods that are not coming back, by name: why, in words that follow 'replica x'."""
        return {pod.name: why for pod in self.observed.pods if (why := self._death(pod))}

    @cached
    def live(self) -> Mapping[str, PodView]:
        return {name: pod for name, pod in self.pods.items() if name not in self.deaths}

    @cached
    def notices(self) -> Mapping[str, notices.Notice]:
        """Replicas that will go, by pod name, while they are still there."""
        seen = {
            pod.name: notices.of(notices.Sight(pod, self.node(pod), self._told(pod.name), self.now))
            for pod in self.observed.pods
        }
        return {name: notice for name, notice in seen.items() if notice}

    def _told(self, name: str) -> float:
        """The grace that a replica's agent was given, as it says itself or its lead does (also of a round that a claim
        is about to replace: who has left stays noticed until its pod is seen to have ended); 0 without one."""
        own = self.agent(name).report
        if own and own.notice:
            return own.notice
        report = self.agent(self.lead.replica).report if name in self.members else None
        known = report.members.get(name) if report and report.round == self.world.round else None
        return known.notice if known else 0.0

    def leaves(self, name: str) -> bool:
        """Whether the replica should leave at once."""
        return name in self.notices and self.notices[name].urgent

    @cached
    def seats(self) -> Mapping[int, str]:
        """The replica of each index that may be in the next round: a member, if it can stay, else the newest; one on a
        cordoned node until another is ready."""
        by_index: dict[int, list[str]] = {}
        for name, pod in self.live.items():
            if not self.leaves(name):
                by_index.setdefault(pod.index, []).append(name)
        return {index: max(names, key=self._claim_to_seat) for index, names in by_index.items()}

    def _claim_to_seat(self, name: str) -> tuple[bool, bool, bool, int]:
        member, stays = name in self.members, name not in self.notices
        return (stays and name in self.ready) or member, stays, member, self.pods[name].attempt

    @cached
    def slots(self) -> frozenset[int]:
        """The replica indexes that are wanted, those of spares included: those of members first, of other live pods,
        then the lowest free."""
        wanted = sizes.most(self.spec) + self.spec.spares
        live = {pod.index: name for name, pod in self.live.items()}
        kept = sorted(live, key=lambda index: (live[index] not in self.members, index))[:wanted]
        free = (index for index in itertools.count() if index not in live)
        return frozenset(kept) | frozenset(itertools.islice(free, wanted - len(kept)))

    @cached
    def surplus(self) -> tuple[str, ...]:
        """Members beyond the largest size that is wanted: the last ones by index."""
        alive = (name for _, name in sorted(self.seats.items()) if name in self.members)
        return tuple(alive)[sizes.most(self.spec) :]

    @cached
    def spares(self) -> tuple[str, ...]:
        """Live replicas that a full world has no place for, but that are wanted."""
        if not self.spec.spares:
            return ()
        wanted = [name for index, name in self.seats.items() if index in self.slots]
        wanted.sort(key=lambda name: (name not in self.members, name not in self.ready, self.pods[name].index))
        return tuple(wanted[sizes.most(self.spec) :])

    def node(self, pod: PodView) -> NodeView:
        return self.observed.nodes.get(pod.node, UNKNOWN_NODE)

    def agent(self, replica: str) -> AgentView:
        return self.observed.agents.get(replica, UNKNOWN_AGENT)

    def _death(self, pod: PodView) -> str:
        if pod.ended:
            lines = [line for line in pod.exit_message.splitlines() if line.strip()]
            detail = lines[-1].strip()[:300] if lines else pod.exit_reason
            code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
            return f"ended{code}{f' ({detail})' if detail else ''}"
        if pod.deleting:
            return "is being deleted"
        node = self.node(pod)
        if node.out_of_service:
            return f"was on node {pod.node}, which is out of service"
        if pod.name in self.condemned:
            return f"is given up ({self.condemned[pod.name]})"
        if pod.waiting == "Unschedulable" and not self.avoided.issuperset(pod.avoids):
            return "found no place, and may use a node again that it had to avoid"
        view = self.agent(pod.name)
        if view.alive or pod.phase != "Running" or self.in_good_standing(pod.name):
            return ""
        if not node.ready:
            return f"can't be reached and its node {pod.node} is not ready"
        since, limit = (
            (view.lost_at, constants.UNREACHABLE) if view.lost_at else (view.wanted_at, self._contact(pod.name))
        )
        if since and self.now - since >= (max(limit, constants.WHOLE_WORLD) if self.blind else limit):
            return f"could not be reached for {self.now - since:.0f} s"
        return ""

    def _contact(self, replica: str) -> float:
        """For a first contact: members once answered; others may still be starting their agent."""
        return constants.FIRST_CONTACT if replica in self.members else constants.AGENT_GIVE_UP

    @cached
    def blind(self) -> bool:
        """Whether no agent at all can be reached: then it may be the operator who is cut off, and all may be well."""
        return not any(view.connected for view in self.observed.agents.values())

    @cached
    def condemned(self) -> Mapping[str, str]:
        """Replicas whose failure was answered by replacing their pod, with its reason."""
        return {entry.replica: entry.reason for entry in self.recent if entry.rung == REPLACE_POD}

    @cached
    def avoided(self) -> frozenset[str]:
        """Nodes that new pods keep off for now."""
        nodes = self.status.avoided_nodes
        return frozenset(entry.node for entry in nodes if unix_seconds(entry.until) > self.now)

    @cached
    def recent(self) -> tuple[Restart, ...]:
        """Restarts within the window."""
        start = self.now - self.spec.failure_policy.window_seconds
        return tuple(restart for restart in self.status.restarts.recent if unix_seconds(restart.at) > start)

    # --- the world

    @cached
    def members(self) -> Mapping[str, Member]:
        """Of the round that was last committed, which a later claim may be about to replace."""
        return {member.replica: member for member in self.world.members}

    @property
    def lead(self) -> Member:
        return self.world.members[0]

    @cached
    def leading(self) -> str:
        """The lead, while its pod is there to listen to, being deleted perhaps; empty where it is not."""
        pod = self.pods.get(self.lead.replica) if self.committed else None
        return pod.name if pod and pod.uid == self.lead.uid and pod.phase == "Running" else ""

    @cached
    def report(self) -> protocol.Report | None:
        """The lead's last report about the committed round, while nothing speaks against it."""
        if not self.committed or self.claim is None:
            return None
        report = self.agent(self.lead.replica).report
        if report is None or (report.instance, report.round, report.claim) != (
            self.lead.instance,
            self.claim.round,
            self.claim.claim_id,
        ):
            return None
        return report

    @cached
    def unacknowledged(self) -> tuple[tuple[str, Call], ...]:
        """Members whose Assign of this round, sent by this operator, was not accepted so far."""
        if not self.committed or self.claim is None:
            return ()
        round, claim_id = self.claim.round, self.claim.claim_id
        calls = ((name, view.assign) for name in self.members if (view := self.agent(name)).assign)
        return tuple(
            (name, call)
            for name, call in calls
            if call and call.round == round and call.claim == claim_id and not isinstance(call.reply, protocol.Accepted)
        )

    def in_good_standing(self, replica: str) -> bool:
        """A member of the committed round of which nothing bad is known."""
        if not self.committed or replica not in self.members:
            return False
        if replica == self.lead.replica:
            return not self.lead_lost
        report = self.report
        return report is None or not any(failure.replica == replica for failure in report.failures)

    @cached
    def lead_lost(self) -> str:
        """Why the committed round has no lead any more, in words that follow its name. At once where its host says so;
        where it is silent, as soon as another member proves that it isn't the operator who is cut off. A world that is
        silent as a whole may be training: it is given time."""
        pod = self.pods.get(self.lead.replica)
        if pod is None or pod.uid != self.lead.uid or pod.ended:
            return "has ended"
        view = self.agent(self.lead.replica)
        refused = view.refusal is ConnectionRefusal.NOT_LISTENING
        if view.alive or not (refused or self.lead_in_doubt):
            return ""
        if refused or pod.deleting or not self.node(pod).ready:
            return "is gone: its agent no longer listens"
        others = any(self.agent(name).connected for name in self.members if name != self.lead.replica)
        silent_for = self.now - (view.lost_at or view.wanted_at)
        return "is silent" if others or silent_for >= constants.WHOLE_WORLD else ""

    @cached
    def lead_in_doubt(self) -> bool:
        """Its stream broke and was not opened again in time; or this operator, new, got no answer from it so far."""
        view = self.agent(self.lead.replica)
        if view.alive:
            return False
        if view.lost_at:
            return self.now - view.lost_at >= constants.RECONNECT
        return bool(view.wanted_at) and self.now - view.wanted_at >= constants.FIRST_CONTACT

    @cached
    def ready(self) -> frozenset[str]:
        """Live replicas whose agents say, on an open stream, that workers can start at once."""
        return frozenset(
            name
            for name in self.live
            if (view := self.agent(name)).connected and view.report and view.report.ready
        )  # fmt: skip

    def address(self, replica: str) -> str:
        pod = self.pods[replica]
        return f"{pod.ip}:{pod.port}"

    @property
    def step(self) -> int:
        """Steps finished, as far as anyone said."""
        told = self.status.progress.step if self.status.progress else 0
        live = self.report.progress if self.report else None
        return max(told, live.step) if live else told

    # --- time

    @property
    def running_for(self) -> float | None:
        """Seconds since the job started; None where it hasn't, or is suspended."""
        return self.now - unix_seconds(self.status.start_time) if self.status.start_time else None

    @property
    def time_left(self) -> float | None:
        """Seconds until the deadline, if there is one ahead."""
        limit, ran = self.spec.active_deadline_seconds, self.running_for
        return limit - ran if limit is not None and ran is not None and limit > ran else None

    @property
    def ended_at(self) -> float:
        """Now, where the job ends in this pass."""
        return unix_seconds(self.status.completion_time) if self.status.completion_time else self.now

    @property
    def time_to_live(self) -> float | None:
        """Seconds until an ended job is to be deleted; None: never."""
        limit = self.spec.ttl_seconds_after_finished
        return self.ended_at + limit - self.now if limit is not None else None

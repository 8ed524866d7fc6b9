"""Rules of the protocol for one agent: they hold for any messages in any order (hypothesis, stateful)."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core import machine
from concertina_agent.core.agent_state import AgentState
from concertina_protocol import worker_channel as w

UID = "u"
ROUNDS = st.integers(1, 4)
CLAIMS = st.sampled_from(["x", "y"])
CANDIDATES = st.sampled_from([("a",), ("a", "b")])
MEMBERS = st.sampled_from([(("a", 1), ("b", 1)), (("b", 1), ("a", 1)), (("a", 0),), (("b", 1),), (("a", 1),)])
"""Pairs of the replica and the start of its agent, the coordinator first."""


class Agent(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.starts, self.now, self.requests = 0, 0.0, 0
        self.disk = (0, "")
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.instance = f"a-{self.starts}"
        self.core = AgentState("a", UID, self.instance, 1, bundled=True, seen=self.disk, storage=p.Storage("Ready"))
        self.open: dict[int, p.Prepare | p.Assign | p.Drain | p.Join] = {}
        self.killing: set[int] = set()
        self.killed = -1
        """Round below which no worker is left."""
        self.running: tuple[int, str] | None = None
        self.started: set[tuple[int, str]] = set()

    def tell(self, event: e.Event) -> None:
        self.now += 0.01
        for effect in machine.step(self.core, event, self.now):
            getattr(self, f"on_{type(effect).__name__}", lambda effect: None)(effect)

    def ask(self, message) -> None:
        self.requests += 1
        self.open[self.requests] = message
        self.tell(e.RequestReceived(self.requests, message))

    # --- what it does, checked

    def on_PersistSeen(self, effect: e.PersistSeen) -> None:
        assert effect.round > self.disk[0] or (effect.round, effect.claim) == self.disk
        self.disk = (effect.round, effect.claim)

    def on_KillWorkers(self, effect: e.KillWorkers) -> None:
        assert self.disk[0] == effect.round, "killed before it was persisted"
        self.killing.add(effect.round)
        self.running = None

    def on_StartRound(self, effect: e.StartRound) -> None:
        key = (effect.assign.round, effect.assign.claim)
        assert key == self.disk
        assert self.running is None
        assert self.killed >= key[0], "started while workers of an older round may live"
        assert effect.assign.members[effect.me].instance == self.instance
        assert key not in self.started
        self.started.add(key)
        self.running = key

    def on_Reply(self, effect: e.Reply) -> None:
        request = self.open.pop(effect.request)  # Each request has exactly one answer.
        answer = effect.message
        if isinstance(answer, p.Refused):
            assert (answer.round, answer.claim) == self.core.seen
            return
        assert (request.round, request.claim) == self.disk, "agreed to what is not the highest seen"
        if isinstance(answer, p.Prepared):
            assert isinstance(request, p.Prepare)
            assert self.killed >= request.round, "answered while workers of an older round may live"

    # --- what happens

    @rule(round=ROUNDS, claim=CLAIMS, names=CANDIDATES)
    def prepare(self, round, claim, names):
        self.ask(p.Prepare(UID, round, claim, tuple(p.Candidate(name, name) for name in names)))

    @rule(round=ROUNDS, claim=CLAIMS, members=MEMBERS, back=st.integers(0, 1))
    def assign(self, round, claim, members, back):
        who = tuple(
            p.Member(name, f"{name}-{self.starts - back if name == 'a' and start else start}", name, rank, 1)
            for rank, (name, start) in enumerate(members)
        )
        self.ask(p.Assign(UID, round, claim, who, "a:9", p.Restore("Fresh")))

    @rule(round=ROUNDS, claim=CLAIMS, durable=st.booleans())
    def drain(self, round, claim, durable):
        self.ask(p.Drain(UID, round, claim, "", durable, 1.0))

    @rule(round=ROUNDS, claim=CLAIMS)
    def join(self, round, claim):
        self.ask(p.Join(UID, round, claim, "b", "b-1"))

    @rule(round=ROUNDS)
    def workers_gone(self, round):
        if round in self.killing:
            self.killed = max(self.killed, round)
            self.tell(e.WorkersGone(round))

    @rule(round=ROUNDS, claim=CLAIMS)
    def store_bound(self, round, claim):
        self.tell(e.StoreBound(round, claim, "a:9"))

    @rule(round=ROUNDS, claim=CLAIMS, names=CANDIDATES)
    def reached(self, round, claim, names):
        self.tell(e.Reached(p.Prepare(UID, round, claim, tuple(p.Candidate(name, name) for name in names)), names))

    @rule(round=ROUNDS, code=st.sampled_from([0, 1, -9]), done=st.sampled_from(["", "complete", "drained"]))
    def worker_exits(self, round, code, done):
        if done:
            self.tell(e.WorkerMessage(round, 0, w.Done(done, 3)))
        self.tell(e.WorkerExited(round, 0, code))

    @rule(round=ROUNDS, step=st.integers(0, 5))
    def commits(self, round, step):
        self.tell(e.WorkerMessage(round, 0, w.Committed(p.SnapshotId(round, step, "l", 2), 0, "slot")))

    @rule(round=ROUNDS, claim=CLAIMS, state=st.sampled_from(["running", "succeeded", "drained"]))
    def member_says(self, round, claim, state):
        self.tell(e.MemberMessage(p.MemberState("b", "b-1", round, claim, state)))

    @rule(round=ROUNDS, claim=CLAIMS)
    def stream_breaks(self, round, claim):
        self.tell(e.MemberGone(round, claim, "b"))
        self.tell(e.CoordinatorGone(round, claim))

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.now += seconds
        self.tell(e.Tick())

    @rule()
    def restart(self):
        self.start()

    @invariant()
    def says_what_it_is(self):
        report = self.core.report()
        assert (report.round, report.claim) == self.disk
        assert (report.state in ("idle", "prepared")) == (self.running is None)
        if report.coordinator and report.state in ("succeeded", "drained"):
            assert {member.state for member in report.members.values()} == {report.state}


Agent.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAgent = Agent.TestCase

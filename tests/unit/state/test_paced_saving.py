"""Steps in which the bundled trainer takes snapshots, in virtual time: `Saving` with a pace and a state of one byte."""

import threading
import time
from types import SimpleNamespace

import pytest

from builders.until import until
from concertina_protocol import JobHistory, SnapshotId
from concertina_protocol.worker_channel import Committed, CopiedUpTo, DrainRequest, Outcome
from concertina_state import saving as saving_module
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.interval import Interval
from concertina_state.pace import Pace
from concertina_state.saving import SaveDecision, SavePolicy, Saving
from concertina_state.snapshots import Snapshots


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class State:
    """State that takes `stall` seconds of the loop's time, and lets nothing be committed while `arrives` is unset."""

    layout = Layout([Chunk("x", "U8", (0,), (1,), (1,))])

    def __init__(self, clock, stall=0.0, device_seconds=0.0):
        self.clock, self.stall, self.device_seconds = clock, stall, device_seconds
        self.arrives = threading.Event()
        self.arrives.set()

    def views(self, file):
        return None

    def copy_to(self, views):
        self.clock.now += self.stall

        def arrival():
            assert self.arrives.wait(60)
            return self.device_seconds

        return arrival

    def before_change(self):
        pass


class Agent:
    """Agent that has a copy on its peer as soon as a snapshot is committed, as in a job of one replica."""

    def __init__(self):
        self.committed, self.waiting = [], []

    def send(self, message):
        if isinstance(message, Committed):
            self.committed.append(message.id.step)
            self.waiting.append(CopiedUpTo(message.id.step))

    def poll(self):
        waiting, self.waiting = self.waiting, []
        return waiting


class Loop:
    """Training loop in a world of one rank."""

    def __init__(self, folder, monkeypatch, stall=0.0, device_seconds=0.0, every=1, overhead=0.01, checkpoints=None):
        self.clock = Clock()
        clocks = {"perf_counter": self.clock.perf_counter, "time": lambda: 0.0}
        real = {"monotonic": time.monotonic, "sleep": time.sleep}
        monkeypatch.setattr(saving_module, "time", SimpleNamespace(**clocks, **real))
        self.state, self.agent = State(self.clock, stall, device_seconds), Agent()
        self.snapshots = Snapshots(folder, self.state)
        metadata = ShardMetadata(SnapshotId(1, 0, "l", 1), 0, 0, "", "")
        policy = SavePolicy(10**6, every, checkpoints is not None, checkpoints)
        interval, pace = Interval(None, JobHistory()), Pace(overhead)
        self.saving = Saving(policy, self.snapshots, metadata, None, interval, self.agent, pace)
        self.step, self.taken = 0, []

    def train(self, steps=1, seconds=1.0, commits=True):
        """Train, and return the last decision. With `commits`, each snapshot is committed before the next step ends."""
        for _ in range(steps):
            if commits:
                until(lambda: not self.snapshots.waits, "a commit")
            self.clock.now += seconds
            flags = self.saving.local_flags()
            self.saving.before_change()
            self.step += 1
            decision = self.saving.decide(self.step, flags)
            self.saving.save(decision, self.step)
            if decision.snapshot:
                self.taken.append(self.step)
        return decision


def test_snapshots_are_as_far_apart_as_makes_them_a_hundredth_of_the_time(tmp_path, monkeypatch):
    loop = Loop(tmp_path, monkeypatch, stall=0.05)
    loop.train(100)
    assert loop.taken[:3] == [1, 2, 7], "the first one finds its memory, the second tells what they cost"
    apart = [after - before for before, after in zip(loop.taken[1:], loop.taken[2:], strict=False)]
    assert set(apart) == {5}
    reported = loop.saving.reported_snapshots
    assert reported is not None
    assert (reported.steps, reported.overhead) == (5, pytest.approx(0.01, rel=0.06))


def test_those_that_cost_next_to_nothing_are_taken_in_each_step(tmp_path, monkeypatch):
    loop = Loop(tmp_path, monkeypatch, stall=0.0001)
    loop.train(10)
    assert loop.taken == list(range(1, 11))


def test_a_copy_that_a_device_makes_beside_the_training_costs_what_the_update_waits_for_it(tmp_path, monkeypatch):
    beside = Loop(tmp_path / "a", monkeypatch, device_seconds=0.9)
    beside.train(10)
    assert beside.taken == list(range(1, 11))
    longer = Loop(tmp_path / "b", monkeypatch, device_seconds=1.095)
    longer.train(20)
    assert longer.taken[-1] - longer.taken[-2] == 10


def test_every_steps_is_the_fewest(tmp_path, monkeypatch):
    loop = Loop(tmp_path, monkeypatch, stall=0.05, every=4)
    loop.train(40)
    assert all(step % 4 == 0 for step in loop.taken)
    assert loop.taken[:2] == [4, 8]
    assert {after - before for before, after in zip(loop.taken[1:], loop.taken[2:], strict=False)} == {8}


def test_no_step_waits_for_the_commit_of_the_snapshot_before(tmp_path, monkeypatch):
    loop = Loop(tmp_path, monkeypatch)
    loop.train(2)
    until(lambda: not loop.snapshots.waits, "a commit")
    loop.state.arrives.clear()
    loop.train()  # The snapshot is taken, and not committed from here on.
    loop.train(5, commits=False)
    assert loop.taken == [1, 2, 3]
    assert loop.agent.committed == [1, 2]
    loop.state.arrives.set()
    loop.train()
    assert loop.taken == [1, 2, 3, 9]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_drain_and_a_checkpoint_are_saved_at_once(tmp_path, monkeypatch, checkpoint):
    """The state is saved although the pace asks for no snapshot, and the previous one is still being committed."""
    loop = Loop(tmp_path, monkeypatch, stall=0.5, checkpoints=12 if checkpoint else None)
    loop.train(10)
    assert loop.taken == [1, 2]
    loop.train(commits=False)
    assert loop.step not in loop.taken
    if not checkpoint:
        loop.agent.waiting.append(DrainRequest(False))
    decision = loop.train()
    assert loop.taken == [1, 2, 12]
    assert decision.durable == checkpoint
    assert decision.outcome == (None if checkpoint else Outcome.DRAINED)
    assert loop.agent.committed == [1, 2, 12], "it is waited for"


def test_what_a_checkpoint_waits_for_does_not_make_snapshots_rarer(tmp_path, monkeypatch):
    loop = Loop(tmp_path, monkeypatch, stall=0.0001, checkpoints=5)
    loop.train(4)
    loop.state.stall = 30.0
    loop.train()
    loop.state.stall = 0.0001
    loop.train(6)
    assert loop.taken == list(range(1, 12))


def test_the_best_step_gets_a_checkpoint_unless_the_upload_of_the_best_before_would_end(tmp_path, monkeypatch):
    loop = Loop(tmp_path, monkeypatch, checkpoints=1000)

    def best(step):
        """Train up to a step and make a checkpoint of it, as the best so far, if its upload ends no other one."""
        loop.train(step - 1 - loop.step)
        flags = loop.saving.local_flags()
        loop.step += 1
        decision, uploading = loop.saving.decide(step, flags), loop.saving.uploading_best
        if uploading is None:
            decision = loop.saving.amended(decision, complete=False, best=True)
        loop.saving.save(decision, step)
        return decision.durable, uploading

    assert best(3) == (True, None)
    assert (tmp_path / "shipping-3").exists()
    assert best(6) == (False, 3), "otherwise none would ever be complete"
    (tmp_path / "shipping-3").unlink()
    assert best(9) == (True, None)
    ended = loop.saving.amended(loop.saving.decide(10, loop.saving.local_flags()), complete=True, best=False)
    assert (ended.outcome, ended.snapshot, ended.durable) == (Outcome.COMPLETE, True, True)


def best_in_flight(loop):
    """Train three steps, and begin to upload the last one as the best."""
    loop.train(2)
    decision = loop.saving.decide(3, loop.saving.local_flags())
    loop.saving.save(loop.saving.amended(decision, complete=False, best=True), 3)


@pytest.mark.parametrize("arrives", [True, False])
def test_the_last_checkpoint_waits_for_the_upload_of_the_best(tmp_path, monkeypatch, capsys, arrives):
    monkeypatch.setattr(saving_module, "BEST_SECONDS", 60.0 if arrives else 0.1)
    loop = Loop(tmp_path, monkeypatch, checkpoints=1000)
    best_in_flight(loop)
    last = loop.saving.amended(loop.saving.decide(4, loop.saving.local_flags()), complete=True, best=False)
    saved = []

    def arrive():
        saved.append(loop.snapshots.count)
        (tmp_path / "shipping-3").unlink()

    if arrives:
        threading.Timer(0.2, arrive).start()
    loop.saving.save(last, 4)
    assert saved == ([4] if arrives else []), "the state of the last step is in memory while it waits"
    assert (tmp_path / "shipping-3").exists() is not arrives
    assert (tmp_path / "shipping-4").exists()
    assert ("step 3, is not kept" in capsys.readouterr().out) is not arrives


def test_a_drain_says_that_it_ends_the_upload_of_the_best(tmp_path, monkeypatch, capsys):
    loop = Loop(tmp_path, monkeypatch, checkpoints=1000)
    best_in_flight(loop)
    loop.agent.waiting.append(DrainRequest(True))
    decision = loop.train()
    assert (decision.outcome, decision.durable) == (Outcome.DRAINED, True)
    assert "step 3, is not kept: its upload was not finished by a drain" in capsys.readouterr().out


def test_without_storage_a_best_step_is_no_checkpoint(tmp_path, monkeypatch):
    loop = Loop(tmp_path, monkeypatch)
    decision = loop.train(3)
    assert loop.saving.amended(decision, complete=False, best=True) == decision


def test_ranks_that_know_of_different_checkpoints_decide_alike_about_the_best(tmp_path, monkeypatch):
    """The agents of a new round may know of different checkpoints: one has seen LATEST move, and another has not."""
    decisions = []
    for known_step in (0, 3):
        (tmp_path / str(known_step)).mkdir()
        loop = Loop(tmp_path / str(known_step), monkeypatch, checkpoints=1000)
        loop.saving._durable_step = known_step
        decision = SaveDecision(3, snapshot=False, durable=False, outcome=None)
        decisions.append(loop.saving.amended(decision, complete=False, best=True))
    assert decisions[0] == decisions[1]
    assert decisions[0].durable

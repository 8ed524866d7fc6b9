"""Decision about the state after a step, from the result on which all ranks agreed."""

from hypothesis import given
from hypothesis import strategies as st

from concertina_protocol.worker_channel import Outcome
from concertina_state.saving import SavePolicy, StepFlags

FLAGS = st.builds(StepFlags, *[st.integers(0, 3)] * 8)
POLICIES = st.builds(SavePolicy, st.integers(1, 20), st.integers(1, 5), st.booleans(), st.none() | st.integers(1, 5))


@given(POLICIES, st.integers(1, 20), FLAGS, st.booleans(), st.booleans())
def test_a_round_ends_with_a_snapshot_and_a_run_with_a_checkpoint(policy, step, flags, due, keeping_up):
    decision = policy.decide(step, flags, due, keeping_up)
    ends = step >= policy.steps or flags.drain > 0
    assert (decision.outcome is not None) == ends
    assert decision.snapshot or not ends
    if step >= policy.steps:
        assert decision.outcome is Outcome.COMPLETE
        assert decision.durable == policy.has_storage
    if not keeping_up and not ends:
        assert not decision.snapshot, "peers still copy what it would be written over"
    assert decision.snapshot or not decision.durable, "what becomes durable is a snapshot"
    assert policy.has_storage or not decision.durable


@given(POLICIES, st.integers(1, 20), FLAGS, st.booleans())
def test_a_checkpoint_that_is_due_waits_for_the_one_before(policy, step, flags, due):
    decision = policy.decide(step, flags, due, keeping_up=True)
    if flags.shipping and step < policy.steps and not flags.drain_durable:
        assert not decision.durable
    elif due and policy.has_storage:
        assert decision.durable


@given(POLICIES, st.integers(1, 20), FLAGS)
def test_a_checkpoint_becomes_due_by_steps_or_by_rank_0_and_only_with_storage(policy, step, flags):
    by_steps = policy.checkpoint_every is not None and step % policy.checkpoint_every == 0
    assert policy.is_due(step, flags) == (policy.has_storage and (by_steps or flags.checkpoint_due > 0))


@given(POLICIES, st.integers(1, 20), FLAGS, st.booleans(), st.booleans())
def test_what_a_script_asks_for_is_saved_though_peers_do_not_keep_up(policy, step, flags, due, keeping_up):
    decision = policy.decide(step, flags, due, keeping_up, required=True)
    assert decision.snapshot
    assert decision.durable == policy.decide(step, flags, due, keeping_up=True).durable


@given(POLICIES, st.integers(1, 20), FLAGS)
def test_a_snapshot_for_the_pace_is_left_out_while_a_rank_is_not_ready_for_it(policy, step, flags):
    decision = policy.decide(step, flags, due=False, keeping_up=True)
    wanted = decision.outcome is not None or decision.durable
    paced = step % policy.snapshot_every == 0 and flags.snapshot_due > 0 and flags.snapshot_waits == 0
    assert decision.snapshot == (wanted or paced)

"""Origin of a state: it always fits into a header, and names the states from which the state was trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from concertina_protocol import SnapshotId
from concertina_state.checkpoints.ancestry import ancestors
from concertina_state.checkpoints.manifest import CheckpointKey, spec_of_this_job
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata, header_length, parse_header
from concertina_state.lineage import (
    MOST_ROUNDS,
    Origin,
    TrainedRound,
    bounded_images,
    device_model,
    setting,
    since,
)

LARGEST = TrainedRound(2**62, 2**62, 2**62, 2**62, "f" * 16)
TEXTS = st.text(max_size=2000) | st.text('"\\\x00\U0001f600', max_size=2000)


@given(TEXTS, st.lists(TEXTS, max_size=9), st.integers(0, 2 * MOST_ROUNDS))
@example("\0" * 1024, [f"{number}" + "\0" * 1000 for number in range(9)], MOST_ROUNDS)
@example("a" * 1018, [f"{number}" + "a" * 1017 for number in range(9)], MOST_ROUNDS)
def test_whatever_is_said_of_its_origin_a_header_keeps_its_size(uri: str, images: list[str], rounds: int) -> None:
    origin = Origin(data_sets=("0" * 16,) * 32, device=device_model(), script="0" * 64)
    origin = dataclasses.replace(origin.begun_with(uri), images=bounded_images(images))
    for _ in range(rounds):
        origin = origin.with_round(LARGEST)
    layout = Layout([Chunk("a", "F32", (0,), (1,), (1,))])
    metadata = ShardMetadata(SnapshotId(1, 2, "l", 1), 0, 3, "c", "d", origin=origin)
    header = layout.header(metadata)
    assert len(header) == layout.data_begin == header_length(header[:8])
    assert parse_header(header[8:]).metadata == metadata


@dataclasses.dataclass(frozen=True)
class State:
    """State of a simulated run, with the states that it was really trained from."""

    round: int
    step: int
    origin: Origin
    before: frozenset[CheckpointKey]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=12))
def test_ancestors_are_the_states_that_one_was_made_from(rounds: list[tuple[int, int]]) -> None:
    """Each round continues from some state of the rounds before it, as after crashes or rollbacks."""
    fresh = State(0, 0, Origin(), frozenset())
    states = [fresh]
    for number, (steps, back) in enumerate(rounds, 1):
        begun = states[max(0, len(states) - 1 - back)]
        now = begun.origin.with_round(TrainedRound(number, begun.step, begun.step, 1, ""))
        before = begun.before | ({CheckpointKey("u", begun.round, begun.step)} if begun.round else set())
        for step in range(begun.step + 1, begun.step + steps + 1):
            states.append(State(number, step, now, before))
            before = before | {CheckpointKey("u", number, step)}
    places = [CheckpointKey("u", state.round, state.step) for state in states if state.round]
    others = [CheckpointKey("another job", place.round, place.step) for place in places]
    for state in states[1:]:
        ancestor_keys = ancestors([*places, *others], "u", SnapshotId(state.round, state.step, "l", 1), state.origin)
        assert set(ancestor_keys) == {place for place in state.before if place.step < state.step}
        assert [place.step for place in ancestor_keys] == sorted(place.step for place in ancestor_keys)


def test_rounds_since_a_step() -> None:
    rounds = tuple(TrainedRound(number, step, 0, 1, "") for number, step in [(1, 0), (3, 5), (4, 5), (7, 9)])
    assert [each.round for each in since(rounds, 0)] == [1, 4, 7]
    assert [each.round for each in since(rounds, 5)] == [4, 7]
    assert [each.round for each in since(rounds, 9)] == [7]


def test_a_setting_is_another_where_image_configuration_or_script_are() -> None:
    one = Origin(images=("a", "b"), script="s")
    others = (
        setting(Origin(images=("a",), script="s"), "c"),
        setting(one, "d"),
        setting(Origin(images=("a", "b"), script="t"), "c"),
    )
    assert setting(Origin(images=("b", "a"), script="s"), "c") == setting(one, "c")
    assert setting(one, "c") not in others


def test_the_spec_is_put_together_from_what_the_pod_is_told(monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("CONCERTINA_TRAINER", '{"steps": 3}')
    monkeypatch.setenv("CONCERTINA_CHECKPOINT", '{"uri": "s3://b/c", "everySteps": null}')
    monkeypatch.delenv("CONCERTINA_SPEC", raising=False)
    assert spec_of_this_job() == {}
    for nothing in ("", "[1]", "{"):
        monkeypatch.setenv("CONCERTINA_SPEC", nothing)
        assert spec_of_this_job() == {}
    monkeypatch.setenv("CONCERTINA_SPEC", '{"replicas": 2}')
    assert spec_of_this_job() == {"replicas": 2, "trainer": {"steps": 3}, "checkpoint": {"uri": "s3://b/c"}}

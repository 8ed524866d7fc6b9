"""Union of the states that several rollbacks have undone."""

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from concertina_protocol import Undone
from concertina_protocol.messages.undone import MOST_UNDONE, joined

SOME = st.lists(st.builds(Undone, st.integers(1, 9), st.integers(0, 20)), max_size=12)


@given(SOME, st.integers(1, 10), st.integers(0, 21))
def test_joined_covers_what_each_covers_and_nothing_else(several: list[Undone], round: int, step: int) -> None:
    together = reduce(joined, several, ())
    assert any(one.covers(round, step) for one in together) == any(one.covers(round, step) for one in several)
    assert [one.round for one in together] == sorted({one.round for one in together})
    assert [one.step for one in together] == sorted({one.step for one in together})


def test_the_oldest_are_forgotten() -> None:
    several = [Undone(at, at) for at in range(MOST_UNDONE + 3)]
    assert reduce(joined, several, ()) == tuple(several[3:])

"""Exchange of speeds between ranks: all of them compute the same shares at the same step."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.training.balance import WINDOW, Balance

CPU = torch.device("cpu")


class Recorded:
    """Replacement of Batches that records the changes of plans."""

    def __init__(self, world):
        self.plan, self.changes = plan_batch(24, 8, world), []

    def change(self, plan):
        self.changes.append(plan)


def look(balances, seconds, hiccup=()):
    """Play a window's steps with these seconds a row of each rank.

    Ranks in `hiccup` take ten times as long three times.
    """
    for step in range(WINDOW):
        for rank, (balance, each) in enumerate(zip(balances, seconds, strict=True)):
            assert balance.payload(CPU).numel() == 0
            share = balance.shares[rank]
            balance.total += share * each * (10 if rank in hiccup and step < 3 else 1)
            balance.worked([SimpleNamespace(tokens=range(share))], balance.total)
    word = torch.stack([balance.payload(CPU) for balance in balances]).sum(0).tolist()
    return [balance.decide(word) for balance in balances]


def team(world, on=True):
    balances = [Balance(on, Recorded(world), 8, rank) for rank in range(world)]
    for balance in balances:
        balance.total = 0.0
        balance.worked([SimpleNamespace(tokens=range(24))], 0.0)  # the first step
    return balances


@given(seconds=st.lists(st.floats(0.001, 1), min_size=1, max_size=6))
def test_all_ranks_change_to_the_same_plan(seconds):
    balances = team(len(seconds))
    look(balances, seconds)
    look(balances, seconds)
    first = balances[0]
    for balance in balances:
        assert balance.shares == first.shares
        assert balance._batches.changes == first._batches.changes
        assert len(balance._batches.changes) <= 1, "the second look finds nothing better"
        assert all(plan.shares == first.shares for plan in balance._batches.changes)


def test_a_change_is_said_and_a_hiccup_is_none():
    balances = team(3)
    assert look(balances, (0.01, 0.01, 0.01), hiccup=[1]) == ["", "", ""]
    sentences = look(balances, (0.01, 0.01, 0.02))
    assert sentences == ["balance: sequences per step by rank: 10 9 5; milliseconds per sequence: 10.0 10.0 20.0"] * 3
    assert [balance.reported for balance in balances] == [(10, 9, 5)] * 3
    assert look(balances, (0.01, 0.01, 0.01))[0].startswith("balance: sequences per step by rank: 8 8 8;")


def test_a_rank_that_measures_no_work_at_all_speaks_when_the_others_do():
    balances = team(2)
    sentences = look(balances, (0.0, 0.01))
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith("balance: sequences per step by rank: 18 6;")


def test_without_it_nothing_travels():
    balance = team(1, on=False)[0]
    for step in range(3 * WINDOW):
        balance.worked([SimpleNamespace(tokens=range(24))], 1.0 + step)
        assert balance.payload(CPU).numel() == 0
    assert balance.decide(()) == ""
    assert balance.reported == ()
    assert not balance._batches.changes

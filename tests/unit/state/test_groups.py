"""Parameter groups of an optimizer: they are matched by the names of their parameters, or refused with an error."""

import pytest

from concertina_state.errors import InvalidInput
from trainingjob._groups import check_by_position, match_groups

DECAY, PLAIN = {"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}
SAVED = [(["model.w", "model.v"], DECAY), (["model.b"], PLAIN)]


@pytest.mark.parametrize(
    ("saved", "now", "sources"),
    [
        (SAVED, [["model.w", "model.v"], ["model.b"]], [0, 1]),
        (SAVED, [["model.b"], ["model.v", "model.w"]], [1, 0]),
        (SAVED, [["model.w"], ["model.b"], ["model.v"]], [0, 1, 0]),
        ([(["model.w"], PLAIN), (["model.b"], PLAIN)], [["model.w", "model.b"]], [0]),
        ([(["model.w"], PLAIN), ([], DECAY)], [["model.w"], []], [0, 1]),
    ],
    ids=["as saved", "in another order", "split", "merged", "empty"],
)
def test_groups_take_the_options_of_their_parameters(saved, now, sources):
    assert match_groups("optimizer", saved, now) == sources


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        ([["model.w", "model.v"]], r"optimizer was saved with model\.b, .* add it \(optimizer\.add_param_group\)"),
        ([["model.w", "model.v"], ["model.b", "model.c"]], r"optimizer now has model\.c, which no group had"),
        ([["model.w", "model.v", "model.b"]], r"model\.w and model\.b in groups of different weight_decay"),
    ],
)
def test_groups_that_can_not_be_match_groups_are_refused(now, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        match_groups("optimizer", SAVED, now)


@pytest.mark.parametrize(
    ("state", "sources", "count"),
    [
        ({"base_lrs": [0.1, 0.2]}, [1, 0], 2),
        ({"_schedulers": [{"last_epoch": 3}, {"base_lrs": [0.1, 0.2]}]}, [1, 0], 2),
        ({"base_lrs": [0.1]}, [0, 0], 1),
        ({"base_lrs": [0.1, 0.1]}, [0, 1, 0], 2),
    ],
    ids=["swapped", "nested", "split", "more groups"],
)
def test_a_scheduler_with_values_by_position_is_refused_if_groups_moved(state, sources, count):
    with pytest.raises(InvalidInput, match=r"scheduler has one value for each group of its optimizer \(base_lrs\)"):
        check_by_position("scheduler", state, sources, count)


def test_a_scheduler_is_taken_if_its_groups_are_where_they_were_or_all_alike():
    check_by_position("scheduler", {"base_lrs": [0.1, 0.2]}, [0, 1], 2)
    check_by_position("scheduler", {"base_lrs": [0.1, 0.1], "milestones": {2: 1}}, [1, 0], 2)

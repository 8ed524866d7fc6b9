"""The training loop where the round ends within a step."""

from __future__ import annotations

from unittest import mock

import pytest

from concertina_protocol.worker_channel.rounds import RoundLeft
from concertina_trainer.training import loop


def test_the_sums_of_a_step_in_which_the_round_has_ended_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that was aborted may return, and what it returns is no sum."""
    over = False

    def agree(*arguments: object) -> mock.Mock:
        nonlocal over
        over = True
        return mock.Mock()

    def check() -> None:
        if over:
            raise RoundLeft

    monkeypatch.setattr(loop, "agree", agree)
    run = mock.MagicMock()
    run.config.last_step, run.begin.return_value = 2, None
    with pytest.raises(RoundLeft):
        loop.train(run, 0, 0, check)
    run.engine.forward_backward.assert_called_once()
    for change in (run.optimizer.update, run.optimizer.drop_gradients, run.saving.save, run.digests.check):
        change.assert_not_called()


def test_weights_are_not_saved_if_the_round_has_ended_in_an_update_with_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gather of whole matrices that was aborted may return too, once the device has finished."""
    run, over = mock.MagicMock(), False

    def end() -> None:
        nonlocal over
        over = True

    def check() -> None:
        if over:
            raise RoundLeft

    monkeypatch.setattr(loop, "computed", mock.Mock())
    monkeypatch.setattr(loop, "learning_rate", mock.Mock())
    monkeypatch.setattr(loop, "clip_scale", mock.MagicMock())
    run.config.last_step, run.begin.return_value, run.anomalies.skips.return_value = 2, None, ""
    run.scaling.lowered.return_value = False
    run.optimizer.communicates, run.optimizer.finish.side_effect = True, end
    with pytest.raises(RoundLeft):
        loop.train(run, 0, 0, check)
    run.optimizer.update.assert_called_once()
    run.saving.decide.assert_not_called()

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

"""What a worker says of its pace."""

import pytest
import torch

from concertina_protocol import SnapshotInterval
from concertina_protocol.heartbeat import HeartbeatWriter
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.parallel.step_times import StepTimes
from concertina_trainer.training.progress_report import Reporter, RoundInfo, StepInfo


class Sent(list):
    send = list.append


@pytest.mark.parametrize(("documents", "total"), [("Joined", 32 * 2048), ("Bucketed", None)])
def test_tokens_are_those_of_the_step(monkeypatch, documents, total):
    """And no total of what steps had of which nothing is known any more."""
    monkeypatch.setenv("CONCERTINA_ROUND", "1")
    model = {"sequenceLength": 2048}
    trainer = {"data": {"uri": "/data", "documents": documents}, "globalBatchSize": 32, "model": model}
    sent = Sent()
    reporter = Reporter(TrainerConfig.model_validate(trainer), 0, sent, HeartbeatWriter({}), None)
    times = StepTimes(torch.device("cpu"))
    flops = {"token_flops": 6.0, "token_flops_full_attention": 9.0, "peak_flops": 12.0, "recomputed_flops": 2.0}
    reporter.begin(RoundInfo(0, "Fresh", times, **flops))
    reporter.step(StepInfo(1, 32, 4664, 1.0, 1.0, 1e-3, None, 0.0, 0.0, (), (), None, SnapshotInterval(3, 0.008)))
    told = sent[-1]
    assert told.tokens == total
    assert told.snapshots == SnapshotInterval(3, 0.008)
    assert told.tokens_per_second * told.step_seconds == pytest.approx(4664)
    assert told.mfu == pytest.approx(told.tokens_per_second / 2)
    assert told.mfu_full_attention == pytest.approx(told.tokens_per_second * 9 / 12)
    assert told.metrics["hfu"] == pytest.approx(told.tokens_per_second * 8 / 12)

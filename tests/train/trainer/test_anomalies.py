"""Steps that look wrong, with real workers: samples that are left out, going back, and bits that flip."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

import builders.strange
from builders.programs import FAULTS, SEARCH_PATH
from builders.strange import BATCH, STEPS
from builders.train import node, states
from builders.train.replicas import running
from concertina.cli.checkpoint import app
from concertina_protocol import Restore, Undone
from concertina_protocol.worker_channel import Undo
from concertina_state.checkpoints.latest import read_all_of_latest, read_latest
from concertina_state.format.shardfile import header_length, parse_header
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.uploader import Destination, answer
from concertina_trainer.data.read.skips import positions


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    return builders.strange.strange(tmp_path_factory.mktemp("strange"))


def policy(strange, **anomalies):
    trainer, step = strange
    return {**trainer, "anomalies": {"spikeDeviations": 2, **anomalies}}, step


def last_metadata(job):
    content = job.find(job.newest().id, 0).read_bytes()
    return parse_header(content[8 : header_length(content[:8])]).metadata


def test_a_spike_s_batch_is_left_out_and_stays_so_in_another_world(folder, parent, strange):
    trainer, step = policy(strange, spike="Skip")
    job = node.Job(folder / "a", parent, trainer)
    first = job.run(2, script=node.Script(kill=(step + 9, (0, 1)), kill_with=step + 1))
    assert f"samples {step * BATCH} to {step * BATCH + 3}: " in first.output.replace(")", "")
    (said,) = states.replicated(job)
    assert json.loads(said)["skipped"] == [[step * BATCH, step * BATCH + BATCH]]
    assert first.progress[-1].skipped == ((step * BATCH, step * BATCH + BATCH),)
    second = job.run(1, job.newest())
    assert second.codes == {0: 0}, second.output
    assert last_metadata(job).skipped == ((step * BATCH, step * BATCH + BATCH),)
    assert (last_metadata(job).position, last_metadata(job).id.step) == (STEPS * BATCH, STEPS)
    whole = node.Job(folder / "b", parent, trainer)
    expected = whole.run(1).losses
    assert {**first.losses, **second.losses} == pytest.approx(expected, rel=1e-2, abs=1e-4)
    assert max(loss for at, loss in expected.items() if at > step) < 0.5, "the noise was trained on"


def test_a_rollback_goes_to_the_checkpoint_before_and_leaves_out_what_led_there(folder, parent, strange, tmp_path):
    trainer, step = policy(strange, spike="RollBack", rollbackSteps=12)
    job = node.Job(folder, parent, trainer, {"uri": f"file://{tmp_path}/durable", "everySteps": 4, "keep": 40})
    job.worker = "workers.slowed:main"  # a step is not faster than a checkpoint by far
    first = job.run(2)
    (fault,) = {fault.rollback for fault in first.faults.values()}
    assert {fault.reason for fault in first.faults.values()} == {"LossSpike"}, first.output
    assert fault.step == step - 12
    assert fault.skipped == positions((step - 12) * BATCH, (step + 1) * BATCH, ())
    latest = first.durable[-1]
    assert latest.step > fault.step, "the newest checkpoint is of after what has to be undone"
    undone = Undone(1, fault.step)
    answer(Undo(undone), Destination.of(json.dumps(job.checkpoint)), job.uid)
    good = max(each.step for each in first.durable if each.step <= fault.step)
    assert read_latest(ObjectPrefix(job.checkpoint["uri"])).step == good
    second = job.run(2, Restore("Storage", fault.step, durable=latest, skipped=fault.skipped, undone=undone))
    assert set(second.codes.values()) == {0}, second.output
    assert second.progress[-1].restored_step == good
    assert second.durable[0].round == 2
    assert second.durable[0].step < latest.step, "LATEST goes back"
    assert (last_metadata(job).skipped, last_metadata(job).id.step) == (fault.skipped, STEPS)
    said = CliRunner().invoke(app, ["show", job.checkpoint["uri"]]).output
    [(begin, end)] = fault.skipped
    assert f"samples {begin} to {end - 1}" in said
    assert f"training was rolled back in round 1 beyond step {fault.step}" in said


@pytest.mark.long(
    law="tests/train/trainer/test_anomalies.py::test_a_rollback_goes_to_the_checkpoint_before_and_leaves_out_what_led_there"
)
def test_latest_goes_back_as_soon_as_a_rollback_is_said_and_waits_for_no_new_round(folder, parent, strange, tmp_path):
    """Under a real agent: the job may be deleted right then, and be made again."""
    trainer, step = policy(strange, spike="RollBack", rollbackSteps=12)
    uri, fault = f"file://{tmp_path}/durable", tmp_path / "fault"
    fault.write_text("0 slow 0.02")  # a step is not faster than a checkpoint by far
    environment = {
        "CONCERTINA_TRAINER": json.dumps(trainer),
        "CONCERTINA_CHECKPOINT": json.dumps({"uri": uri, "everySteps": 4}),
        "PYTHONPATH": f"{SEARCH_PATH}:{FAULTS}",
        "FAULT": str(fault),
    }

    async def body():
        async with running(folder, 1, ["--bundled"], **environment) as job:
            await job.begin(1, job[0])
            report = await job.until(job[0], lambda r: r.failures, "never failed")
            assert report.failures[0].rollback.step == step - 12
            gone_back = lambda r: r.storage.latest and r.storage.latest.step <= step - 12  # noqa: E731
            report = await job.until(job[0], gone_back, "LATEST names what was undone")
            latest = read_all_of_latest(ObjectPrefix(uri))
            assert latest.durable == report.storage.latest
            assert latest.undone == (Undone(1, step - 12),)

    asyncio.run(body())


@pytest.mark.parametrize("kind", ["resting", "gathered"])
def test_a_flipped_bit_is_seen_and_its_rank_is_named(folder, parent, trainer, kind):
    job = node.Job(folder, parent, {**trainer, "anomalies": {"corruptionCheckSteps": 2}})
    job.worker, job.environment = "workers.corrupted:main", {"FLIP": f"{kind} 1 6", "CONCERTINA_NODE": "n7"}
    outcome = job.run(3)
    fault = outcome.faults[1]
    assert (fault.reason, fault.rollback.step) == ("SilentCorruption", 4), outcome.output
    assert "after step 6: rank 1 " in fault.message
    assert "(this is rank 1 on node n7)" in fault.message
    assert not any("on node" in outcome.faults[rank].message for rank in outcome.faults if rank != 1)
    assert max(outcome.losses) == 6, "nothing is trained with it"


def test_checks_find_nothing_where_nothing_is_wrong(folder, parent, trainer):
    job = node.Job(folder, parent, {**trainer, "anomalies": {"corruptionCheckSteps": 1}})
    outcome = job.run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output

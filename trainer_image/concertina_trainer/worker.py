"""Worker process of one rank, which is forked from the preloaded parent and can take part in several rounds.

The parent has imported all modules (see `preload`).

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from pydantic import ValidationError

from concertina_protocol import FailureReason, Restore, RestoreSource, Rollback, SnapshotId
from concertina_protocol.heartbeat import HeartbeatWriter, WorkerPhase
from concertina_protocol.messages.ranges import united
from concertina_protocol.worker_channel import (
    BAD_INPUT_EXIT,
    ENTERED,
    ChannelClosed,
    Done,
    Fault,
    Hello,
    Left,
    ListCalls,
    Message,
    Outcome,
    Start,
    WorkerEnd,
)
from concertina_protocol.worker_channel.rounds import RoundChannel, RoundLeft
from concertina_state import collective_calls, process_groups
from concertina_state.checkpoints.catalogue import instead_of
from concertina_state.errors import DamagedInput, DataChanged, InvalidInput, RestoreFailed
from concertina_state.format.shardfile import ShardMetadata
from concertina_state.interval import Interval
from concertina_state.lineage import TrainedRound, of_round
from concertina_state.objects.prefix import StorageError
from concertina_state.pace import Pace
from concertina_state.saving import SavePolicy, Saving
from concertina_state.snapshots import Snapshots
from concertina_trainer.config.checkpoint_config import CheckpointConfig
from concertina_trainer.config.data_config import Balancing
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import Compile, TrainerConfig, compile_obstacle
from concertina_trainer.data.read.batch import batch_plan
from concertina_trainer.data.read.batches import AHEAD, AHEAD_OF_SHARES, Batches
from concertina_trainer.data.read.readers import Readers
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.errors import RollBack
from concertina_trainer.fitting import fitted
from concertina_trainer.layouts import problems
from concertina_trainer.model import hf
from concertina_trainer.model.flops import peak_flops, recomputed_flops, token_flops
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.model.own import OwnSpec, own_spec
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel import compiled, group, summing, tensor
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.described_model import read_model_setting, with_described_model
from concertina_trainer.state.restore import NEW_RUN, Recorded, recorded, restore, usable_start
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training import collection
from concertina_trainer.training.anomalies import Anomalies
from concertina_trainer.training.balance import Balance
from concertina_trainer.training.digests import Digests
from concertina_trainer.training.engine import engine_of
from concertina_trainer.training.evaluation import Evaluation, evaluation_readers
from concertina_trainer.training.expert_loads import ExpertLoads
from concertina_trainer.training.loop import TrainingRun, train
from concertina_trainer.training.loss_scaling import LossScaling
from concertina_trainer.training.progress_report import Reporter, RoundInfo

AFTER_THE_CULPRIT = 0.5
"""Seconds by which a rank delays its report of corruption on other ranks.

The rank whose memory is corrupt then reports first.
"""
KEPT_LINES = 50
"""Number of lines at the end of a traceback that are sent to the agent."""


def main() -> NoReturn:
    """Run the rounds of this worker process, and exit.

    The exit status is 0 after Done, and 78 after a Fault for invalid input. After any other error it is 1, and the last
    lines of stderr contain the reason.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if process_groups.can_stay():
        process_groups.prepare_to_stay()
    connections = process_groups.Connections()
    channel = RoundChannel(WorkerEnd(os.environ["CONCERTINA_SOCKET"]), connections.abort)
    heartbeat = HeartbeatWriter()
    entered, stayed = float(os.environ[ENTERED]) if ENTERED in os.environ else None, False
    readers = Readers()
    while isinstance(end := one_round(channel, heartbeat, readers, entered, stayed), Left):
        channel.say_left(end)
        gc.collect()  # frees the old model while the agents prepare the next round
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # otherwise the next round's streams could not use the freed memory
        entry = channel.next_round()
        connections.release()
        os.environ.update(entry.environment)
        entered, stayed = time.perf_counter(), True
    channel.finish()
    # Exit at once. A regular exit would wait for the group's threads, and for a peer that may be gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end)


def one_round(
    channel: RoundChannel, heartbeat: HeartbeatWriter, readers: Readers, entered: float | None, stayed: bool
) -> Left | int:
    """Run one round. Return Left if this process stays for the next round, and otherwise the exit status.

    In a drain, all ranks stop after the same step. The process stays after a drain, after the loss of the connection to
    another rank, and when the agent ends the round. After any other end, the process exits, because a new process is a
    safer start for another round (decision "A survivor keeps its process").

    Args:
        channel: Connection to the agent.
        heartbeat: File with the position of this process.
        readers: Readers of the data, which the process keeps for all rounds.
        entered: Time (time.perf_counter) at which this process entered the round, or None if it was started for it.
        stayed: Whether the process has taken part in an earlier round.
    """
    round = int(os.environ["CONCERTINA_ROUND"])
    offer = Hello(int(os.environ["RANK"]), os.getpid(), traces=True, stays=process_groups.can_stay(), lists_calls=True)
    stays, code, output = stayed, 1, ""
    try:
        channel.enter(round, offer, functools.partial(_handled_at_once, channel))
        start = channel.receive(Start)
        stays = offer.stays and start.stays
        done = run(channel, start, Reporter(configuration()[0], offer.rank, channel, heartbeat, entered), readers)
        channel.send(done)
        code, stays = 0, stays and done.outcome == Outcome.DRAINED
    except RoundLeft:
        pass
    except InvalidInput as error:
        if isinstance(error, DamagedInput) and error.rollback:
            return _fault(channel, error.reason, error, 1, error.rollback)
        return _fault(channel, error.reason, InvalidInput(f"{error}{instead_of(error)}"), BAD_INPUT_EXIT)
    except RestoreFailed as error:
        return _fault(channel, FailureReason.RESTORE_FAILED, error, 1)
    except RollBack as error:
        if error.reason == FailureReason.ROLLED_BACK:
            time.sleep(AFTER_THE_CULPRIT)
        return _fault(channel, error.reason, error, 1, Rollback(error.step, error.skipped))
    except FloatingPointError as error:
        return _fault(channel, FailureReason.LOSS_NOT_FINITE, error, 1)
    except StorageError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:
        stays = stays and process_groups.lost_peer(error, aborted=channel.over)
        if not stays or not channel.over:
            output = traceback.format_exc()
            sys.stderr.write(output)
    if not stays:
        return code
    channel.end_round()
    process_groups.leave()
    return Left(round, code, tuple(output.splitlines()[-KEPT_LINES:]))


def _handled_at_once(channel: RoundChannel, message: Message) -> bool:
    """Answer a message that can't wait until the main thread reads it. For any other message, return False."""
    if not isinstance(message, ListCalls):
        return False
    collective_calls.answer(channel.send)
    return True


def _fault(
    channel: RoundChannel, reason: FailureReason, error: Exception, code: int, rollback: Rollback | None = None
) -> int:
    print(error, file=sys.stderr)
    with contextlib.suppress(ChannelClosed, RoundLeft):
        channel.send(Fault(reason, str(error), rollback))
    return code


def configuration() -> tuple[TrainerConfig, CheckpointConfig | None, ParallelismConfig]:
    """Return the configuration of trainer, checkpoints and parallelism from environment variables.

    Raises:
        InvalidInput: When the configuration is invalid, or the model can't be trained in this layout.
    """
    try:
        config = TrainerConfig.model_validate(json.loads(os.environ["CONCERTINA_TRAINER"]))
    except ValidationError as error:
        messages = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InvalidInput(f"spec.trainer can't be used: {messages}") from error
    checkpoint = json.loads(os.environ.get("CONCERTINA_CHECKPOINT", "null"))
    layout = ParallelismConfig.model_validate_json(os.environ.get("CONCERTINA_PARALLELISM") or "{}")
    _check_layout(config, layout)
    return config, CheckpointConfig.model_validate(checkpoint) if checkpoint else None, layout


def _check_layout(config: TrainerConfig, layout: ParallelismConfig) -> None:
    """Check that the model can be trained in this parallel layout, with this number of ranks.

    Raises:
        InvalidInput: When the model can't be trained in the layout.
    """
    if wrong := problems(config, layout, int(os.environ["WORLD_SIZE"])):
        raise InvalidInput(f"this model can't be trained with this parallelism: {'; '.join(wrong)}.")


@dataclasses.dataclass(frozen=True)
class Built:
    """Model, optimizer and data of a round, as they are before a state is restored into them.

    A round is a period in which a fixed set of replicas trains.
    """

    config: TrainerConfig
    checkpoint: CheckpointConfig | None
    world: DistContext
    reader: Reader
    aside: dict[str, Reader]
    """Reader of each evaluation set, keyed by name, or empty without trainer.evaluation."""
    model: Stages
    optimizer: LocalOptimizer
    state: TrainState


def run(channel: RoundChannel, start: Start, reporter: Reporter, readers: Readers) -> Done:
    """Run the whole round: join the process group, build the model, restore the state, and train.

    All resources of the round are closed when this function returns, except `readers`.
    """
    config, checkpoint, parallelism = configuration()
    config, model_source = with_described_model(config, start.restore, channel)
    _check_layout(config.model_copy(update={"model": config.model.model_copy(update={"from_": None})}), parallelism)
    reporter.note(model_source)
    if config.bitwise:
        group.make_deterministic()
    reporter.starting(WorkerPhase.STARTING, start.restore.step)
    cuda = torch.cuda.is_available()
    compile = compiled.choose(config, cuda)
    with reporter.timed("group"):
        world = group.join(os.environ, parallelism, config.model.experts is not None)
        if compile is Compile.blocks:
            compiled.share_between_rounds(world)
    with reporter.timed("build"):
        source = usable_start(start.restore, start.uid, world)
        saved = recorded(source, start.uid, checkpoint, config.model, world, channel)
        built = build(config, checkpoint, world, start.restore.step, reporter, readers, saved, channel.check)
        if compile is Compile.blocks:
            for part in built.model.parts:
                compiled.compile_blocks(part)
    config = built.config
    read = read_model(built)
    reporter.settings = {**reporter.settings, **read}
    reporter.note(f"model.hf is {read['model.hf']}" if config.model.hf else "")
    if config.compile is None:
        reporter.settings = {**reporter.settings, "compile": compile.value}
        obstacle = compile_obstacle(config) if cuda else ""
        reporter.note(f"blocks are not compiled: {obstacle}" if obstacle else "")
    reporter.starting(WorkerPhase.RESTORING, start.restore.step)
    with reporter.timed("restore"):
        digest = built.reader.digest
        restored = restore(
            source, start.uid, built.state, config, checkpoint, digest, world, channel, saved.frozen
        )  # fmt: skip
    if (warmup := config.optimizer.resolved_warmup_steps(config.steps)) > config.steps:
        reporter.note(
            f"optimizer.warmupSteps ({warmup}) is greater than steps ({config.steps}), so the learning rate "
            "never reaches learningRate"
        )
    reporter.begin(round_info(built, start.restore, restored))
    training = assemble(built, start, restored, reporter, channel)
    with (
        tensor.measured_waits(world), compiled.groups_released(world), collection.scheduled(),
        contextlib.closing(training.batches), contextlib.closing(training.saving),
    ):  # fmt: skip
        return train(training, restored.id.step, restored.position, channel.check)


def build(
    config: TrainerConfig,
    checkpoint: CheckpointConfig | None,
    world: DistContext,
    step: int,
    reporter: Reporter,
    readers: Readers,
    saved: Recorded = NEW_RUN,
    check: Callable[[], None] = lambda: None,
) -> Built:
    """Build the data reader, the model and the optimizer. The state is restored later.

    `saved` contains the facts that are recorded with the state to restore. `check` raises an error if the round is
    over.

    Raises:
        InvalidInput: When the data do not fit the model, or can't be used.
    """
    begun, length = step > 0, config.model.sequence_length
    with readers.of_next_round():
        reader = readers.open(config.data, length, config.seed, begun, on_wait=reporter.stalled)
        aside = evaluation_readers(config, reader, readers, begun)
    own = own_spec(config, reader)
    if own is None and (reader.fields or not reader.vocab_size):
        found = f"the fields {', '.join(map(str, reader.fields))}" if reader.fields else "no field token"
        raise InvalidInput(
            f"the data have {found}, and the decoder is trained on tokens alone: set trainer.model.entrypoint to a "
            "model of your own, or build data from text."
        )
    if own is None and reader.vocab_size > config.model.vocab_size:
        raise InvalidInput(
            f"the data contain tokens up to {reader.vocab_size - 1}, but the model has vocabSize "
            f"{config.model.vocab_size}: set trainer.model.vocabSize to {reader.vocab_size}."
        )
    _check_data(config, reader.digest)
    settings = fitted(config, own, reader, saved, world, check)
    reporter.note(settings.note)
    reporter.settings = settings.chosen
    config = settings.config
    own = own and OwnSpec(config, own.data)
    model = parallelized(config, world, own)
    optimizer = LocalOptimizer(model, config.optimizer, step, exact=config.bitwise)
    state = TrainState(model, config, optimizer, world, saved.frozen)
    return Built(config, checkpoint, world, reader, aside, model, optimizer, state)


def read_model(built: Built) -> dict[str, str]:
    """Return the entry of `status.settings` for a model that was read for `model.from` or `model.hf`, if any."""
    own = built.model.own
    layers, weights = (len(own.blocks), own.weights) if own else (0, 0)
    left_out = hf.left_out(own.model) if own and built.config.model.hf else ""
    return read_model_setting(built.config.model, layers, weights, left_out)


def _check_data(config: TrainerConfig, digest: str) -> None:
    """Check that a run of `concertina reproduce` has the data on which its checkpoint was trained.

    Raises:
        DataChanged: When the digest of the data differs.
    """
    required_digest = config.reproduction and config.reproduction.data_digest
    if required_digest and required_digest != digest:
        raise DataChanged(
            f"the data have digest {digest}, but the checkpoint to reproduce was trained on data with "
            f"digest {required_digest}: set trainer.data to the same data, or remove trainer.reproduction "
            "to train on these."
        )


def round_info(built: Built, requested: Restore, restored: ShardMetadata) -> RoundInfo:
    peak = peak_flops(built.world.device)
    resumed = requested.source == RestoreSource.FRESH and restored.id.step > 0  # checkpoint.resumeFrom
    return RoundInfo(
        restored.id.step,
        "Storage" if resumed else requested.source,
        built.world.times,
        built.model.own.own.flops() if built.model.own else token_flops(built.config.model),
        None if built.model.own else token_flops(built.config.model, full_attention=True),
        peak and built.world.size * peak,
        None if built.model.own else recomputed_flops(built.config.model, built.config.memory.resolved_activations),
    )


def assemble(
    built: Built, start: Start, restored: ShardMetadata, reporter: Reporter, channel: RoundChannel
) -> TrainingRun:
    """Return all parts of the training run that `train` needs, set to the step and position of the restored state."""
    config, world = built.config, built.world
    reproduced = config.reproduction.skipped if config.reproduction else ()
    anomalies = Anomalies(config, united(restored.skipped, start.restore.skipped, reproduced), restored.trend)
    built.reader.leave_out(anomalies.skipped)
    plan = batch_plan(config, world.degrees)
    sums = summing.sums(config, built.model, plan, world)
    engine = engine_of(built.model, built.optimizer, sums, config, plan, world)
    saving = begin_saving(built, start, restored, channel)
    ahead = AHEAD_OF_SHARES if config.data.balance is Balancing.speed else AHEAD
    batches = Batches(built.reader, plan, world.data_rank, restored.position, world.device, ahead)
    balance = Balance(
        config.data.balance is Balancing.speed, batches, config.resolved_micro_batch_size, world.data_rank
    )
    every = config.anomalies.corruption_check_steps
    digests = Digests(every, built.model, built.state.tensors, world, restored.id.step)
    evaluation = None
    if config.evaluation:
        evaluation = Evaluation(
            config.evaluation, built.aside, plan, built.model, engine, sums, world, reporter, saving,
            restored.evaluations,
        )  # fmt: skip
    return TrainingRun(
        config, world, engine, built.optimizer, sums, batches, balance, ExpertLoads(built.model, config.model),
        anomalies, digests, saving, reporter,
        LossScaling(config.precision, restored.loss_scale, own=config.model.entrypoint is not None), evaluation,
        built.checkpoint is not None and built.checkpoint.keep_best,
    )  # fmt: skip


def begin_saving(built: Built, start: Start, restored: ShardMetadata, channel: RoundChannel) -> Saving:
    """Return the object that takes snapshots and makes checkpoints in this round.

    The time until the next checkpoint is counted from the newest durable checkpoint. Checkpoints that a rollback has
    made invalid are ignored.
    """
    config, checkpoint, world, state = built.config, built.checkpoint, built.world, built.state
    round, digest = int(os.environ["CONCERTINA_ROUND"]), config.digest()
    trained = TrainedRound(round, restored.id.step, restored.position, world.size)
    metadata = dataclasses.replace(
        restored,
        id=SnapshotId(round, restored.id.step, state.digest, world.size),
        shard=world.rank,
        config=digest,
        data=built.reader.digest,
        origin=of_round(restored.origin, trained, digest, built.reader.digests, start.images),
    )
    durable = start.durable or start.restore.durable
    if durable and start.restore.bars(durable, start.uid):
        durable = None
    snapshots = Snapshots(Path(os.environ["CONCERTINA_SNAPSHOTS"], f"shard-{world.rank}"), state.saved)
    every = checkpoint.every_steps if checkpoint else None
    policy = SavePolicy(config.last_step, config.snapshot.every_steps, checkpoint is not None, every)
    interval = Interval(checkpoint.every_seconds if checkpoint else None, start.history)
    return Saving(policy, snapshots, metadata, durable, interval, channel, Pace(config.snapshot.overhead))

"""Restoration of the state with which a round begins.

The state is computed from the seed, or read from the memory of this or another node, or from durable storage.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch.distributed as dist

from concertina_protocol import Restore, RestoreSource, SnapshotId
from concertina_state.checkpoints.catalogue import run_of
from concertina_state.checkpoints.reader import StoredCheckpoint, opened, resolve
from concertina_state.checkpoints.rollback import before_damaged, none_left, usable
from concertina_state.errors import DamagedInput, DataChanged, InvalidInput
from concertina_state.filling import ShardReader
from concertina_state.format.read_plan import ReadPlan
from concertina_state.format.shardfile import Continued, FrozenWeights, Header, ShardMetadata
from concertina_state.lineage import Origin
from concertina_state.objects.retry import final
from concertina_state.saved import InMemory, Requests, SavedState, find
from concertina_trainer.config.changes import identity_changes, other_changes
from concertina_trainer.config.checkpoint_config import CheckpointConfig, DamageResponse
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.format import hf_config
from concertina_trainer.model.hf_files import HfFiles
from concertina_trainer.parallel.group import DistContext, of_first_rank
from concertina_trainer.state.dcp_folder import DcpFolder, is_dcp
from concertina_trainer.state.frozen import begun_with, forget
from concertina_trainer.state.frozen import load as load_frozen
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.state.weights import SafetensorsFiles, frozen_files, frozen_weights_of, is_checkpoint

MOST_NAMED = 6
"""Maximum number of fields that an error message names."""


def restore(
    start: Restore,
    uid: str,
    state: TrainState,
    config: TrainerConfig,
    checkpoint: CheckpointConfig | None,
    data: str,
    world: DistContext,
    channel: Requests,
    frozen: FrozenWeights | None = None,
) -> ShardMetadata:
    """Restore the state that `start` names into `state`, and return the metadata of the saved state.

    `frozen` names the frozen weights that are not a part of the state. If the state is computed from the seed, the
    metadata's `id` has no meaning.

    Raises:
        InvalidInput: When the saved state can't be used.
        RestoreFailed: When the state in memory can't be read.
        StorageError: When durable storage can't be read.
        DamagedInput: When the checkpoint is damaged. The error's `rollback` is set if the job goes back to an older
            checkpoint.
    """
    metadata = _restored(usable_start(start, uid, world), uid, state, config, checkpoint, data, world, channel, frozen)
    if config.model.lora and config.model.lora.frozen_dtype.quantized:
        forget(state.quantize(config.model.lora.frozen_dtype))
    return metadata


def _restored(
    start: Restore,
    uid: str,
    state: TrainState,
    config: TrainerConfig,
    checkpoint: CheckpointConfig | None,
    data: str,
    world: DistContext,
    channel: Requests,
    frozen: FrozenWeights | None,
) -> ShardMetadata:
    if start.source == RestoreSource.FRESH and checkpoint is not None and checkpoint.resume_from:
        return _resume(checkpoint.resume_from, state, config, data, world)
    if start.source == RestoreSource.FRESH:
        uri = checkpoint.init_from if checkpoint is not None else ""
        if config.model.hf and not uri:
            raise InvalidInput(
                "spec.trainer.model.hf trains weights that exist: set checkpoint.initFrom to the folder of the weights "
                "(usually the value of hf)."
            )
        files = _files(uri, config.model, state, world) if uri else None
        state.initialise(config)
        if uri:
            _begin_with(uri, files, config.model, state, world)
            if frozen:
                frozen = begun_with(state.frozen, frozen, world)
        elif config.model.lora and world.rank == 0:
            print(
                "trainer.model.lora trains adapters of weights that are random: set checkpoint.initFrom "
                "to trained weights",
                flush=True,
            )
        id, origin = SnapshotId(0, 0, state.digest, world.size), Origin().begun_with(uri)
        return ShardMetadata(id, world.rank, 0, config.digest(), data, origin=origin, frozen=frozen)
    if start.source == RestoreSource.MEMORY:
        assert start.id is not None
        return _load(InMemory(start.id, channel), state, config, data, world)
    assert start.durable is not None
    durable = start.durable
    with (
        _rolling_back(start, uid, checkpoint),
        _reading(lambda: durable.uri, world) as folder,  # an isolated older world may delete it meanwhile
    ):
        stored = StoredCheckpoint(folder)
        metadata = _load(stored, state, config, data, world)
        metadata = dataclasses.replace(metadata, continued=stored.manifest.continued)
        return metadata if durable.uid == uid else _of_another_job(metadata, stored)


@contextlib.contextmanager
def _rolling_back(start: Restore, uid: str, checkpoint: CheckpointConfig | None) -> Iterator[None]:
    """Set the rollback of errors about a damaged checkpoint, if the job goes back to an older checkpoint.

    Raises:
        DamagedInput: When the checkpoint is damaged.
    """
    try:
        yield
    except DamagedInput as error:
        if checkpoint is not None and checkpoint.on_damage is DamageResponse.USE_PREVIOUS:
            error.rollback = before_damaged(error, checkpoint.uri, uid, start)
        raise


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Facts, recorded with the saved state, that a rank needs before it can build the model."""

    config: TrainerConfig | None = None
    """Configuration with which the state was trained, or None for a new run."""
    frozen: FrozenWeights | None = None
    """Frozen weights that are not a part of the state, or None if the state has all weights."""
    of_another_job: bool = False
    """True if another job, perhaps on other devices, saved the state."""


NEW_RUN = Recorded()


def recorded(
    start: Restore,
    uid: str,
    checkpoint: CheckpointConfig | None,
    model: ModelConfig,
    world: DistContext,
    channel: Requests,
) -> Recorded:
    """Return the facts that are recorded with the state from which a round continues, on all ranks.

    `start` is a result of `usable_start`. Rank 0 reads the facts, and sends them to the other ranks.

    Raises:
        InvalidInput: When the configuration can't be used.
        RestoreFailed: When the state in memory can't be read.
        StorageError: When durable storage can't be read.
        DamagedInput: When the checkpoint is damaged. The error's `rollback` is set if the job goes back to an older
            checkpoint.
    """
    result = None
    if world.rank == 0:
        result = _recorded(start, uid, checkpoint, model, channel)
    found = cast(Recorded, of_first_rank(world, result))
    if found.frozen is None and model.lora and model.lora.frozen_dtype.quantized:
        raise InvalidInput(
            f"trainer.model.lora.frozenDtype {model.lora.frozen_dtype.value} keeps no original of the frozen weights, "
            "so they are read from safetensors files at each restore: set checkpoint.initFrom to such files "
            "(`concertina checkpoint export URI FOLDER` makes them from a checkpoint), or choose another frozenDtype."
        )
    return found


def _recorded(
    start: Restore, uid: str, checkpoint: CheckpointConfig | None, model: ModelConfig, channel: Requests
) -> Recorded:
    if start.source == RestoreSource.MEMORY:
        assert start.id is not None
        return _recorded_in(InMemory(start.id, channel).header(0))
    if start.source == RestoreSource.STORAGE:
        assert start.durable is not None
        with _rolling_back(start, uid, checkpoint), opened(start.durable.uri) as stored:
            return _recorded_in(stored.header(0), start.durable.uid != uid)
    if checkpoint is not None and checkpoint.resume_from:
        if final(lambda: is_dcp(checkpoint.resume_from)):
            return NEW_RUN
        with opened(final(lambda: resolve(checkpoint.resume_from))) as stored:
            return _recorded_in(stored.header(0), of_another_job=True)
    if (
        checkpoint is not None
        and checkpoint.init_from
        and model.lora
        and not final(lambda: is_dcp(checkpoint.init_from))
    ):
        return Recorded(frozen=final(lambda: frozen_weights_of(checkpoint.init_from)))
    return NEW_RUN


def _recorded_in(header: Header, of_another_job: bool = False) -> Recorded:
    return Recorded(_trainer_of(header), header.metadata.frozen, of_another_job)


def usable_start(start: Restore, uid: str, world: DistContext) -> Restore:
    """Return the state from which training starts: the newest checkpoint that is neither undone nor damaged.

    A rollback undoes checkpoints. If rollbacks have undone all checkpoints, training starts from step 0.

    Raises:
        InvalidInput: When no checkpoint is left because of damage.
    """
    if start.source == RestoreSource.FRESH and start.damaged:
        raise none_left(start.damaged)
    durable = start.durable
    if start.source != RestoreSource.STORAGE or durable is None or not start.bars(durable, uid):
        return start
    previous = of_first_rank(world, usable(durable, uid, start) if world.rank == 0 else None)
    if previous is None and world.rank == 0:
        print(
            f"{run_of(durable.uri)} has no checkpoint left that was not rolled back: training starts from "
            "the beginning",
            flush=True,
        )
    return dataclasses.replace(
        start, source=RestoreSource.STORAGE if previous else RestoreSource.FRESH, durable=previous
    )


def _load(saved: SavedState, state: TrainState, config: TrainerConfig, data: str, world: DistContext) -> ShardMetadata:
    """Read the saved state `saved` into `state`, and return its metadata.

    If the number of ranks has not changed since the save, each rank reads only the shard of its own number.

    Raises:
        DataChanged: When the data differ from those on which the saved state was trained.
        InvalidInput: When the saved state belongs to a different model.
    """

    def plan(headers: Mapping[int, Header]) -> ReadPlan:
        header = next(iter(headers.values()))
        metadata = header.metadata
        _check_identity(header, config)
        if metadata.data != data:
            raise DataChanged(
                f"the saved state of step {metadata.id.step} was trained on data with digest "
                f"{metadata.data}, and data.uri now holds {data}: training can only continue with the same "
                "data. Set data.uri to the data of the saved state, or start a new run under another "
                "checkpoint.uri."
            )
        return state.plan(headers)

    alone = world.rank if (saved.id.layout, saved.id.shards) == (state.digest, world.size) else None
    restored = find(saved, alone, plan)
    state.load(restored.plan, restored.shards, saved.id.step)
    if frozen := restored.metadata.frozen:
        load_frozen(state.frozen, frozen, lambda: frozen_files(frozen, config.model), world)
    changed = other_changes(_trainer_of(next(iter(restored.headers.values()))), config)
    if changed and world.rank == 0:
        print(f"spec.trainer has changed since step {saved.id.step}: {'; '.join(map(str, changed))}", flush=True)
    return dataclasses.replace(restored.metadata, shard=world.rank)


def _trainer_of(header: Header) -> TrainerConfig:
    """Return the configuration with which a saved state was trained.

    Raises:
        InvalidInput: When the saved state has no configuration, or one that this version does not support.
    """
    step = header.metadata.id.step
    if not header.trainer:
        raise InvalidInput(
            f"the saved state of step {step} was saved by a script, not by the bundled trainer: start a new "
            "run under another checkpoint.uri."
        )
    try:
        return TrainerConfig.model_validate(json.loads(header.trainer))
    except ValueError as error:
        problem = " ".join(str(error).split())[:300]
        raise InvalidInput(
            f"the saved state of step {step} has a configuration that this version does not know "
            f"({problem}): resume with the image that saved the state."
        ) from error


def _check_identity(header: Header, config: TrainerConfig) -> None:
    """Check that training with `config` may continue from a saved state.

    Raises:
        InvalidInput: When `config` differs from the saved state's configuration in a way that is not allowed.
    """
    if changed := identity_changes(_trainer_of(header), config):
        descriptions = "; ".join(
            f"{change.field} was {change.saved} and is now {change.now}" for change in changed[:MOST_NAMED]
        )
        suffix = f"; and {len(changed) - MOST_NAMED} more fields" if len(changed) > MOST_NAMED else ""
        raise InvalidInput(
            f"spec.trainer has changed since step {header.metadata.id.step} in fields that decide the model, the "
            f"order of its data or the optimizer's state: {descriptions}{suffix}. Set the fields back to resume, or "
            "start a new run under another checkpoint.uri. A new run can begin with these weights by "
            "checkpoint.initFrom."
        )


def _resume(uri: str, state: TrainState, config: TrainerConfig, data: str, world: DistContext) -> ShardMetadata:
    """Fill the state from a checkpoint of another run, which this run continues."""
    if of_first_rank(world, final(lambda: is_dcp(uri)) if world.rank == 0 else None):
        return _resume_dcp(uri, state, config, data, world)
    with _reading(lambda: final(lambda: resolve(uri)), world) as folder:
        stored = StoredCheckpoint(folder)
        return _of_another_job(_load(stored, state, config, data, world), stored)


def _dcp_folder(uri: str, model: ModelConfig, world: DistContext) -> DcpFolder:
    folder = final(lambda: DcpFolder.open(uri))
    if world.rank == 0:
        folder.check_tied(model)
    return folder


def _resume_dcp(uri: str, state: TrainState, config: TrainerConfig, data: str, world: DistContext) -> ShardMetadata:
    """Fill the state from a folder of torch.distributed.checkpoint.

    The folder does not say which samples of this run's data were consumed. Training therefore continues at the sample
    that a run with this configuration reaches after the same number of steps.

    Raises:
        InvalidInput: When the folder lacks a part of the state, or is of another model.
    """
    folder = _dcp_folder(uri, config.model, world)
    files = dict(enumerate(folder.state(state.names, config.model)))
    if missing := sorted(state.names - {name for file in files.values() for name in file.header.chunks}):
        raise InvalidInput(
            f"{uri} lacks {len(missing)} arrays of the state, such as {missing[0]}, so training can't continue from "
            "it: set checkpoint.initFrom instead to begin at step 0 with its weights."
        )
    plan = state.plan({number: file.header for number, file in files.items()})
    step = cast(int, of_first_rank(world, folder.step() if world.rank == 0 else None))
    state.load(plan, files, step)
    position = step * config.global_batch_size
    if world.rank == 0:
        print(
            f"the state of step {step} is that of {uri}, which does not name the samples that it was trained on: "
            f"training continues with sample {position} of data.uri",
            flush=True,
        )
    id, origin = SnapshotId(0, step, state.digest, world.size), Origin().begun_with(uri)
    return ShardMetadata(id, world.rank, position, config.digest(), data, origin=origin)


def _of_another_job(metadata: ShardMetadata, stored: StoredCheckpoint) -> ShardMetadata:
    """Return the metadata with which this job begins from a state that another job has saved."""
    key = stored.manifest.place
    continued = Continued(key.uid, key.round, key.step)
    return dataclasses.replace(metadata, continued=continued, origin=metadata.origin.begun_with(stored.uri))


def _files(uri: str, model: ModelConfig, state: TrainState, world: DistContext) -> Sequence[ShardReader] | None:
    """Return readers of the files of initial weights, or None if `uri` is a checkpoint of this project.

    Before any slow work, the function checks as far as possible that the files fit the model.

    Raises:
        InvalidInput: When the files do not fit the model.
    """
    if of_first_rank(world, final(lambda: is_checkpoint(uri)) if world.rank == 0 else None):
        return None
    if of_first_rank(world, final(lambda: is_dcp(uri)) if world.rank == 0 else None):
        return _dcp_folder(uri, model, world).weights(state.names, model)
    if model.entrypoint:
        raise InvalidInput(
            f"{uri} is not a checkpoint of concertina, and files of other programs can't be loaded into "
            f"{model.entrypoint}: set checkpoint.initFrom to a checkpoint of this model."
        )
    files = final(lambda: SafetensorsFiles(uri))
    if model.hf:
        assert state.own is not None
        place = HfFiles(state.own.own.module()).place
        weights, unchecked = final(lambda: files.of_module(model.options or {}, place))
    else:
        weights, unchecked = final(lambda: files.of(model))
    final(lambda: files.check_copies(world.rank, world.size))
    if unchecked and world.rank == 0:
        print(unchecked, flush=True)
    return weights


def _begin_with(
    uri: str, files: Sequence[ShardReader] | None, model: ModelConfig, state: TrainState, world: DistContext
) -> None:
    """Load initial weights into the state. All other parts of the state remain as at step 0.

    `files` contains the weights. If it is None, `uri` is a checkpoint of this project.

    Raises:
        InvalidInput: When the weights are of another model.
    """
    if files is not None:
        state.load_weights(files, uri)
    else:
        with _reading(lambda: final(lambda: resolve(uri)), world) as folder:
            stored = StoredCheckpoint(folder)
            fields = stored.manifest.trainer.get("model")
            if fields and model.hf and (fields.get("options") or {}) != (model.options or {}):
                raise InvalidInput(
                    f"{stored.uri} is of another model than spec.trainer.model.hf: its {hf_config.NAME} differs."
                )
            if fields and not model.custom:
                hf_config.check_ours(_model(fields, stored.uri), stored.uri, model)
            elif fields and (fields.get("options") or {}) != (model.options or {}) and world.rank == 0:
                # A run that is resumed must not change these options. A run that only begins with these weights may.
                print(f"the weights in {stored.uri} were trained with other trainer.model.options", flush=True)
            frozen = stored.manifest.frozen
            state.load_weights([*stored.shards, *(frozen_files(frozen, model) if frozen else ())], stored.uri)
    if world.rank == 0:
        print(f"initial weights are loaded from {uri}", flush=True)


def _model(fields: object, whence: str) -> ModelConfig:
    try:
        return ModelConfig.model_validate(fields)
    except ValueError as error:
        problem = " ".join(str(error).split())[:300]
        raise InvalidInput(
            f"{whence} has a model configuration that this version does not support ({problem})."
        ) from error


@contextlib.contextmanager
def _reading(find: Callable[[], str], world: DistContext) -> Iterator[str]:
    """Yield the URI of the same checkpoint on all ranks, and prevent its deletion until all ranks have read it.

    Rank 0 calls `find` and sends the result to the other ranks. If each rank called `find`, the results could differ,
    because a newer checkpoint may be published between the calls.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(opened(find())).uri if world.rank == 0 else None
        yield of_first_rank(world, folder)
        dist.barrier()

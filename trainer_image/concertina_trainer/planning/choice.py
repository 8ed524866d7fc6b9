"""Choice of the settings that fit into a device's memory, by the planned peak memory of the fullest ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from concertina_trainer.config.memory_choice import MemoryChoice, absent, without
from concertina_trainer.config.memory_config import Offload
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.ladder import GIB, first_fitting, ladder, usable_memory
from concertina_trainer.layouts import problems
from concertina_trainer.model.own import OwnSpec
from concertina_trainer.planning.described_model import DataDescription
from concertina_trainer.planning.memory import fullest, memory

MOST_DOUBLINGS = 6
"""Maximum number of times to double the number of ranks in search of one with which the job fits."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Job to plan: the settings that determine the memory of a rank."""

    config: TrainerConfig
    parallelism: ParallelismConfig
    ranks: int
    data: DataDescription | None = None
    """Data on which a custom model is trained, or None for the decoder."""

    def peak(self, choice: MemoryChoice) -> float:
        """Return the planned peak memory of the fullest rank, in bytes, if the job uses the settings `choice`."""
        config = choice.filled(self.config)
        ranks = fullest(config, self.parallelism, self.ranks)
        of_ranks = (memory(config, self.parallelism, self.ranks, rank, self.data) for rank in ranks)
        return max(sum(rank.peak.values()) for rank in of_ranks)

    def ladder(self) -> list[MemoryChoice]:
        return ladder(self.config, self.parallelism, self.ranks, self._has_blocks())

    def _has_blocks(self) -> bool:
        if self.data is None:
            return True
        own = OwnSpec(without(self.config), self.data.shape(self.config))
        return bool(own.blocks(own.module()))


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Settings that were chosen for a job, and whether they fit."""

    choice: MemoryChoice
    peak: float
    """Peak memory of the fullest rank, in bytes."""
    remedies: tuple[str, ...] = ()
    """Changes of the job that would make it fit, or empty if it fits already."""


def chosen(job: Job, device_bytes: int) -> Chosen:
    """Return the fastest settings whose peak memory fits into a device, or else the settings with the smallest peak.

    Settings fit if the peak is within `usable_memory`, which leaves a part of the device's memory to CUDA and
    libraries. If no settings fit, the settings with the smallest peak are accepted if their peak is at most the
    device's whole memory.

    Raises:
        InvalidInput: When the job can't be planned.
    """
    peaks: dict[MemoryChoice, float] = {}

    def peak(choice: MemoryChoice) -> float:
        if choice not in peaks:
            peaks[choice] = job.peak(choice)
        return peaks[choice]

    choice = first_fitting(job.ladder(), usable_memory(device_bytes), peak)
    fits = peak(choice) <= device_bytes
    return Chosen(choice, peak(choice), () if fits else tuple(remedies(job, usable_memory(device_bytes))))


def remedies(job: Job, limit: float) -> Iterator[str]:
    """Yield sentences about changes of the job that reduce its memory, each with the planned peak after the change.

    Each change alone makes the job fit into `limit` bytes.
    """
    config = job.config
    if len(absent(config)) < len(absent(without(config))):
        free = dataclasses.replace(job, config=without(config))
        choice = first_fitting(free.ladder(), limit, free.peak)
        if (peak := free.peak(choice)) <= limit:
            yield f"set {choice} ({peak / GIB:.1f} GiB)"
    for alternatives in _changed_jobs(job):
        for sentence, changed in alternatives:
            if problems(changed.config, changed.parallelism, changed.ranks):
                continue
            if (peak := changed.peak(changed.ladder()[-1])) <= limit:
                yield f"{sentence} ({peak / GIB:.1f} GiB)"
                break


def _changed_jobs(job: Job) -> Iterator[list[tuple[str, Job]]]:
    """Return lists of changes to try, to reduce the job's memory.

    The changes of one list are alternatives, to be tried in order until one fits.
    """
    config, parallelism = job.config, job.parallelism
    if config.memory.offload is None:
        memory = config.memory.model_copy(update={"offload": Offload.state})
        yield [
            ("set memory.offload State", dataclasses.replace(job, config=config.model_copy(update={"memory": memory})))
        ]
    yield [_wider(job, 2**doubling) for doubling in range(1, MOST_DOUBLINGS + 1)]
    if config.model.custom is not None:
        return
    yield [
        (
            f"set parallelism.tensor {degree}",
            dataclasses.replace(job, parallelism=parallelism.model_copy(update={"tensor": degree})),
        )
        for degree in (2, 4, 8)
        if degree > parallelism.tensor
    ]
    half = config.model.sequence_length // 2
    model = config.model.model_copy(update={"sequence_length": half})
    yield [
        (
            f"set model.sequenceLength {half}",
            dataclasses.replace(job, config=config.model_copy(update={"model": model})),
        )
    ]


def _wider(job: Job, factor: int) -> tuple[str, Job]:
    """Return the job with its state sharded over `factor` times as many ranks, and a sentence about this change."""
    ranks, shard = job.ranks * factor, job.parallelism.shard
    if shard is None:
        return f"train on at least {ranks} GPUs: raise elastic.minReplicas", dataclasses.replace(job, ranks=ranks)
    wider = job.parallelism.model_copy(update={"shard": shard * factor})
    return (
        f"raise parallelism.shard to {shard * factor}",
        dataclasses.replace(job, parallelism=wider, ranks=max(job.ranks, wider.block)),
    )

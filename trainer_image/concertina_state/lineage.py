"""Origin of a state, and lineage of a checkpoint: the rounds, data and settings that led to it.

An `Origin` is saved with each copy of the state, in memory and in storage. It therefore lists exactly the rounds that
led to this state, even if other states were lost or undone meanwhile (decision "A state carries its own history"). A
`Lineage` is stored in a checkpoint's manifest. The lineage contains the origin, the job's spec and the parent
checkpoint.

This module imports only `concertina_protocol` and the standard library.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from concertina_protocol.messages.operator_calls import MOST_IMAGES

VERSION = 1
MOST_ROUNDS = 64
MOST_DATA_SETS = 32
"""Maximum number of data sets whose digests an origin lists."""
MOST_TEXT = 1024
"""Maximum length of a text in a state's header. It is counted after the text has been encoded as JSON twice."""
MOST_DEVICE = 128
MOST_SCRIPT = 16 << 20
"""Maximum number of bytes of a script that are hashed."""


@dataclasses.dataclass(frozen=True)
class TrainedRound:
    """Record of the steps that one round trained, in the origin of a state.

    A round is a period in which a fixed set of replicas trains. The steps of the round begin after `step`, and end
    where the next round begins.
    """

    round: int
    step: int
    """Number of finished steps at the beginning of the round."""
    position: int
    """Number of samples consumed at the beginning of the round."""
    world: int
    """Number of ranks."""
    setting: str = ""
    """Digest of the images, configuration, libraries and script of the round, to compare rounds."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Rounds, data and settings that led to a state. Unknown values are empty.

    A round is a period in which a fixed set of replicas trains.
    """

    rounds: tuple[TrainedRound, ...] = ()
    """Rounds of this job in order. If there were more than MOST_ROUNDS, the oldest are left out."""
    begun_from: str = ""
    """URI of the checkpoint or initial weights with which the job began, or "" if the seed determined the weights."""
    data_sets: tuple[str, ...] = ()
    """Digests of the data sets' manifests, in the order of the configuration."""
    images: tuple[str, ...] = ()
    """Images of the round's containers as the nodes resolved them, usually repository@sha256:digest."""
    device: str = ""
    """Model of the GPU that this rank uses, or of the CPU if it uses none."""
    script: str = ""
    """Digest of a script's main file; empty for the bundled trainer."""

    def with_round(self, trained: TrainedRound) -> Origin:
        return dataclasses.replace(self, rounds=(*self.rounds, trained)[-MOST_ROUNDS:])

    def begun_with(self, uri: str) -> Origin:
        """Return the origin of a job that begins with the state of another job at `uri`.

        The origin lists no rounds yet, because the rounds of the other job are not part of it.
        """
        return dataclasses.replace(self, rounds=(), begun_from=_fitting(uri))


@dataclasses.dataclass(frozen=True)
class ParentCheckpoint:
    """Checkpoint from which the training of another checkpoint continued."""

    uri: str
    """URI of the parent checkpoint's folder at the time when the other checkpoint was written."""
    uid: str
    round: int
    step: int
    position: int = 0
    """Number of samples consumed before the parent checkpoint."""
    digest: str = ""
    """SHA-256 of the parent checkpoint's manifest, or empty if the manifest could not be read."""


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Lineage of a checkpoint: the rounds, data and settings that led to it.

    Unknown values are empty. `concertina reproduce` lists which values are unknown.

    A round is a period in which a fixed set of replicas trains.
    """

    version: int = VERSION
    spec: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Spec of the TrainingJob from which the operator made the pods.

    Environment variables are listed by name and reference, without their values. The field is empty if the spec is too
    large for the operator to pass it on.
    """
    spec_digest: str = ""
    """SHA-256 of `spec` as canonical JSON."""
    parent: Optional[ParentCheckpoint] = None
    """Parent checkpoint, or None if the state was trained from the initial weights or from `begun_from`."""
    begun_from: str = ""
    """URI with which the job began (see `Origin.begun_from`)."""
    rounds: tuple[TrainedRound, ...] = ()
    """Rounds that led to the checkpoint, including those before the parent (see `Origin.rounds`)."""
    data_sets: tuple[str, ...] = ()
    """Digests of the data sets' manifests (see `Origin.data_sets`)."""
    images: tuple[str, ...] = ()
    """Images of the round's containers (see `Origin.images`). Several images for one container mean that ranks ran
    different images."""
    devices: tuple[str, ...] = ()
    """Models of the GPUs that the ranks used, or of the CPUs of ranks without a GPU."""
    script: str = ""
    """Digest of a script's main file (see `Origin.script`)."""


def of_round(
    before: Origin,
    trained: TrainedRound,
    config: str,
    data_sets: Sequence[str],
    images: Iterable[str],
    script: str = "",
) -> Origin:
    """Return the origin of the states that this round trains in this process.

    Args:
        before: Origin of the state from which the round continues.
        trained: The round. Its `setting` is filled in here.
        config: Digest of the configuration.
        data_sets: Digests of the data sets' manifests.
        images: Images of the round's containers.
        script: Digest of the script's main file.
    """
    origin = dataclasses.replace(
        before,
        data_sets=tuple(data_sets)[:MOST_DATA_SETS],
        images=bounded_images(images),
        device=device_model(),
        script=script,
    )
    return origin.with_round(dataclasses.replace(trained, setting=setting(origin, config)))


def setting(origin: Origin, config: str) -> str:
    """Return a digest of images, configuration, libraries and script, for `TrainedRound.setting`.

    `config` is the digest of the configuration.
    """
    torch = getattr(sys.modules.get("torch"), "__version__", "")
    return digest([sorted(origin.images), config, str(torch), platform.python_version(), origin.script])


def digest(value: Any) -> str:
    """Return a short digest of a value: the first 16 hexadecimal digits of `canonical_digest`."""
    return canonical_digest(value)[:16]


def canonical_digest(value: Any) -> str:
    """Return the SHA-256 of a value as canonical JSON, which has sorted keys and no blanks."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def bounded_images(images: Iterable[str]) -> tuple[str, ...]:
    """Return the images whose names fit into the header of a saved state, which has a fixed size.

    At most MOST_IMAGES are returned. Names that are too long are left out.
    """
    return tuple(sorted({_fitting(image) for image in images} - {""}))[:MOST_IMAGES]


def _fitting(text: str) -> str:
    """Return the text, or "" if the text is too long for a state's header, which has a fixed size."""
    return text if len(json.dumps(json.dumps(text))) <= MOST_TEXT else ""


def device_model() -> str:
    """Return the model of the device that this process uses.

    If torch has initialized a GPU, this is the GPU's model with the version of CUDA. Otherwise it is the CPU's model.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        version = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
        return _plain(torch.cuda.get_device_name() + version)
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            lines = file.read(4096).decode(errors="replace").splitlines()  # reading all CPUs would be slow
    except OSError:
        lines = []
    model_names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return _plain(next(model_names, "")) or platform.machine()


def _plain(text: str) -> str:
    return " ".join(
        "".join(character for character in text if character.isascii() and character.isprintable()).split()
    )[:MOST_DEVICE]


def script_digest() -> str:
    """Return the digest of the main file of this process, or "" if the process has no main file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        with Path(path or "").open("rb") as file:
            content = file.read(MOST_SCRIPT)
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()


def went_through(rounds: Sequence[TrainedRound], round: int, step: int) -> bool:
    """Return whether the state after `step` steps of round `round` led to the state that these rounds describe.

    The step at which the last round ends is unknown here. Every step after the beginning of the last round is therefore
    counted as part of that round.
    """
    return any(trained.round == round and trained.step <= step <= end for trained, end in _with_ends(rounds))


def since(rounds: Sequence[TrainedRound], step: int) -> tuple[TrainedRound, ...]:
    """Return the rounds that have trained steps after `step`."""
    return tuple(trained for trained, end in _with_ends(rounds) if end > max(step, trained.step))


def _with_ends(rounds: Sequence[TrainedRound]) -> Iterable[tuple[TrainedRound, int]]:
    """Yield each round with the step at which the next round begins. For the last round, the step is infinite."""
    return zip(rounds, [*(trained.step for trained in rounds[1:]), sys.maxsize])


ROOMIEST = Origin(
    (TrainedRound(2**62, 2**62, 2**62, 2**62, "0" * 16),) * MOST_ROUNDS,
    "0" * MOST_TEXT,
    ("0" * 16,) * MOST_DATA_SETS,
    ("0" * MOST_TEXT,) * MOST_IMAGES,
    '"' * MOST_DEVICE,
    "0" * 64,
)
"""Largest possible origin, which determines the size of a state's header."""

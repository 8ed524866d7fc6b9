"""Origin of a state, and lineage of a checkpoint.

An `Origin` travels with the state through memory, peers and storage. It therefore says which rounds led to exactly this
state, whatever was lost or undone meanwhile (decision "A state carries its own history"). A `Lineage` is stored in a
checkpoint's manifest: the origin, the job's spec, and the parent checkpoint.

This module imports only the protocol and the standard library.
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
"""Maximum number of data sets in a mixture."""
MOST_TEXT = 1024
"""Maximum characters of one text in a state's header, as JSON in JSON."""
MOST_DEVICE = 128
MOST_SCRIPT = 16 << 20
"""Maximum bytes of a script that are hashed."""


@dataclasses.dataclass(frozen=True)
class TrainedRound:
    """Steps that one round has trained: from `step` to the beginning of the next round."""

    round: int
    step: int
    """Number of finished steps at the beginning of the round."""
    position: int
    """Number of samples consumed at the beginning of the round."""
    world: int
    """Number of ranks."""
    setting: str = ""
    """Digest of images, configuration, libraries and script: it differs between rounds if one of these changed."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Everything that led to one state. Unknown values are empty."""

    rounds: tuple[TrainedRound, ...] = ()
    """Rounds of this job in order. The oldest are left out if there were more than MOST_ROUNDS."""
    begun_from: str = ""
    """URI of the checkpoint that the job continued from, or of its initial weights; empty: the seed's weights."""
    data_sets: tuple[str, ...] = ()
    """Digests of the data sets' manifests, in the order of the configuration."""
    images: tuple[str, ...] = ()
    """Images of the round's containers as their nodes resolved them, usually repository@sha256:digest."""
    device: str = ""
    """Model of the GPU that this rank uses, else of the CPU."""
    script: str = ""
    """Digest of a script's main file."""

    def with_round(self, trained: TrainedRound) -> Origin:
        return dataclasses.replace(self, rounds=(*self.rounds, trained)[-MOST_ROUNDS:])

    def begun_with(self, uri: str) -> Origin:
        """Return the origin of a job that begins with the state at `uri`. The rounds of another job are left out."""
        return dataclasses.replace(self, rounds=(), begun_from=_fitting(uri))


@dataclasses.dataclass(frozen=True)
class ParentCheckpoint:
    """Checkpoint from which the steps of another checkpoint were trained."""

    uri: str
    """URI of the checkpoint's own folder at the time."""
    uid: str
    round: int
    step: int
    position: int = 0
    """Number of samples consumed."""
    digest: str = ""
    """SHA-256 of the checkpoint's manifest; empty if the manifest could not be read."""


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Lineage of one checkpoint. Unknown values are empty, and `concertina reproduce` lists them."""

    version: int = VERSION
    spec: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Spec of the TrainingJob as its pods were made.

    Environment variables are listed by name and reference, without their values. Empty if the spec is larger than what
    the operator passes on.
    """
    spec_digest: str = ""
    """SHA-256 of `spec` as canonical JSON."""
    parent: Optional[ParentCheckpoint] = None
    """Parent checkpoint. None: the state was trained from the seed, or from `begun_from`."""
    begun_from: str = ""
    """See Origin."""
    rounds: tuple[TrainedRound, ...] = ()
    """See Origin. Includes the rounds before the parent."""
    data_sets: tuple[str, ...] = ()
    """See Origin."""
    images: tuple[str, ...] = ()
    """See Origin. With more than one image per container, ranks of the round ran different images."""
    devices: tuple[str, ...] = ()
    """Models of the GPUs, else of the CPUs, of all ranks."""
    script: str = ""
    """See Origin."""


def of_round(
    before: Origin,
    trained: TrainedRound,
    config: str,
    data_sets: Sequence[str],
    images: Iterable[str],
    script: str = "",
) -> Origin:
    """Return the origin of what a round trains in this process.

    Args:
        before: Origin of the state that the round continues from.
        trained: The round, whose `setting` is filled in.
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
    """Return the digest for `TrainedRound.setting`; `config` is the digest of the configuration."""
    torch = getattr(sys.modules.get("torch"), "__version__", "")
    return digest([sorted(origin.images), config, str(torch), platform.python_version(), origin.script])


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of `canonical_digest`."""
    return canonical_digest(value)[:16]


def canonical_digest(value: Any) -> str:
    """Return the SHA-256 of canonical JSON: sorted keys, no blanks."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def bounded_images(images: Iterable[str]) -> tuple[str, ...]:
    """Return the images that fit into a state's header, whose size is fixed."""
    return tuple(sorted({_fitting(image) for image in images} - {""}))[:MOST_IMAGES]


def _fitting(text: str) -> str:
    """Return the text, or an empty one if it does not fit into a state's header."""
    return text if len(json.dumps(json.dumps(text))) <= MOST_TEXT else ""


def device_model() -> str:
    """Return the model of the device that this process uses.

    This is the GPU, with the version of CUDA, if torch has initialized one, else the CPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        version = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
        return _plain(torch.cuda.get_device_name() + version)
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            lines = file.read(4096).decode(errors="replace").splitlines()  # only the first CPU: reading all is slow
    except OSError:
        lines = []
    model_names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return _plain(next(model_names, "")) or platform.machine()


def _plain(text: str) -> str:
    return " ".join(
        "".join(character for character in text if character.isascii() and character.isprintable()).split()
    )[:MOST_DEVICE]


def script_digest() -> str:
    """Return the digest of the main file of this process, or an empty string if there is none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        with Path(path or "").open("rb") as file:
            content = file.read(MOST_SCRIPT)
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()


def went_through(rounds: Sequence[TrainedRound], round: int, step: int) -> bool:
    """Return whether the rounds went through the state after `step` steps in round `round`.

    The end of the last round is not known here, so every step after its beginning counts.
    """
    return any(trained.round == round and trained.step <= step <= end for trained, end in _with_ends(rounds))


def since(rounds: Sequence[TrainedRound], step: int) -> tuple[TrainedRound, ...]:
    """Return the rounds that have trained steps after `step`."""
    return tuple(trained for trained, end in _with_ends(rounds) if end > max(step, trained.step))


def _with_ends(rounds: Sequence[TrainedRound]) -> Iterable[tuple[TrainedRound, int]]:
    """Yield each round with the step that the next one begins with, which is unbounded for the last one."""
    return zip(rounds, [*(trained.step for trained in rounds[1:]), sys.maxsize])


ROOMIEST = Origin(
    (TrainedRound(2**62, 2**62, 2**62, 2**62, "0" * 16),) * MOST_ROUNDS,
    "0" * MOST_TEXT,
    ("0" * 16,) * MOST_DATA_SETS,
    ("0" * MOST_TEXT,) * MOST_IMAGES,
    '"' * MOST_DEVICE,
    "0" * 64,
)
"""Largest origin that fits into a state's header."""

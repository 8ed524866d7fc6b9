"""What went into a state. `Origin` travels with the state, through memory, peers and storage, so it says which rounds
have led to just this one, whatever was lost or undone meanwhile (decision "A state carries its own history").
`Lineage` is what a checkpoint's manifest says: that, the job's spec, and the checkpoint before.

Nothing but the protocol and the standard library.
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
"""As many as a mixture may have."""
MOST_TEXT = 1024
"""Characters of one text in a state's header, as JSON in JSON."""
MOST_DEVICE = 128
MOST_SCRIPT = 16 << 20
"""Bytes of a script that are looked at."""


@dataclasses.dataclass(frozen=True)
class TrainedRound:
    """Steps that one round has trained: from `step` to where the next of them begins."""

    round: int
    step: int
    """Finished steps that it began with."""
    position: int
    """Samples consumed by then."""
    world: int
    """Ranks."""
    setting: str = ""
    """Digest of images, configuration, libraries and script: where two differ, one of these was changed."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """What has led to one state. Unknown values are empty."""

    rounds: tuple[TrainedRound, ...] = ()
    """Of this job, in order; the oldest are left out where there were more than MOST_ROUNDS."""
    begun_from: str = ""
    """URI of the checkpoint that the job went on from, or of the weights that it began with; empty: the seed's."""
    data_sets: tuple[str, ...] = ()
    """Digests of their manifests, in the order of the configuration."""
    images: tuple[str, ...] = ()
    """Of the round's containers, as their nodes resolved them: mostly repository@sha256:digest."""
    device: str = ""
    """What this rank computes on: the model of the GPU, else of the CPU."""
    script: str = ""
    """Digest of a script's main file."""

    def with_round(self, trained: TrainedRound) -> Origin:
        return dataclasses.replace(self, rounds=(*self.rounds, trained)[-MOST_ROUNDS:])

    def begun_with(self, uri: str) -> Origin:
        """Of a job that begins with what lies there: rounds of another job are not its own."""
        return dataclasses.replace(self, rounds=(), begun_from=_fitting(uri))


@dataclasses.dataclass(frozen=True)
class ParentCheckpoint:
    """The checkpoint that the steps of another one were trained from."""

    uri: str
    """Of its own folder, when it was named."""
    uid: str
    round: int
    step: int
    position: int = 0
    """Samples consumed by then."""
    digest: str = ""
    """SHA-256 of its manifest; empty where that could not be read."""


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Of one checkpoint. What is not known is empty: `concertina reproduce` says what it lacks."""

    version: int = VERSION
    spec: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the TrainingJob, as its pods were made: without values of variables, of which only names and references
    are kept. Empty where it is larger than the operator hands on."""
    spec_digest: str = ""
    """SHA-256 of it as canonical JSON."""
    parent: Optional[ParentCheckpoint] = None  # noqa: UP045 (typed_json knows typing's form)
    """None: it was trained from the seed, or from `begun_from`."""
    begun_from: str = ""
    """As in Origin."""
    rounds: tuple[TrainedRound, ...] = ()
    """As in Origin: those before the parent, too."""
    data_sets: tuple[str, ...] = ()
    """As in Origin."""
    images: tuple[str, ...] = ()
    """As in Origin; more than one: the round was trained by different ones."""
    devices: tuple[str, ...] = ()
    """Models of GPUs, else of CPUs, of all ranks."""
    script: str = ""
    """As in Origin."""


def of_round(
    before: Origin,
    trained: TrainedRound,
    config: str,
    data_sets: Sequence[str],
    images: Iterable[str],
    script: str = "",
) -> Origin:
    """Of what a round trains in this process, which goes on from a state with the origin `before`. `trained`: its
    setting follows. `config`: see `setting`."""
    now = dataclasses.replace(
        before,
        data_sets=tuple(data_sets)[:MOST_DATA_SETS],
        images=bounded_images(images),
        device=device_model(),
        script=script,
    )
    return now.with_round(dataclasses.replace(trained, setting=setting(now, config)))


def setting(origin: Origin, config: str) -> str:
    """Digest for `TrainedRound`. `config`: the digest of the configuration."""
    torch = getattr(sys.modules.get("torch"), "__version__", "")
    return digest([sorted(origin.images), config, str(torch), platform.python_version(), origin.script])


def digest(value: Any) -> str:
    """16 hexadecimal digits, of canonical JSON."""
    return canonical_digest(value)[:16]


def canonical_digest(value: Any) -> str:
    """SHA-256 of canonical JSON: sorted keys, no blanks."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def bounded_images(images: Iterable[str]) -> tuple[str, ...]:
    """For a state's header, whose room is fixed."""
    return tuple(sorted({_fitting(image) for image in images} - {""}))[:MOST_IMAGES]


def _fitting(text: str) -> str:
    """Nothing in the place of a text that a state's header has no room for."""
    return text if len(json.dumps(json.dumps(text))) <= MOST_TEXT else ""


def device_model() -> str:
    """Of this process: the GPU that it uses, where torch has one in use, with CUDA's version, else the CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        version = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
        return _plain(torch.cuda.get_device_name() + version)
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            lines = file.read(4096).decode(errors="replace").splitlines()  # of the first CPU: all take long
    except OSError:
        lines = []
    named = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return _plain(next(named, "")) or platform.machine()


def _plain(text: str) -> str:
    return " ".join("".join(each for each in text if each.isascii() and each.isprintable()).split())[:MOST_DEVICE]


def script_digest() -> str:
    """Of the main file of this process, whatever runs it; empty where there is none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        with Path(path or "").open("rb") as file:
            content = file.read(MOST_SCRIPT)
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()


def went_through(rounds: Sequence[TrainedRound], round: int, step: int) -> bool:
    """Whether the state after `step` steps in that round is one of those that these rounds went through, the state
    that the last of them ends with aside."""
    return any(each.round == round and each.step <= step <= end for each, end in _with_ends(rounds))


def since(rounds: Sequence[TrainedRound], step: int) -> tuple[TrainedRound, ...]:
    """Those that have trained steps after `step`."""
    return tuple(each for each, end in _with_ends(rounds) if end > max(step, each.step))


def _with_ends(rounds: Sequence[TrainedRound]) -> Iterable[tuple[TrainedRound, int]]:
    """And the step that the next one begins with; of the last one that is not known."""
    return zip(rounds, [*(each.step for each in rounds[1:]), sys.maxsize], strict=False)


ROOMIEST = Origin(
    (TrainedRound(2**62, 2**62, 2**62, 2**62, "0" * 16),) * MOST_ROUNDS,
    "0" * MOST_TEXT,
    ("0" * 16,) * MOST_DATA_SETS,
    ("0" * MOST_TEXT,) * MOST_IMAGES,
    '"' * MOST_DEVICE,
    "0" * 64,
)
"""What a state's header has room for."""

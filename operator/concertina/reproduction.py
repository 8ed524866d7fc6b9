"""Create the manifest of a job that trains a stored checkpoint again, from the information in the checkpoint. Pure.

The result also says how exactly the new job's checkpoint will match the stored one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from concertina.api import API_VERSION, GROUP, KIND, TRAINER
from concertina.api.parse import SpecError, parse_spec
from concertina.api.spec import JobSpec
from concertina_state.checkpoints.manifest import Manifest
from concertina_state.lineage import Lineage, TrainedRound, since

MOST_NAME = 50
"""Maximum length of a job's name in characters. It is limited because pod names contain the job's name."""
REPRODUCES = f"{GROUP}/reproduces"
"""Annotation with the URI of the checkpoint that the job reproduces."""
BITWISE = "Bitwise"


class Irreproducible(Exception):
    """Error for a checkpoint that can't be reproduced.

    The message says what is missing or different, and what to do.
    """


@dataclasses.dataclass(frozen=True)
class Beginning:
    """State from which the reproducing job begins to train."""

    step: int
    uri: str = ""
    """URI of a checkpoint. Empty if training begins from the seed, or from the initial weights of the original job."""
    digest: str = ""
    """SHA-256 of the checkpoint's manifest, as currently stored."""


@dataclasses.dataclass(frozen=True)
class ReproductionOptions:
    """Options for the new job. If an option is empty, its default comes from the checkpoint."""

    name: str = ""
    checkpoint_uri: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values for environment variables. Checkpoints don't contain such values."""


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """Manifest of a job that trains a checkpoint again, and how exactly the result will match."""

    manifest: Mapping[str, Any]
    """Manifest of a TrainingJob."""
    differences: tuple[str, ...]
    """Sentences with the reasons why the result is not identical. Empty if it is identical to the bit.

    A result that is not identical still has the same order of data and a similar loss curve.
    """
    conditions: tuple[str, ...]
    """Sentences on what must be true for the reproduction to work."""


def lineage_of(manifest: Manifest) -> Lineage:
    """Return the lineage from a checkpoint's manifest.

    Raises:
        Irreproducible: When the lineage contains no round or no spec.
    """
    lineage = manifest.lineage
    if not lineage.rounds:
        raise Irreproducible(
            "this checkpoint has no lineage: its manifest names no round that has trained it. `concertina "
            "checkpoint show` prints what its manifest contains."
        )
    if not lineage.spec:
        raise Irreproducible(
            "this checkpoint does not contain the spec of its job, because the spec is larger than 64 KiB. "
            "Write a manifest by hand, with checkpoint.resumeFrom and trainer.reproduction."
        )
    return lineage


def without_checkpoint(manifest: Manifest) -> Beginning:
    """Return the state from which to train if none of the earlier checkpoints of the job still exists.

    Raises:
        Irreproducible: When the recorded history of rounds does not go back to the job's first step.
    """
    lineage = lineage_of(manifest)
    first = lineage.rounds[0].step
    if manifest.continued is None and first == 0:
        return Beginning(0)
    if manifest.continued is not None and first == manifest.continued.step and lineage.begun_from:
        return Beginning(first, lineage.begun_from)
    parent = lineage.parent
    reason = (
        f"its parent, step {parent.step} in {parent.uri}, no longer exists"
        if parent
        else "no checkpoint before it is there"
    )
    raise Irreproducible(
        f"{reason}, no older checkpoint that it was trained from exists, and its history only goes back to step "
        f"{first}. checkpoint.keep and keepEverySteps set which checkpoints are kept."
    )


def reproduction(manifest: Manifest, uri: str, beginning: Beginning, options: ReproductionOptions) -> Reproduction:
    """Return the manifest of a job that trains the checkpoint at `uri` again.

    Raises:
        Irreproducible: When the recorded spec is unusable, or the checkpoint does not record which ranks trained the
            steps after `beginning`.
    """
    lineage, step = lineage_of(manifest), manifest.id.step
    spec: dict[str, Any] = copy.deepcopy(dict(lineage.spec))
    _parse_spec(spec)  # A spec in storage may be invalid.
    try:
        _give_values(spec, options.variables)
    except (AttributeError, KeyError, TypeError) as error:
        raise Irreproducible(f"the variables in its spec can't be read ({error!r}).") from error
    unpinned = _pin(spec, lineage.images)
    spec.pop("elastic", None)
    spec.pop("suspend", None)
    spec.pop("evaluationJob", None)
    if tracking := spec.get("tracking"):
        tracking.pop("runName", None)  # The new job is a separate run for the tracker.
    if "trainer" in spec:
        spec["trainer"]["reproduction"] = _reproduction_settings(manifest)
        if evaluation := spec["trainer"].get("evaluation"):
            evaluation.pop("stopping", None)  # The original run had this step, so the new one must not end before it.
    spec["checkpoint"] = _checkpoint(spec.get("checkpoint") or {}, lineage, beginning, options, step)
    namespace, _, job = manifest.job.rpartition("/")
    name = options.name or f"{job[: MOST_NAME - 11 - len(str(step))]}-reproduce-{step}"
    metadata = {"name": name, **({"namespace": namespace} if namespace else {}), "annotations": {REPRODUCES: uri}}
    rounds = tuple(
        trained_round for trained_round in since(lineage.rounds, beginning.step) if trained_round.step < step
    )
    if not rounds:
        raise Irreproducible(f"its history does not say which rounds trained the steps from {beginning.step} on.")
    parsed = _parse_spec(spec)
    spec["replicas"], remainder = divmod(rounds[-1].world, parsed.workers)
    if remainder:
        raise Irreproducible(
            f"its {rounds[-1].world} ranks are not a whole number of replicas with {parsed.workers} ranks each."
        )
    return Reproduction(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec},
        tuple(_differences(parsed, lineage, beginning, rounds, unpinned)),
        tuple(_conditions(parsed, lineage, step)),
    )


def _give_values(spec: dict[str, Any], variables: Mapping[str, str]) -> None:
    """Set environment variables in the spec to the values in `variables`.

    Raises:
        Irreproducible: When a variable of the spec has neither a value in `variables` nor a `valueFrom`.
    """
    pod = spec["template"]["spec"]
    missing: list[str] = []
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        for variable in container.get("env") or ():
            name = variable["name"]
            if name in variables:
                variable.pop("valueFrom", None)
                variable["value"] = variables[name]
            elif "valueFrom" not in variable:
                missing.append(name)
    if missing:
        options = " ".join(f"--env {name}=..." for name in dict.fromkeys(missing))
        raise Irreproducible(f"a checkpoint does not contain the values of variables: give them with {options}")


def _pin(spec: dict[str, Any], images: Sequence[str]) -> str:
    """Pin the trainer's image to the digest that the original job used.

    Returns:
        Sentence with the reason why the image can't be pinned. Empty if it is pinned.
    """
    trainer = next(container for container in spec["template"]["spec"]["containers"] if container["name"] == TRAINER)
    pinned = {image.rpartition("://")[2] for image in images if "@sha256:" in image}
    if len(images) == len(pinned) == 1:
        trainer["image"] = pinned.pop()
        return ""
    if len(images) > 1:
        return (
            f"its replicas ran different images ({', '.join(images)}), and the manifest names the image of the template"
        )
    if "@sha256:" in trainer.get("image", ""):
        return ""
    return f"the digest of its image is not known, and {trainer.get('image')} may be another image now"


def _reproduction_settings(manifest: Manifest) -> dict[str, Any]:
    """Return the field `trainer.reproduction` for the new job.

    The field contains the last step, the digest of the data, and the samples that the original job skipped.
    """
    settings: dict[str, Any] = {"lastStep": manifest.id.step, "dataDigest": manifest.data}
    if manifest.skipped:
        settings["skippedSamples"] = [list(stretch) for stretch in manifest.skipped]
    return settings


def _checkpoint(
    original: Mapping[str, Any], lineage: Lineage, beginning: Beginning, options: ReproductionOptions, step: int
) -> dict[str, Any]:
    """Return the field `spec.checkpoint` for the new job: the job's own folder, and the checkpoint to begin from.

    Raises:
        Irreproducible: When the folder of the new job is unknown or equal to that of the original job.
    """
    if not (options.checkpoint_uri or original.get("uri")):
        raise Irreproducible(
            "the folder of its job's checkpoints is not known: name a new folder with --checkpoint-uri."
        )
    new_uri = options.checkpoint_uri or f"{original['uri'].rstrip('/')}-reproduce-{step}"
    if new_uri.rstrip("/") == str(original.get("uri", "")).rstrip("/"):
        raise Irreproducible(f"{new_uri} is the folder of the job itself: name another folder with --checkpoint-uri.")
    unchanged = {
        name: value for name, value in original.items() if name not in ("uri", "takeOver", "resumeFrom", "initFrom")
    }
    origin = {"resumeFrom": beginning.uri} if beginning.uri else {"initFrom": lineage.begun_from}
    return {"uri": new_uri, **{name: uri for name, uri in origin.items() if uri}, **unchanged}


def _parse_spec(spec: Mapping[str, Any]) -> JobSpec:
    try:
        return parse_spec({"spec": spec})
    except SpecError as error:
        raise Irreproducible(f"this version of concertina can't run its spec: {error}") from error


def _differences(
    spec: JobSpec, lineage: Lineage, beginning: Beginning, rounds: Sequence[TrainedRound], unpinned: str
) -> Iterator[str]:
    worlds = list(dict.fromkeys(trained_round.world for trained_round in rounds))
    if spec.trainer is None:
        yield "the script decides what its results depend on, when it ends and which samples it skips"
    elif not spec.trainer.bitwise:
        changed = f", and it was trained by {' and '.join(map(str, worlds))} ranks in turn" if len(worlds) > 1 else ""
        yield f"trainer.determinism was Order, which does not fix the order in which numbers are added{changed}"
    if len({trained_round.setting for trained_round in rounds}) > 1:
        numbers = ", ".join(str(trained_round.round) for trained_round in rounds)
        yield f"image, configuration or libraries were not the same in its rounds {numbers}"
    if unpinned:
        yield unpinned
    if len(lineage.devices) > 1:
        yield f"it was trained on different devices ({', '.join(lineage.devices)})"
    if not beginning.uri and lineage.begun_from:
        yield f"the weights in {lineage.begun_from} have no digest, so they may have changed"
    parent = lineage.parent
    if parent and (parent.step, parent.uri) == (beginning.step, beginning.uri) and parent.digest != beginning.digest:
        yield f"the manifest in {parent.uri} is not the one from which it was trained"


def _conditions(spec: JobSpec, lineage: Lineage, step: int) -> Iterator[str]:
    if lineage.devices:
        yield f"run it on {' and '.join(lineage.devices)}"
    if lineage.script:
        yield f"the script's SHA-256 was {lineage.script}"
    if spec.trainer is None:
        yield f"stop it yourself after step {step}: the manifest can't do that"
    if spec.trainer is not None and spec.trainer.reproduction and len(spec.trainer.reproduction.skipped_samples):
        yield "samples that were skipped are skipped again, without another check"

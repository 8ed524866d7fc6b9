"""From what a checkpoint says of itself to the manifest that trains it again, and how alike the two will be. Pure."""

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
"""Of a job, as its pods are named after it."""
REPRODUCES = f"{GROUP}/reproduces"
"""Annotation: the URI of the checkpoint."""
BITWISE = "Bitwise"


class Irreproducible(Exception):
    """A sentence: what is lacking or differs, and what to do."""


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Where the steps are trained from."""

    step: int
    uri: str = ""
    """Of a checkpoint; empty: from the seed, or from the weights that the job began with."""
    digest: str = ""
    """SHA-256 of its manifest, as it is now."""


@dataclasses.dataclass(frozen=True)
class ReproductionOptions:
    """What a person says of the new job; empty: as it follows from the checkpoint."""

    name: str = ""
    checkpoint_uri: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values that the checkpoint does not tell."""


@dataclasses.dataclass(frozen=True)
class Reproduction:
    manifest: Mapping[str, Any]
    """Of a TrainingJob."""
    differences: tuple[str, ...]
    """Why its result is the same in the order of its data and in its curve only, a sentence each. None: it is the same
    to the bit."""
    conditions: tuple[str, ...]
    """What has to hold beside that, a sentence each."""


def lineage_of(manifest: Manifest) -> Lineage:
    """Raises Irreproducible."""
    lineage = manifest.lineage
    if not lineage.rounds:
        raise Irreproducible(
            "this checkpoint has no lineage: its manifest names no round that has trained it. `concertina checkpoint "
            "show` prints what is known of it."
        )
    if not lineage.spec:
        raise Irreproducible(
            "this checkpoint does not say what its job's spec was: the spec is larger than 64 KiB. Write a manifest by "
            "hand, with checkpoint.resumeFrom and trainer.reproduction."
        )
    return lineage


def without_checkpoint(manifest: Manifest) -> Beginning:
    """Where no checkpoint of this job is left on the way to this one. Raises Irreproducible."""
    lineage = lineage_of(manifest)
    first = lineage.rounds[0].step
    if manifest.continued is None and first == 0:
        return Beginning(0)
    if manifest.continued is not None and first == manifest.continued.step and lineage.begun_from:
        return Beginning(first, lineage.begun_from)
    parent = lineage.parent
    lost = f"its parent, step {parent.step} in {parent.uri}, is gone" if parent else "no checkpoint before it is there"
    raise Irreproducible(
        f"{lost}, nor is an older one left that it was trained from, and its history only goes back to step {first}. "
        "checkpoint.keep and keepEverySteps say what is kept."
    )


def reproduction(manifest: Manifest, uri: str, beginning: Beginning, wanted: ReproductionOptions) -> Reproduction:
    """Of the checkpoint at `uri`. Raises Irreproducible."""
    lineage, step = lineage_of(manifest), manifest.id.step
    spec: dict[str, Any] = copy.deepcopy(dict(lineage.spec))
    _parsed(spec)  # what comes from storage may be anything
    try:
        _give_values(spec, wanted.variables)
    except (AttributeError, KeyError, TypeError) as error:
        raise Irreproducible(f"the variables in its spec can't be read ({error!r}).") from error
    unpinned = _pin(spec, lineage.images)
    spec.pop("elastic", None)
    spec.pop("suspend", None)
    if tracking := spec.get("tracking"):
        tracking.pop("runName", None)  # it is another run
    if "trainer" in spec:
        spec["trainer"]["reproduction"] = _held_to(manifest)
    spec["checkpoint"] = _checkpoint(spec.get("checkpoint") or {}, lineage, beginning, wanted, step)
    namespace, _, job = manifest.job.rpartition("/")
    name = wanted.name or f"{job[: MOST_NAME - 11 - len(str(step))]}-reproduce-{step}"
    metadata = {"name": name, **({"namespace": namespace} if namespace else {}), "annotations": {REPRODUCES: uri}}
    rounds = tuple(each for each in since(lineage.rounds, beginning.step) if each.step < step)
    if not rounds:
        raise Irreproducible(f"its history does not say which rounds trained the steps from {beginning.step} on.")
    parsed = _parsed(spec)
    spec["replicas"], rest = divmod(rounds[-1].world, parsed.workers)
    if rest:
        raise Irreproducible(f"its {rounds[-1].world} ranks are no whole number of replicas of {parsed.workers} each.")
    return Reproduction(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec},
        tuple(_differences(parsed, lineage, beginning, rounds, unpinned)),
        tuple(_conditions(parsed, lineage, step)),
    )


def _give_values(spec: dict[str, Any], variables: Mapping[str, str]) -> None:
    """To variables of containers whose values the checkpoint does not tell. Raises Irreproducible."""
    pod = spec["template"]["spec"]
    lacking: list[str] = []
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        for variable in container.get("env") or ():
            name = variable["name"]
            if name in variables:
                variable.pop("valueFrom", None)
                variable["value"] = variables[name]
            elif "valueFrom" not in variable:
                lacking.append(name)
    if lacking:
        options = " ".join(f"--env {name}=..." for name in dict.fromkeys(lacking))
        raise Irreproducible(f"a checkpoint holds no values of variables: say what they were, by {options}")


def _pin(spec: dict[str, Any], images: Sequence[str]) -> str:
    """The trainer's image to the one that was run; or a sentence why not."""
    trainer = next(each for each in spec["template"]["spec"]["containers"] if each["name"] == TRAINER)
    pinned = {image.rpartition("://")[2] for image in images if "@sha256:" in image}
    if len(images) == len(pinned) == 1:
        trainer["image"] = pinned.pop()
        return ""
    if len(images) > 1:
        return f"its replicas ran different images ({', '.join(images)}), of which the manifest names the template's"
    if "@sha256:" in trainer.get("image", ""):
        return ""
    return f"the digest of its image is not known, and what {trainer.get('image')} means may have changed"


def _held_to(manifest: Manifest) -> dict[str, Any]:
    held: dict[str, Any] = {"lastStep": manifest.id.step, "dataDigest": manifest.data}
    if manifest.skipped:
        held["skippedSamples"] = [list(stretch) for stretch in manifest.skipped]
    return held


def _checkpoint(
    before: Mapping[str, Any], lineage: Lineage, beginning: Beginning, wanted: ReproductionOptions, step: int
) -> dict[str, Any]:
    """A folder of its own, begun from where the steps were trained from."""
    if not (wanted.checkpoint_uri or before.get("uri")):
        raise Irreproducible("it is not known where its job kept checkpoints: name a new folder by --checkpoint-uri.")
    own = wanted.checkpoint_uri or f"{before['uri'].rstrip('/')}-reproduce-{step}"
    if own.rstrip("/") == str(before.get("uri", "")).rstrip("/"):
        raise Irreproducible(f"{own} is the folder of the job itself: name another by --checkpoint-uri.")
    kept = {name: value for name, value in before.items() if name not in ("uri", "takeOver", "resumeFrom", "initFrom")}
    begun = {"resumeFrom": beginning.uri} if beginning.uri else {"initFrom": lineage.begun_from}
    return {"uri": own, **{name: uri for name, uri in begun.items() if uri}, **kept}


def _parsed(spec: Mapping[str, Any]) -> JobSpec:
    try:
        return parse_spec({"spec": spec})
    except SpecError as error:
        raise Irreproducible(f"this version of concertina can't run its spec: {error}") from error


def _differences(
    spec: JobSpec, lineage: Lineage, beginning: Beginning, rounds: Sequence[TrainedRound], unpinned: str
) -> Iterator[str]:
    worlds = list(dict.fromkeys(each.world for each in rounds))
    if spec.trainer is None:
        yield "a script decides itself what its numbers hang on, when it ends and what it leaves out"
    elif not spec.trainer.bitwise:
        changed = f", and it was trained by {' and '.join(map(str, worlds))} ranks in turn" if len(worlds) > 1 else ""
        yield f"trainer.determinism was Order, which leaves it open in which order numbers are added{changed}"
    if len({each.setting for each in rounds}) > 1:
        numbers = ", ".join(str(each.round) for each in rounds)
        yield f"image, configuration or libraries were not the same in its rounds {numbers}"
    if unpinned:
        yield unpinned
    if len(lineage.devices) > 1:
        yield f"it was trained on different devices ({', '.join(lineage.devices)})"
    if not beginning.uri and lineage.begun_from:
        yield f"of the weights in {lineage.begun_from} there is no digest: they may have changed"
    parent = lineage.parent
    if parent and (parent.step, parent.uri) == (beginning.step, beginning.uri) and parent.digest != beginning.digest:
        yield f"the manifest in {parent.uri} is not the one that it was trained from"


def _conditions(spec: JobSpec, lineage: Lineage, step: int) -> Iterator[str]:
    if lineage.devices:
        yield f"run it on {' and '.join(lineage.devices)}"
    if lineage.script:
        yield f"the script's SHA-256 was {lineage.script}"
    if spec.trainer is None:
        yield f"stop it after step {step}: the manifest can't"
    if spec.trainer is not None and spec.trainer.reproduction and len(spec.trainer.reproduction.skipped_samples):
        yield "samples that were left out are left out again, without a look at them"

"""Rows of the output of `concertina checkpoint show`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concertina_state.checkpoints.manifest import Manifest
    from concertina_state.lineage import Lineage

Row = tuple[str, str]
MOST_ROUNDS = 12
"""Largest number of rounds in the table. `concertina checkpoint show -o json` shows all rounds."""


def rows(uri: str, manifest: Manifest) -> Iterator[Row]:
    from concertina_protocol.messages.ranges import words

    libraries = ", ".join(f"{name} {version}" for name, version in manifest.code.libraries.items())
    yield "Checkpoint", uri
    yield "Job", f"{manifest.job or '?'} (uid {manifest.uid}), round {manifest.id.round}"
    yield "Step", f"{manifest.id.step}{', the last of its run' if manifest.complete else ''}"
    yield "Position", f"{manifest.position:,} samples consumed"
    if manifest.evaluation:
        sets = "".join(f"; {name} {_number(value)}" for name, value in manifest.evaluation.sets.items())
        yield "Evaluation", f"loss {_number(manifest.evaluation.loss)}{sets}"
    yield "Written", when(manifest.at)
    yield "Parts", f"{len(manifest.parts)} files, {size(manifest.size)}"
    yield "World", ", ".join(f"{kind} {count}" for kind, count in manifest.parallelism.items())
    yield "Config, data", f"digests {manifest.config}, {manifest.data}"
    yield "Code", f"image {manifest.code.image or 'unknown'}, commit {manifest.code.commit or 'unknown'}"
    yield "Libraries", f"Python {manifest.code.python}, {libraries}"
    if manifest.continued:
        yield "Continues from", f"uid {manifest.continued.uid}, step {manifest.continued.step}"
    if manifest.frozen:
        yield "Frozen weights", f"{manifest.frozen.uri}, digest {manifest.frozen.digest}"
    yield from _lineage(manifest, manifest.lineage)
    if manifest.skipped:
        yield "Left out", words(manifest.skipped)
    if manifest.undone:
        rollbacks = (f"round {undone.round} beyond step {undone.step}" for undone in manifest.undone)
        yield "Went back", f"training was rolled back in {', '.join(rollbacks)}"


def _lineage(manifest: Manifest, lineage: Lineage) -> Iterator[Row]:
    from concertina_state.lineage import since

    parent = lineage.parent
    seed = manifest.trainer.get("seed")
    origin = lineage.begun_from or ("its beginning" if seed is None else f"seed {seed}")
    yield "Trained from", f"step {parent.step} in {parent.uri}" if parent else origin
    if parent and parent.digest:
        yield "", f"whose manifest has SHA-256 {parent.digest}"
    step, position = (parent.step, parent.position) if parent else (0, 0)
    yield from _samples(manifest, lineage, position)
    rounds = [trained_round for trained_round in since(lineage.rounds, step) if trained_round.step < manifest.id.step]
    ends = [(trained_round.step, trained_round.position) for trained_round in rounds[1:]]
    if rounds:
        ends.append((manifest.id.step, manifest.position))
    else:  # The job continued from the last step of another run.
        yield "Rounds", "no steps since the parent checkpoint"
    for number, (trained_round, (last_step, end)) in enumerate(zip(rounds, ends, strict=True)):
        begin, first = max((trained_round.step, trained_round.position), (step, position))
        steps = f"round {trained_round.round}: steps {begin + 1} to {last_step}, samples {first} to {end - 1}"
        description = f"{steps}, {trained_round.world} ranks, setting {trained_round.setting}"
        if number < MOST_ROUNDS:
            yield "Rounds" if number == 0 else "", description
    if len(rounds) > MOST_ROUNDS:
        yield "", f"and {len(rounds) - MOST_ROUNDS} more"
    yield "Images run", ", ".join(lineage.images) or "not known"
    yield "Devices", ", ".join(lineage.devices) or "not known"
    if lineage.script:
        yield "Script", f"SHA-256 {lineage.script}"
    yield "Spec", f"SHA-256 {lineage.spec_digest}; -o json shows it" if lineage.spec else "not known"


def _samples(manifest: Manifest, lineage: Lineage, begin: int) -> Iterator[Row]:
    """Yield the rows about the samples that were used since the parent checkpoint.

    `begin` is the step of the parent. The data, the seed and the skipped samples determine which samples were used.
    """
    from concertina_protocol.messages.ranges import united
    from concertina_state.lineage import digest
    from concertina_trainer.config.trainer import TrainerConfig
    from concertina_trainer.data.consumed import consumed, positions

    if manifest.position == begin:
        yield "Samples", "none"
        return
    if not manifest.trainer:
        yield "Samples", f"{begin:,} to {manifest.position:,}, as counted by the script"
        return
    try:
        config = TrainerConfig.model_validate(manifest.trainer)
    except ValueError:  # For example, the configuration is of a newer version.
        yield "Samples", f"{begin:,} to {manifest.position:,}, in an order that this version does not support"
        return
    first, last = positions(begin, manifest.position, manifest.skipped)
    left_out = united((max(first, start), min(last, end)) for start, end in manifest.skipped)
    order = digest(
        [manifest.data, config.seed, config.data.groups, config.model.sequence_length, first, last, left_out]
    )
    yield "Samples", f"positions {first:,} to {last - 1:,} in the order of seed {config.seed}, digest {order}"
    digests = lineage.data_sets or ("?",) * len(config.data.sources)
    for stretch, data_digest in zip(
        consumed(config.data, begin, manifest.position, manifest.skipped), digests, strict=False
    ):
        count = stretch.end - stretch.begin
        yield (
            "",
            (f"{count:,} sequences of {stretch.uri} (digest {data_digest}), starting with sequence {stretch.begin:,}"),
        )


def loss(manifest: Manifest) -> str:
    """Return the evaluation loss of a checkpoint, or an empty string if its step was not evaluated."""
    return _number(manifest.evaluation.loss) if manifest.evaluation else ""


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at))


def size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

"""`concertina plan`: what a job will take and bring, before anything runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from concertina.api.parse import SpecError, parse_spec
from concertina.api.spec import JobSpec
from concertina.cli.jobs import read_manifest
from concertina.durations import duration
from concertina.plan.facts import sizes
from concertina.planning import search
from concertina.planning.hardware import FABRICS, GPUS, FabricName, Gpu, GpuName
from concertina.planning.layout import OwnDescription, ParallelLayout, of
from concertina.planning.outlook import Estimate, RankMemoryEstimate, as_object, bottleneck, outlook, rank_memory
from concertina.planning.outlook import sizes as valid_sizes
from concertina.planning.traffic import batch
from concertina.report.ranks import picture
from concertina.terminal.cluster_connection import UserError
from concertina.terminal.console import plain
from concertina_trainer.layouts import problems

MOST_SAID = 1000
"""Letters of why nothing could be measured."""
MOST_MEASURED = 4
"""Layouts that a search runs for each one that it shows."""
WITHOUT_TORCH = (
    "Memory is not measured: that needs torch, which is not installed here. The trainer's image has it:\n"
    "  concertina plan {file} --python 'docker run --rm -i --entrypoint python3 {image}'\n"
    "  concertina plan {file} --python 'kubectl run plan --rm -iq --restart=Never --image={image} --command -- python3'"
)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    replicas: int | None
    gpu: GpuName
    fabric: FabricName
    tokens: float | None
    search: int
    """How many layouts to show; 0: no search."""
    memory: bool
    vocab_size: int | None
    """Of the data of a model of one's own, where its manifests can't be read."""
    width: int | None
    """Of its frames."""
    python: str
    """Command of a Python that has torch; empty: this one."""
    picture: Path | None
    json: bool


def asked_hardware(gpu: str, fabric: str) -> tuple[GpuName, FabricName]:
    """Raises UserError."""
    try:
        return GpuName(gpu), FabricName(fabric)
    except ValueError:
        known = ", ".join([*GpuName, *FabricName])
        raise UserError(f"{gpu} on {fabric} is not known; these are: {known}") from None


def run(file: Path, asked: PlanOptions) -> None:
    """Raises UserError."""
    if asked.tokens is not None and not 0 < asked.tokens < math.inf:
        raise UserError(f"--tokens is how many a run trains on, a number above 0, and not {asked.tokens:g}")
    name, spec = _read(file)
    gpu = GPUS[asked.gpu]
    replicas = asked.replicas or sizes.most(spec)
    able = bool(asked.python or _has_torch())
    measure = asked.memory and able
    _layout(spec, replicas)  # refuses before anything is run
    own = _own_model(file, spec, asked, able)
    layout = _layout(spec, replicas, own)
    if asked.search:
        found = _searched(spec, layout, gpu, asked, measure)
    else:
        least = sizes.least(spec)
        wanted = [replicas] + [least] * (asked.replicas is None and 0 < least < replicas)
        found = [_seen(spec, _layout(spec, size, own), gpu, asked, measure) for size in wanted]
    if asked.picture:
        _write(asked.picture, picture(name, found[0].layout if found else layout))
    if asked.json:
        key = "layouts" if asked.search else "sizes"
        valid = valid_sizes(spec, sizes.least(spec), sizes.most(spec))
        print(json.dumps({"job": name, "validReplicas": valid, key: [as_object(one) for one in found]}, indent=1))
        return
    console = plain()
    if asked.search:
        _print_search(console, name, layout, found)
    else:
        _print(console, name, spec, found[0])
        for smaller in found[1:]:
            _print_smaller(console, smaller)
    if asked.memory and not measure:
        console.print("\n" + WITHOUT_TORCH.format(image=spec.template.trainer.image or "concertina/trainer", file=file))


def _read(file: Path) -> tuple[str, JobSpec]:
    manifest = read_manifest(file)
    try:
        spec = parse_spec(manifest)
    except SpecError as error:
        raise UserError(f"{file} would be refused: {error}") from error
    if spec.trainer is None:
        raise UserError(
            f"{file} runs a command of its own, which only its author can plan: `concertina plan` knows spec.trainer."
        )
    return str(manifest["metadata"]["name"]), spec


def _own_model(file: Path, spec: JobSpec, asked: PlanOptions, able: bool) -> OwnDescription | None:
    """`able`: there is torch. Raises UserError."""
    trainer = spec.trainer
    if trainer is None or not trainer.model.entrypoint:
        if _data(asked):
            raise UserError("--vocab-size and --width are for a model of one's own: trainer.model says the decoder's.")
        return None
    if not able:
        raise UserError(
            f"{file} trains {trainer.model.entrypoint}, whose code says how large it is. "
            + WITHOUT_TORCH.format(image=spec.template.trainer.image or "IMAGE", file=file)
        )
    found = _told({"trainer": trainer.model_dump(mode="json", by_alias=True), "data": _data(asked)}, asked.python)
    try:
        return OwnDescription(**found)
    except TypeError as error:
        raise _no_answer(asked.python, str(error)) from error


def _data(asked: PlanOptions) -> Mapping[str, Any] | None:
    """As the options tell them; None: their manifests do."""
    if asked.vocab_size is None and asked.width is None:
        return None
    below = asked.vocab_size or 0
    frames = {"width": asked.width, "number_bytes": 2, "classes": below} if asked.width else None
    return {"vocab_size": below, "frames": frames}


def _layout(spec: JobSpec, replicas: int, own: OwnDescription | None = None) -> ParallelLayout:
    if not replicas:
        raise UserError(f"no size is valid: {sizes.rounding(spec)}.")
    layout = of(spec, replicas, own)
    if wrong := problems(layout.trainer, layout.parallelism, layout.size):
        raise UserError("; ".join(wrong))
    return layout


def _seen(spec: JobSpec, layout: ParallelLayout, gpu: Gpu, asked: PlanOptions, measure: bool) -> Estimate:
    return outlook(spec, layout, gpu, asked.fabric, _measured(layout, asked.python) if measure else (), asked.tokens)


def _searched(spec: JobSpec, layout: ParallelLayout, gpu: Gpu, asked: PlanOptions, measure: bool) -> list[Estimate]:
    found: list[Estimate] = []
    tried = search.candidates(layout.trainer, gpu, FABRICS[asked.fabric], layout.size, layout.per_node, layout.own)
    for each in tried[: MOST_MEASURED * asked.search]:
        if len(found) == asked.search:
            break
        seen = _seen(spec, each, gpu, asked, measure)
        if seen.fits is not False:
            found.append(seen)
    if not found:
        raise UserError(
            f"no layout of {layout.size} ranks was found that fits into {gpu.name}: take more replicas, or a smaller "
            "microBatchSize."
        )
    return found


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _measured(layout: ParallelLayout, python: str) -> Sequence[RankMemoryEstimate]:
    """Raises UserError."""
    asked = {
        "trainer": layout.trainer.model_dump(mode="json", by_alias=True),
        "data": layout.own and layout.own.data,
        "parallelism": layout.parallelism.model_dump(mode="json", by_alias=True),
        "size": layout.size,
    }
    try:
        return [rank_memory(each) for each in _told(asked, python)]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise _no_answer(python, f"{type(error).__name__}: {error}") from error


def _told(asked: Mapping[str, Any], python: str) -> Any:
    """In a process of its own: torch is none of the operator's, nor is a model of one's own. Raises UserError."""
    try:
        command = [*(shlex.split(python) or [sys.executable]), "-m", "concertina_trainer.planning"]
        done = subprocess.run(command, input=json.dumps(asked) + "\n", capture_output=True, text=True, check=False)
    except (OSError, ValueError) as error:
        raise UserError(f"`{python or sys.executable}` can't be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise UserError(f"the layout could not be measured: {said[0][:MOST_SAID]}")
    try:
        return json.loads(done.stdout)
    except (ValueError, RecursionError) as error:
        raise _no_answer(python, f"{done.stdout.strip()[:MOST_SAID]!r}") from error


def _no_answer(python: str, said: str) -> UserError:
    """Of a command that runs something else beside the Python or instead of it, or another version's."""
    return UserError(
        f"`{python or sys.executable}` did not answer as concertina_trainer.planning of this version does: {said}. "
        "--python must be a command that runs Python alone and prints nothing of its own to standard output."
    )


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} can't be written: {error.strerror}") from error


def _print(console: Console, name: str, spec: JobSpec, seen: Estimate) -> None:
    grid = Table.grid(padding=(0, 2))
    for row in _facts(spec, seen):
        grid.add_row(*row)
    console.print(f"{name}: {seen.layout.size} ranks in {seen.replicas} replicas, {seen.gpu.name}, {seen.fabric}\n")
    console.print(grid)
    if seen.memory:
        console.print(_memory_table(seen))
    if seen.traffic:
        console.print(_traffic_table(seen))
    console.print(f"\nFirst bottleneck: {bottleneck(seen)}")


def _facts(spec: JobSpec, seen: Estimate) -> Iterator[tuple[str, str]]:
    layout, trainer, plan, time = seen.layout, seen.layout.trainer, batch(seen.layout), seen.time
    valid = valid_sizes(spec, sizes.least(spec), sizes.most(spec))
    yield "Sizes", f"{_numbers(valid)} replicas" + (f"; {sizes.rounding(spec)}" if sizes.rounding(spec) else "")
    yield "Layout", _degrees(layout)
    crossing = [str(each) for each in layout.groups if layout.crosses(each)]
    yield "On nodes", f"{layout.per_node} ranks each; between nodes: {', '.join(crossing) or 'nothing'}"
    trained = f", {layout.trained:,} of them trained" if layout.trained < layout.weights else ""
    counted = " (counted)" if layout.own and layout.own.counted else ""
    yield "Parameters", f"{layout.weights:,}{trained}, {layout.flops:.3g} FLOPs a {layout.elements[:-1]}{counted}"
    yield (
        "Batch",
        (
            f"{trainer.global_batch_size} sequences of {trainer.model.sequence_length} {layout.elements}: "
            f"{plan.microbatches} microbatches of {plan.rows} on each of {layout.data}"
        ),
    )
    yield (
        "Step",
        (
            f"{time.total:.3g} s: {time.compute / time.total:.0%} computation, "
            f"{time.bubble / time.total:.0%} waiting in the pipeline, "
            f"{sum(time.communication.values()) / time.total:.0%} communication, "
            f"{time.optimizer / time.total:.0%} optimizer"
            + (f", {time.host / time.total:.0%} copies to host memory and back" if time.host else "")
        ),
    )
    yield (
        "Speed",
        f"{seen.tokens_per_second:,.0f} {layout.elements}/s, MFU {seen.mfu:.1%} (estimated: docs/planning.md)",
    )
    yield (
        "Node memory",
        f"{_size(seen.snapshots)} of snapshots a replica"
        + (f", {_size(seen.offloaded)} of offloaded state" if seen.offloaded else "")
        + (f", of {_size(seen.room)}" if seen.room else ""),
    )
    if budget := seen.budget:
        cost = "" if budget.cost is None else f", {budget.cost:,.0f} {budget.currency}"
        yield "Run", f"{budget.tokens:.3g} {layout.elements} in {duration(budget.seconds)}{cost}, if nothing fails"


def _degrees(layout: ParallelLayout) -> str:
    found = (
        " x ".join(f"{each} {degree}" for each, degree in layout.degrees._asdict().items() if degree > 1) or "one rank"
    )
    found += f", experts over {layout.parallelism.expert}" if layout.parallelism.expert > 1 else ""
    return found + (f", {layout.parallelism.schedule}" if layout.parallelism.pipeline > 1 else "")


def _numbers(valid: Sequence[int]) -> str:
    if len(valid) <= 4:
        return ", ".join(map(str, valid))
    return f"{valid[0]}, {valid[1]}, ... {valid[-1]}"


def _memory_table(seen: Estimate) -> Table:
    kinds = list(seen.memory[0].kinds)
    unit, size = _unit(max(rank.total for rank in seen.memory))
    offloaded = ["on the host"] if any(rank.host_total for rank in seen.memory) else []
    table = Table(
        f"{unit} at the peak", "", *kinds, "all", *offloaded, box=None, header_style="bold", padding=(0, 2, 0, 0)
    )
    for rank in seen.memory:
        figures = [f"{rank.kinds[kind] / size:.2f}" for kind in kinds]
        on_host = [f"{rank.host_total / size:.2f}" for _ in offloaded]
        table.add_row(f"rank {rank.rank}", rank.phase, *figures, f"{rank.total / size:.2f}", *on_host)
    return table


def _traffic_table(seen: Estimate) -> Table:
    unit, size = _unit(max(part.sent for part in seen.traffic))
    table = Table(
        "A step of a rank", "", "times", f"{unit} sent", "GB/s", "", box=None, header_style="bold", padding=(0, 2, 0, 0)
    )
    for part in seen.traffic:
        link = f"{seen.fabric}" if seen.layout.crosses(part.dimension) else "NVLink"
        hidden = "waited for" if part.exposed else "beside computation"
        table.add_row(
            str(part.dimension), part.name, f"{part.times}", f"{part.sent / size:.2f}",
            f"{seen.rate(part) / 1e9:.0f} {link}", hidden,
        )  # fmt: skip
    return table


def _unit(most: float) -> tuple[str, float]:
    """Of sizes up to this one."""
    return ("GiB", 2.0**30) if most >= 2**30 else ("MiB", 2.0**20)


def _size(size: float) -> str:
    unit, one = _unit(size)
    return f"{size / one:,.1f} {unit}"


def _print_smaller(console: Console, seen: Estimate) -> None:
    peak = "" if seen.peak is None else f", {_size(seen.peak.total)} at the peak of rank {seen.peak.rank}"
    speed = f"{seen.time.total:.3g} s a step, {seen.tokens_per_second:,.0f} {seen.layout.elements}/s"
    why = bottleneck(seen) if seen.fits is False else ""
    said = f"Shrunk to {seen.replicas} replicas ({_degrees(seen.layout)}): {speed}{peak}. {why}"
    console.print(said.rstrip())


def _print_search(console: Console, name: str, layout: ParallelLayout, found: Sequence[Estimate]) -> None:
    console.print(f"The fastest layouts of {name} on {layout.size} {found[0].gpu.name}, {found[0].fabric}:\n")
    table = Table(
        "Layout", "Activations", f"{layout.elements}/s", "MFU", "Memory", "First bottleneck", box=None,
        header_style="bold", padding=(0, 2, 0, 0),
    )  # fmt: skip
    for seen in found:
        peak = _size(seen.peak.total) if seen.peak else "not measured"
        table.add_row(
            _degrees(seen.layout), seen.layout.trainer.memory.activations, f"{seen.tokens_per_second:,.0f}",
            f"{seen.mfu:.1%}", peak, bottleneck(seen).partition(":")[0],
        )  # fmt: skip
    console.print(table)

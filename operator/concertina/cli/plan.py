"""`concertina plan`: estimate the memory, speed and cost of a job before it runs."""

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
from concertina_data.data_manifest import parse_field
from concertina_state.errors import InvalidInput
from concertina_trainer.config.memory_choice import MemoryChoice, absent
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.layouts import problems

MOST_QUOTED = 1000
"""Largest number of characters that an error message quotes."""
MOST_MEASURED = 4
"""Number of layouts whose memory a search measures, for each layout that the search shows."""
WITHOUT_TORCH = (
    "Memory is not measured: that needs torch, which is not installed here. Install it, or use the trainer's image:\n"
    "  pip install 'concertina-cli[torch]'\n"
    "  concertina plan {file} --python 'docker run --rm -i --entrypoint python3 {image}'\n"
    "  concertina plan {file} --python 'kubectl run plan --rm -iq --restart=Never --image={image} --command -- python3'"
)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of `concertina plan`."""

    replicas: int | None
    gpu: GpuName
    fabric: FabricName
    tokens: float | None
    search: int
    """Number of layouts to show; 0 to search for none."""
    memory: bool
    vocab_size: int | None
    """Vocabulary size of the data for a custom model, if the manifests of the data can't be read; otherwise None."""
    fields: tuple[str, ...]
    """Other fields of the data for a custom model, such as `features=float16x20`, if the manifests can't be read."""
    python: str
    """Command that runs a Python with torch; empty for the present Python."""
    picture: Path | None
    json: bool


def asked_hardware(gpu: str, fabric: str) -> tuple[GpuName, FabricName]:
    """Return the GPU and the fabric with the given names.

    Raises:
        UserError: When a name is not known.
    """
    try:
        return GpuName(gpu), FabricName(fabric)
    except ValueError:
        names = ", ".join([*GpuName, *FabricName])
        raise UserError(f"{gpu} on {fabric} is not known. Known ones: {names}") from None


def run(file: Path, options: PlanOptions) -> None:
    """Print the estimate of the job in a file.

    Raises:
        UserError: When the job can't be planned or measured, or an option is not valid.
    """
    if options.tokens is not None and not 0 < options.tokens < math.inf:
        raise UserError(f"--tokens is the number of tokens of a run: it must be above 0, not {options.tokens:g}")
    name, spec = _read(file)
    gpu = GPUS[options.gpu]
    replicas = options.replicas or sizes.most(spec)
    has_torch = bool(options.python or _has_torch())
    measure = options.memory and has_torch
    layout = _layout(spec, replicas)  # Refuses an invalid layout before anything runs.
    own = _own_model(file, spec, options, has_torch)
    asked, fit = layout.trainer, None
    if measure and absent(asked):
        fit = _fit(spec, replicas, own, gpu, options)
        spec = spec.model_copy(update={"trainer": fit.choice.filled(asked)})
    layout = _layout(spec, replicas, own)
    if options.search:
        estimates = _search_layouts(spec, layout, gpu, options, measure)
    else:
        least = sizes.least(spec)
        replica_counts = [replicas] + [least] * (options.replicas is None and 0 < least < replicas)
        estimates = [_estimate(spec, _layout(spec, size, own), gpu, options, measure) for size in replica_counts]
    if options.picture:
        _write(options.picture, picture(name, estimates[0].layout if estimates else layout))
    if options.json:
        key = "layouts" if options.search else "sizes"
        valid = valid_sizes(spec, sizes.least(spec), sizes.most(spec))
        chosen = fit.choice.chosen(asked) if fit else {}
        remedies = list(fit.remedies) if fit else []
        found = {"job": name, "validReplicas": valid, "settings": chosen, "remedies": remedies}
        print(json.dumps({**found, key: list(map(as_object, estimates))}, indent=1))
        return
    console = plain()
    if options.search:
        _print_search(console, name, layout, estimates)
    else:
        _print(console, name, spec, estimates[0], _settings(asked, fit))
        for smaller in estimates[1:]:
            _print_smaller(console, smaller)
    if options.memory and not measure:
        console.print("\n" + WITHOUT_TORCH.format(image=spec.template.trainer.image or "concertina/trainer", file=file))


def _read(file: Path) -> tuple[str, JobSpec]:
    manifest = read_manifest(file)
    try:
        spec = parse_spec(manifest)
    except SpecError as error:
        raise UserError(f"{file} would be refused: {error}") from error
    if spec.trainer is None:
        raise UserError(
            f"{file} runs its own command, which `concertina plan` can't plan: it supports only spec.trainer."
        )
    return str(manifest["metadata"]["name"]), _with_described_model(spec, spec.trainer)


def _with_described_model(spec: JobSpec, trainer: TrainerConfig) -> JobSpec:
    """Return the spec with the model that `trainer.model.from` refers to.

    Raises:
        UserError: When the description of the model can't be read here, or the bundled decoder can't compute the model.
    """
    uri, field = trainer.model.from_ or trainer.model.hf, "hf" if trainer.model.hf else "from"
    if uri is None:
        return spec
    if trainer.model.hf and spec.parallelism.tensor > 1:
        raise UserError(
            "`concertina plan` does not know what the tensor groups of trainer.model.hf send: plan the job without "
            "parallelism.tensor."
        )
    try:
        from concertina_state.objects.prefix import StorageError
        from concertina_trainer.state.described_model import filled_config, read_model, read_options
    except ImportError as error:
        raise UserError(
            f"trainer.model.{field} can't be read here: {error}. Install concertina-cli[storage]."
        ) from error
    try:
        if trainer.model.hf:
            model = trainer.model.model_copy(update={"options": read_options(uri)})
            return spec.model_copy(update={"trainer": trainer.model_copy(update={"model": model})})
        whole = filled_config(trainer, read_model(uri), uri)
    except (InvalidInput, StorageError) as error:
        raise UserError(f"trainer.model.{field} can't be planned: {error}") from error
    whole = whole.model_copy(update={"model": whole.model.model_copy(update={"from_": None})})
    return spec.model_copy(update={"trainer": whole})


def _own_model(file: Path, spec: JobSpec, options: PlanOptions, has_torch: bool) -> OwnDescription | None:
    """Return the description of a custom model; None if the job trains the bundled decoder.

    Args:
        file: Manifest of the job.
        spec: Spec of the job.
        options: Options of the command.
        has_torch: Whether a Python with torch is available.

    Raises:
        UserError: When the model can't be described, or when options for a custom model are given without one.
    """
    trainer = spec.trainer
    if trainer is None or not trainer.model.custom:
        if _data(options):
            raise UserError(
                "--vocab-size and --field are for a model of your own: spec.trainer.model already has these values."
            )
        return None
    if not has_torch:
        raise UserError(
            f"{file} trains {trainer.model.named}, whose code says how large it is. "
            + WITHOUT_TORCH.format(image=spec.template.trainer.image or "IMAGE", file=file)
        )
    description = _run_planning(
        {"trainer": trainer.model_dump(mode="json", by_alias=True), "data": _data(options)}, options.python
    )
    try:
        return OwnDescription(**description)
    except TypeError as error:
        raise UserError(_unexpected_answer(options.python, str(error))) from error


def _data(options: PlanOptions) -> Mapping[str, Any] | None:
    """Return the description of the training data from the command's options.

    The result is None without such options. The manifests of the data then describe the data.

    Raises:
        UserError: When a field is not valid.
    """
    if options.vocab_size is None and not options.fields:
        return None
    try:
        fields = [dataclasses.asdict(parse_field(text)) for text in options.fields]
    except ValueError as error:
        raise UserError(
            f"--field {' '.join(options.fields)}: {error}. Give NAME=TYPE, such as features=float16x20."
        ) from error
    return {"vocab_size": options.vocab_size or 0, "fields": fields}


def _layout(spec: JobSpec, replicas: int, own: OwnDescription | None = None) -> ParallelLayout:
    if not replicas:
        raise UserError(f"no size is valid: {sizes.rounding(spec)}.")
    layout = of(spec, replicas, own)
    if violations := problems(layout.trainer, layout.parallelism, layout.size):
        raise UserError("; ".join(violations))
    return layout


def _estimate(spec: JobSpec, layout: ParallelLayout, gpu: Gpu, options: PlanOptions, measure: bool) -> Estimate:
    return outlook(
        spec, layout, gpu, options.fabric, _measured(layout, options.python) if measure else (), options.tokens
    )


def _search_layouts(
    spec: JobSpec, layout: ParallelLayout, gpu: Gpu, options: PlanOptions, measure: bool
) -> list[Estimate]:
    estimates: list[Estimate] = []
    candidates = search.candidates(
        layout.trainer, gpu, FABRICS[options.fabric], layout.size, layout.per_node, layout.own
    )
    for candidate in candidates[: MOST_MEASURED * options.search]:
        if len(estimates) == options.search:
            break
        estimate = _estimate(spec, candidate, gpu, options, measure)
        if estimate.fits is not False:
            estimates.append(estimate)
    if not estimates:
        raise UserError(
            f"no layout of {layout.size} ranks fits into the memory of {gpu.name}: use more replicas, or a "
            "smaller microBatchSize."
        )
    return estimates


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _measured(layout: ParallelLayout, python: str) -> Sequence[RankMemoryEstimate]:
    """Measure the memory of the ranks of a layout.

    Raises:
        UserError: When the memory can't be measured.
    """
    try:
        return [rank_memory(answer) for answer in _run_planning(_request(layout), python)]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(_unexpected_answer(python, f"{type(error).__name__}: {error}")) from error


def _request(layout: ParallelLayout) -> dict[str, Any]:
    """Return the request to `concertina_trainer.planning` for the memory of a layout."""
    return {
        "trainer": layout.trainer.model_dump(mode="json", by_alias=True),
        "data": layout.own and layout.own.data,
        "parallelism": layout.parallelism.model_dump(mode="json", by_alias=True),
        "size": layout.size,
    }


def _run_planning(request: Mapping[str, Any], python: str) -> Any:
    """Run `concertina_trainer.planning` in a process with a request, and return the answer.

    A process of its own is needed, because the operator's package has neither torch nor the code of a custom model.

    Raises:
        UserError: When the process fails, or its answer is not JSON.
    """
    try:
        command = [*(shlex.split(python) or [sys.executable]), "-m", "concertina_trainer.planning"]
        process = subprocess.run(command, input=json.dumps(request) + "\n", capture_output=True, text=True, check=False)
    except (OSError, ValueError) as error:
        raise UserError(f"`{python or sys.executable}` can't be run: {error}") from error
    if process.returncode:
        error_lines = process.stderr.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise UserError(f"the layout could not be measured: {error_lines[0][:MOST_QUOTED]}")
    try:
        return json.loads(process.stdout)
    except (ValueError, RecursionError) as error:
        raise UserError(_unexpected_answer(python, f"{process.stdout.strip()[:MOST_QUOTED]!r}")) from error


def _unexpected_answer(python: str, answer: str) -> str:
    """Return an error message that says that the `--python` command gave an unexpected answer.

    The command may run a different program, print something else, or have another version of concertina.
    """
    return (
        f"`{python or sys.executable}` did not answer as concertina_trainer.planning of this version does: {answer}. "
        "--python must be a command that runs Python alone and prints nothing of its own to standard output."
    )


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} can't be written: {error.strerror}") from error


@dataclasses.dataclass(frozen=True)
class Fit:
    """Settings that a job's workers choose automatically for a GPU."""

    choice: MemoryChoice
    ranks: int
    """Number of ranks for which the settings are chosen."""
    remedies: Sequence[str]
    """Changes with which the job would fit into memory. If there are any, the workers refuse to start."""


def _fit(spec: JobSpec, replicas: int, own: OwnDescription | None, gpu: Gpu, options: PlanOptions) -> Fit:
    """Return the settings that the workers choose when the job runs with its smallest number of replicas.

    Raises:
        UserError: When the process that computes the settings does not answer as expected.
    """
    smallest = _layout(spec, min(spec.least_replicas, replicas), own)
    answer = _run_planning({**_request(smallest), "deviceBytes": gpu.memory}, options.python)
    try:
        return Fit(MemoryChoice.parsed(answer["choice"]), smallest.size, answer["remedies"])
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(_unexpected_answer(options.python, f"{type(error).__name__}: {error}")) from error


def _settings(asked: TrainerConfig, fit: Fit | None) -> Iterator[tuple[str, str]]:
    """Yield rows about the settings that the spec does not set, so that the workers choose them."""
    if not absent(asked):
        return
    if fit is None:
        yield "Settings", f"not measured; the job chooses {', '.join(absent(asked))} by the memory of its GPUs"
        return
    values = ", ".join(f"{field} {value}" for field, value in fit.choice.chosen(asked).items())
    yield "Settings", f"{values}: chosen for {fit.ranks} ranks"
    if fit.remedies:
        yield "Refused", f"does not fit; any of these makes it fit: {'; '.join(fit.remedies)}"


def _print(console: Console, name: str, spec: JobSpec, estimate: Estimate, settings: Iterator[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for row in (*_facts(spec, estimate), *settings):
        grid.add_row(*row)
    ranks, replicas = estimate.layout.size, estimate.replicas
    console.print(f"{name}: {ranks} ranks in {replicas} replicas, {estimate.gpu.name}, {estimate.fabric}\n")
    console.print(grid)
    if estimate.memory:
        console.print(_memory_table(estimate))
    if estimate.traffic:
        console.print(_traffic_table(estimate))
    console.print(f"\nFirst bottleneck: {bottleneck(estimate)}")


def _facts(spec: JobSpec, estimate: Estimate) -> Iterator[tuple[str, str]]:
    layout, trainer, plan, time = estimate.layout, estimate.layout.trainer, batch(estimate.layout), estimate.time
    valid = valid_sizes(spec, sizes.least(spec), sizes.most(spec))
    yield "Sizes", f"{_numbers(valid)} replicas" + (f"; {sizes.rounding(spec)}" if sizes.rounding(spec) else "")
    yield "Layout", _degrees(layout)
    crossing = [str(dimension) for dimension in layout.groups if layout.crosses(dimension)]
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
    yield "Data", _reading(estimate)
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
    hfu = f", HFU {estimate.hfu:.1%}" if estimate.hfu is not None else ""
    yield (
        "Speed",
        f"{estimate.tokens_per_second:,.0f} {layout.elements}/s, MFU {estimate.mfu:.1%}{hfu} "
        "(estimated: docs/planning.md)",
    )
    yield (
        "Node memory",
        f"{_size(estimate.snapshots)} of snapshots a replica"
        + (f", {_size(estimate.offloaded)} of offloaded state" if estimate.offloaded else "")
        + (f", of {_size(estimate.room)}" if estimate.room else ""),
    )
    if budget := estimate.budget:
        cost = "" if budget.cost is None else f", {budget.cost:,.0f} {budget.currency}"
        yield "Run", f"{budget.tokens:.3g} {layout.elements} in {duration(budget.seconds)}{cost}, if nothing fails"


def _reading(estimate: Estimate) -> str:
    reading = estimate.reading
    most, least = max(reading.groups), min(reading.groups)
    return (
        f"a replica reads {least if least == most else f'{least} to {most}'} of {reading.total} groups, "
        f"{_size(reading.rate(estimate.tokens_per_second))}/s; all replicas together read the data "
        f"{reading.times:.3g} times an epoch"
    )


def _degrees(layout: ParallelLayout) -> str:
    text = (
        " x ".join(f"{name} {degree}" for name, degree in layout.degrees._asdict().items() if degree > 1) or "one rank"
    )
    text += f", experts over {layout.parallelism.expert}" if layout.parallelism.expert > 1 else ""
    return text + (f", {layout.parallelism.schedule}" if layout.parallelism.pipeline > 1 else "")


def _numbers(valid: Sequence[int]) -> str:
    if len(valid) <= 4:
        return ", ".join(map(str, valid))
    return f"{valid[0]}, {valid[1]}, ... {valid[-1]}"


def _memory_table(estimate: Estimate) -> Table:
    kinds = list(estimate.memory[0].kinds)
    unit, size = _unit(max(rank.total for rank in estimate.memory))
    offloaded = ["on the host"] if any(rank.host_total for rank in estimate.memory) else []
    table = Table(
        f"{unit} at the peak", "", *kinds, "all", *offloaded, box=None, header_style="bold", padding=(0, 2, 0, 0)
    )
    for rank in estimate.memory:
        figures = [f"{rank.kinds[kind] / size:.2f}" for kind in kinds]
        on_host = [f"{rank.host_total / size:.2f}" for _ in offloaded]
        table.add_row(f"rank {rank.rank}", rank.phase, *figures, f"{rank.total / size:.2f}", *on_host)
    return table


def _traffic_table(estimate: Estimate) -> Table:
    unit, size = _unit(max(part.sent for part in estimate.traffic))
    table = Table(
        "A step of a rank", "", "times", f"{unit} sent", "GB/s", "", box=None, header_style="bold", padding=(0, 2, 0, 0)
    )
    for part in estimate.traffic:
        link = f"{estimate.fabric}" if estimate.layout.crosses(part.dimension) else "NVLink"
        overlap = "waited for" if part.exposed else "beside computation"
        table.add_row(
            str(part.dimension), part.name, f"{part.times}", f"{part.sent / size:.2f}",
            f"{estimate.rate(part) / 1e9:.0f} {link}", overlap,
        )  # fmt: skip
    return table


def _unit(most: float) -> tuple[str, float]:
    """Return a unit in which to show sizes of up to `most` bytes, such as GB, and its number of bytes."""
    return ("GiB", 2.0**30) if most >= 2**30 else ("MiB", 2.0**20)


def _size(size: float) -> str:
    unit, unit_bytes = _unit(size)
    return f"{size / unit_bytes:,.1f} {unit}"


def _print_smaller(console: Console, estimate: Estimate) -> None:
    peak = "" if estimate.peak is None else f", {_size(estimate.peak.total)} at the peak of rank {estimate.peak.rank}"
    speed = f"{estimate.time.total:.3g} s a step, {estimate.tokens_per_second:,.0f} {estimate.layout.elements}/s"
    reason = bottleneck(estimate) if estimate.fits is False else ""
    line = f"Shrunk to {estimate.replicas} replicas ({_degrees(estimate.layout)}): {speed}{peak}. {reason}"
    console.print(line.rstrip())


def _print_search(console: Console, name: str, layout: ParallelLayout, estimates: Sequence[Estimate]) -> None:
    console.print(f"The fastest layouts of {name} on {layout.size} {estimates[0].gpu.name}, {estimates[0].fabric}:\n")
    table = Table(
        "Layout", "Activations", f"{layout.elements}/s", "MFU", "Memory", "First bottleneck", box=None,
        header_style="bold", padding=(0, 2, 0, 0),
    )  # fmt: skip
    for estimate in estimates:
        peak = _size(estimate.peak.total) if estimate.peak else "not measured"
        table.add_row(
            _degrees(estimate.layout), estimate.layout.trainer.memory.resolved_activations,
            f"{estimate.tokens_per_second:,.0f}", f"{estimate.mfu:.1%}", peak, bottleneck(estimate).partition(":")[0],
        )  # fmt: skip
    console.print(table)

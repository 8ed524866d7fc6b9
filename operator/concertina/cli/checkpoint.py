"""`concertina checkpoint`: commands for checkpoints in durable storage.

Only `create`, which requests a checkpoint from a running job, needs a cluster.
"""

from __future__ import annotations

import contextlib
import enum
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from concertina.cli.checkpoint_rows import loss, size, when
from concertina.cli.extras import Extra, ExtraMissing, needing
from concertina.terminal.characters import harmless
from concertina.terminal.console import plain

app = typer.Typer(no_args_is_help=True, help="Show, verify, export, copy and prune checkpoints in durable storage.")
console = plain()
Uri = Annotated[
    str,
    typer.Argument(
        help="URI (s3://, gs://, az:// or file://) of a checkpoint, of a run's folder (its newest checkpoint is used), "
        "or RUN/BEST for the checkpoint with the lowest evaluation loss."
    ),
]
Run = Annotated[str, typer.Argument(help="Folder of a run, as in spec.checkpoint.uri.")]


class Format(enum.Enum):
    """File formats to which a checkpoint can be exported."""

    HF = "hf"
    PEFT = "peft"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCHTITAN = "torchtitan"


OPTIONS: Mapping[Format, Collection[str]] = {
    Format.HF: ("--shard-gigabytes", "--data", "--ema"),
    Format.PEFT: (),
    Format.SAFETENSORS: ("--shard-gigabytes", "--ema"),
    Format.DCP: (),
    Format.TORCHTITAN: (),
}
"""Options of `concertina checkpoint export` that are allowed for each format."""


@contextlib.contextmanager
def sentences(extra: Extra = Extra.STORAGE) -> Iterator[None]:
    """Context manager that prints expected errors as sentences and exits with status 1.

    Raises:
        typer.Exit: When the block fails with an expected error, or needs an extra that is not installed.
    """
    from concertina_state.errors import InvalidInput

    expected: tuple[type[Exception], ...] = (ExtraMissing, InvalidInput)
    try:
        with needing(extra):
            from concertina.reproduction import Irreproducible
            from concertina_state.objects.prefix import StorageError
        expected = (*expected, Irreproducible, StorageError)
        with needing(extra):
            yield
    except expected as error:
        typer.echo(harmless(str(error)), err=True)
        raise typer.Exit(1) from error


@contextlib.contextmanager
def _bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal. Yield a function that advances the bar by a number of bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty())
    with progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.advance(task, done)


@app.command("list")
def list_(uri: Run) -> None:
    """List the finished checkpoints of a run, and mark the newest and the one with the lowest evaluation loss."""
    with sentences():
        from concertina_state.checkpoints import catalogue
        from concertina_state.checkpoints.best import BEST, best_of
        from concertina_state.checkpoints.manifest import CheckpointKey
        from concertina_state.objects.prefix import ObjectPrefix

        folder = ObjectPrefix(uri)
        manifests, problems = catalogue.finished(folder)
        latest, problem = catalogue.named(folder, manifests)
        undone = catalogue.undone(folder, manifests)
        table = Table(box=None, header_style="bold")
        named = best_of(manifest for manifest in manifests if manifest.place not in undone)
        best = CheckpointKey.named_by(named) if named else None
        for column in ("STEP", "ROUND", "WHEN", "SIZE", "WORLD", "LOSS", "JOB", "", "FOLDER"):
            table.add_column(column)
        for manifest in manifests:
            location = manifest.place
            labels = (
                ("LATEST", location == latest), (BEST, location == best), ("complete", manifest.complete),
                ("undone", location in undone),
            )  # fmt: skip
            marks = [label for label, applies in labels if applies]
            row = (
                manifest.id.step, manifest.id.round, when(manifest.at), size(manifest.size), manifest.id.shards,
                loss(manifest),
            )  # fmt: skip
            table.add_row(*map(str, row), manifest.job, ", ".join(marks), manifest.place.folder)
    console.print(table if manifests else f"{uri} has no finished checkpoint.")
    for line in (*problems, *([problem] if problem else [])):
        typer.echo(harmless(line), err=True)


@app.command()
def show(
    uri: Uri,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint to use.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="json: print the manifest as JSON.")] = "",
) -> None:
    """Show what went into a checkpoint: samples, code, configuration, rounds, and the previous checkpoint."""
    with sentences():
        from concertina.cli.checkpoint_rows import rows
        from concertina_state.checkpoints import catalogue
        from concertina_state.checkpoints.manifest import to_json

        checkpoint = catalogue.at_step(uri, step)
    if output == "json":
        typer.echo(json.dumps(json.loads(to_json(checkpoint.manifest)), indent=2))
        return
    for name, value in rows(checkpoint.uri, checkpoint.manifest):
        console.print(Text.assemble((f"{name:<14}", "bold"), value))


@app.command()
def verify(uri: Uri) -> None:
    """Read a whole checkpoint and compare it with its checksums. Exit status 1: something is damaged.

    \f

    Raises:
        typer.Exit: When a part of the checkpoint is damaged.
    """
    with sentences():
        from concertina_state.checkpoints import catalogue
        from concertina_state.checkpoints.reader import opened, resolve

        with opened(resolve(uri)) as checkpoint, _bar("verifying", checkpoint.manifest.size) as advance:
            problems = catalogue.verify(checkpoint, advance)
    for problem in problems:
        typer.echo(harmless(problem), err=True)
    if problems:
        raise typer.Exit(1)
    parts, bytes_ = len(checkpoint.manifest.parts), size(checkpoint.manifest.size)
    console.print(f"{checkpoint.uri} is undamaged: {parts} parts, {bytes_}, step {checkpoint.manifest.id.step}.")


@app.command("export")
def export_(
    uri: Uri,
    out: Annotated[str, typer.Argument(help="Folder or URI to write to; for dcp and torchtitan a folder.")],
    to: Annotated[
        Format,
        typer.Option(
            help="hf: Hugging Face model. peft: its LoRA adapters only, for PEFT. safetensors: weights with their own "
            "names. dcp: folder of torch.distributed.checkpoint, also with moments. torchtitan: the same with "
            "torchtitan's names, for a Llama model."
        ),
    ] = Format.HF,
    shard_gigabytes: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Maximum size of one file (hf, safetensors). Default: 5.", show_default=False),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="URI of the run's data, which contain the tokenizer (hf). Default: the URI that the run used."
        ),
    ] = "",
    ema: Annotated[
        bool,
        typer.Option("--ema", help="Write the average of the weights (optimizer.emaDecay; hf, safetensors)."),
    ] = False,
) -> None:
    """Write a checkpoint in a format that other tools read."""
    given = {"--shard-gigabytes": shard_gigabytes is not None, "--data": bool(data), "--ema": ema}
    with sentences():
        _check_options(to, [option for option, is_given in given.items() if is_given])
    if to in (Format.DCP, Format.TORCHTITAN):
        with sentences(Extra.TORCH):
            _export_for_dcp(uri, out, to)
        return
    with sentences(Extra.DATA):  # low-rank adapters are merged by numpy
        from concertina_state.checkpoints.reader import opened, resolve
        from concertina_state.objects.prefix import ObjectPrefix
        from concertina_trainer.export import export as exporting
        from concertina_trainer.export import peft, plain

        target = ObjectPrefix(_target(out), create=True)
        file_bytes = exporting.FILE_BYTES if shard_gigabytes is None else int(shard_gigabytes * 1e9)
        with opened(resolve(uri)) as checkpoint:
            if to is Format.PEFT:
                export = peft.export(checkpoint)
            elif to is Format.SAFETENSORS:
                export = plain.export(checkpoint, ema)
            else:
                export = exporting.export(checkpoint, _target(data) if data else "", ema)
            with _bar("exporting", export.size) as advance:
                files = export.write(target, advance, file_bytes)
    console.print(f"{out}: {', '.join(files)}; step {checkpoint.manifest.id.step} of {checkpoint.uri}.")
    if export.message:
        console.print(export.message)


def _check_options(to: Format, given: Collection[str]) -> None:
    """Check that each given option of `concertina checkpoint export` is allowed for the format `to`.

    Raises:
        InvalidInput: When an option is not allowed.
    """
    from concertina_state.errors import InvalidInput

    if unusable := [option for option in given if option not in OPTIONS[to]]:
        raise InvalidInput(f"{', '.join(unusable)} does not apply to --to {to.value}: remove it.")


def _export_for_dcp(uri: str, out: str, to: Format) -> None:
    from concertina_state.checkpoints.reader import StoredCheckpoint, resolve
    from concertina_state.errors import InvalidInput
    from concertina_trainer.export import torchtitan
    from trainingjob import dcp

    if "://" in out:
        raise InvalidInput(f"{out} is a URI, and --to {to.value} writes to a folder of this machine: name a folder.")
    convert = torchtitan.convert if to is Format.TORCHTITAN else dcp.convert
    uri = resolve(uri)
    with _bar("exporting", StoredCheckpoint(uri).manifest.size) as advance:
        convert(uri, out, advance)
    console.print(f"{out}: the checkpoint {uri}, for torch.distributed.checkpoint.load(checkpoint_id=...).")


@app.command("copy")
def copy_(
    uri: Uri,
    to: Annotated[str, typer.Argument(help="URI of the folder of a run to copy to. A folder without LATEST gets one.")],
) -> None:
    """Copy a checkpoint to another URI, and verify the copy by reading it."""
    with sentences():
        from concertina_state.checkpoints import catalogue
        from concertina_state.checkpoints.reader import opened, resolve
        from concertina_state.objects.prefix import ObjectPrefix

        with opened(resolve(uri)) as checkpoint, _bar("copying", 2 * checkpoint.manifest.size) as advance:
            copied = catalogue.copy(checkpoint, ObjectPrefix(_target(to), create=True), advance)
    console.print(f"{copied} is a verified copy of {checkpoint.uri}.")


@app.command()
def prune(
    uri: Run,
    keep: Annotated[int, typer.Option(min=1, help="Number of the newest checkpoints to keep.")],
    keep_every_steps: Annotated[
        int | None, typer.Option(min=1, help="Also keep the first checkpoint of every N steps.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete the checkpoints. Without this option, they are only listed.")
    ] = False,
) -> None:
    """Delete old checkpoints and the files of unfinished ones.

    The file LATEST names the newest and the best checkpoint. These two and checkpoints that are being read are not
    deleted.
    """
    with sentences():
        from concertina_state.checkpoints import catalogue
        from concertina_state.objects.prefix import ObjectPrefix

        folder = ObjectPrefix(uri)
        prunable = catalogue.to_prune(folder, keep, keep_every_steps)
        in_use = catalogue.prune(folder, prunable) if yes else []
    for location in prunable:
        busy = location in in_use
        console.print(
            f"{'in use, not deleted' if busy else 'deleted' if yes else 'would be deleted'}: {location.folder}"
        )
    if not prunable:
        console.print("There is nothing to delete.")
    elif not yes:
        console.print("Nothing was deleted. Add --yes to delete.")


@app.command()
def create(
    job: Annotated[str, typer.Argument(help="Name of the TrainingJob.")],
    wait: Annotated[bool, typer.Option(help="Wait until the checkpoint is in storage.")] = True,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace.")] = None,
    kubeconfig: Annotated[Path | None, typer.Option("--kubeconfig", help="Path of the kubeconfig.")] = None,
    context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")] = None,
) -> None:
    """Request a durable checkpoint of a running job at its next step. Training continues meanwhile."""
    from concertina.cli.checkpoint_create import ask
    from concertina.terminal.cluster_connection import Target, call

    call(ask(Target(kubeconfig, context, namespace), job, wait))


def _target(out: str) -> str:
    return out if "://" in out else str(Path(out).absolute())

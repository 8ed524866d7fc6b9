"""Command `concertina demo`, which runs all parts of the demo in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from concertina.demo import stage as stages
from concertina.demo.history import DemoHistory
from concertina.demo.plot import draw
from concertina.demo.stage import Stage
from concertina.demo.summary import broken_promises, summarise
from concertina.demo.view import shown
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths
from concertina.terminal.cluster_connection import Target
from concertina.terminal.watch import JobWatch, Late

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
JOB = "demo"
START_LIMIT, RECOVERY_LIMIT, END_LIMIT = 180.0, 60.0, 240.0
Step = Callable[[str], object]


@app.command()
def demo(
    picture: Annotated[Path, typer.Option("--picture", help="Where the PNG goes.")] = Path("out/demo.png"),
    name: Annotated[str, typer.Option("--name", help="Name of the local cluster that the demo makes.")] = "",
) -> None:
    """Show a job that loses a node, continues, scales back up and completes, in a local cluster of its own.

    Raises:
        typer.Exit: Always. The status is 1 if a check of the demo failed.
    """
    console = Console()
    start = time.monotonic()
    try:
        broken = tell(console, name or f"{paths.default_name()}-demo", picture)
    except (Late, LocalClusterError) as error:
        broken = [str(error)]
    for sentence in broken:
        console.print(f"Not as promised: {sentence}", style="red", markup=False)
    console.print(f"{'The demo failed' if broken else 'All checks passed'}, {time.monotonic() - start:.0f} s in all.")
    raise typer.Exit(1 if broken else 0)


def tell(console: Console, name: str, picture: Path) -> list[str]:
    """Run the whole demo, and return one sentence for each check that failed.

    Raises:
        LocalClusterError: When concertina does not run from a checkout, or the cluster fails.
    """
    if not stages.CHART.is_dir():
        raise LocalClusterError("the demo needs a checkout of concertina, with its chart: run `make demo` there.")
    with stages.standing(name, 3, lambda text: timed(console, text)) as stage:
        console.print(f"Logs are in {stage.cluster.record.logs}; kubectl: KUBECONFIG={stage.cluster.kubeconfig}")
        with timed(console, "data: invented text, as tokens in the bucket") as say:
            for done, count in stages.build_data(stage.storage):
                say(f"{done / count:.0%}")
        history = asyncio.run(play(stage, console))
        draw(history, picture)
        console.print(summarise(history, stage))
        console.print(f"The loss over time, with the kill and the growth: {picture}")
        return broken_promises(history, stage)


@contextmanager
def timed(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text`, which describes the current activity, and print the activity's duration at the end.

    Yield a function that adds a detail to the shown text.
    """
    start = time.monotonic()
    with console.status(text) as status:
        yield lambda detail: status.update(f"{text}: {detail}")
    console.print(f"[green]✓[/] {text} [dim]{time.monotonic() - start:.1f} s")


async def play(stage: Stage, console: Console) -> DemoHistory:
    """Apply the job, kill a node after a third of the steps, boot the node after half of them, and wait for the end.

    Return the record of the run.
    """
    cluster, history = stage.cluster, DemoHistory()
    cluster.kubectl("apply", "-f", str(stages.CHECKOUT / "examples" / "demo.yaml"))
    async with (
        Target(cluster.kubeconfig, None, "default").connect() as (client, namespace),
        JobWatch(client, namespace, JOB, history.looked, history.stepped) as watch,
        shown(watch, console),
    ):
        await watch.until("the first step", START_LIMIT, lambda: history.losses)
        await watch.until("a third of the way", END_LIMIT, lambda: history.percent >= 33)
        node = await asyncio.to_thread(victim, stage, history)
        history.mark(time.time(), "kill", f"node {node} killed")
        await asyncio.to_thread(cluster.kill_node, node)
        console.print(f"[red]✗[/] killed node {node}, and every process on it")
        await watch.until("a world without it", RECOVERY_LIMIT, lambda: history.replicas == 2)
        await watch.until("half of the way", END_LIMIT, lambda: history.percent >= 50)
        console.print(f"[green]↑[/] booting node {node} again")
        await asyncio.to_thread(cluster.start_node, node)
        await watch.until("three replicas train again", END_LIMIT, lambda: history.replicas == 3 or history.ended)
        history.mark(time.time(), "grown", f"node {node} is back: {history.replicas} replicas")
        await watch.until("the end of the run", END_LIMIT, lambda: history.ended)
    return history


def victim(stage: Stage, history: DemoHistory) -> str:
    """Return the node that the demo kills: the node of a member, but not the operator's node.

    The demo does not test the loss of a worker together with the operator.
    """
    spared = stage.operator_node()
    return next(member.node for member in history.status.world.members if member.node != spared)

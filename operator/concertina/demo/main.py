"""`concertina demo`: the story, top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from concertina.demo import stage as stages
from concertina.demo.history import History
from concertina.demo.plot import draw
from concertina.demo.stage import Stage, until
from concertina.demo.summary import broken_promises, summarise
from concertina.demo.view import LiveView
from concertina.demo.watcher import Watcher
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
JOB = "demo"
START_LIMIT, RECOVERY_LIMIT, END_LIMIT = 60.0, 60.0, 240.0
Step = Callable[[str], object]


@app.command()
def demo(
    picture: Annotated[Path, typer.Option("--picture", help="Where the PNG goes.")] = Path("out/demo.png"),
    name: Annotated[str, typer.Option("--name", help="Name of the local cluster that the demo makes.")] = "",
) -> None:
    """See a job lose a node, go on, grow back and finish, on a cluster of its own on this machine."""
    console = Console()
    begun = time.monotonic()
    try:
        broken = tell(console, name or f"{paths.default_name()}-demo", picture)
    except (TimeoutError, LocalClusterError) as error:
        broken = [str(error)]
    for sentence in broken:
        console.print(f"[red]Not as promised: {sentence}")
    console.print(f"{'The demo failed' if broken else 'All as promised'}, {time.monotonic() - begun:.0f} s in all.")
    raise typer.Exit(1 if broken else 0)


def tell(console: Console, name: str, picture: Path) -> list[str]:
    """The whole story; a sentence for each promise that was not kept."""
    with stages.standing(name, 3, lambda text: timed(console, text)) as stage:
        console.print(f"Logs are in {stage.cluster.record.logs}; kubectl: KUBECONFIG={stage.cluster.kubeconfig}")
        with timed(console, "data: invented text, as tokens in the bucket") as say:
            for done, count in stages.build_data(stage.storage):
                say(f"{done / count:.0%}")
        with Watcher(stage, JOB) as watcher:
            try:
                play(stage, watcher.history, console)
            except TimeoutError as error:
                raise TimeoutError(f"{error}; the job says: {said(watcher.history)}") from None
        draw(watcher.history, picture)
        console.print(summarise(watcher.history, stage))
        console.print(f"The loss over time, with the kill and the growth: {picture}")
        return broken_promises(watcher.history, stage)


@contextmanager
def timed(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Say what is being done, and how long it took."""
    begun = time.monotonic()
    with console.status(text) as status:
        yield lambda detail: status.update(f"{text}: {detail}")
    console.print(f"[green]✓[/] {text} [dim]{time.monotonic() - begun:.1f} s")


def play(stage: Stage, history: History, console: Console) -> None:
    """Apply the job; kill a node at a third; boot it again at half; wait for the end."""
    cluster = stage.cluster
    cluster.kubectl("apply", "-f", str(stages.CHECKOUT / "examples" / "demo.yaml"))
    with LiveView(stage, JOB, history, console):
        until("the first step", START_LIMIT, lambda: history.losses)
        until("a third of the way", END_LIMIT, lambda: percent(history) >= 33)
        node = victim(stage, history)
        history.mark(time.time(), "kill", f"node {node} killed")
        cluster.kill_node(node)
        console.print(f"[red]✗[/] killed node {node}, with every process on it")
        until("a world without it", RECOVERY_LIMIT, lambda: replicas(history) == 2)
        until("half of the way", END_LIMIT, lambda: percent(history) >= 50)
        console.print(f"[green]↑[/] booting node {node} again")
        cluster.start_node(node)
        until("three replicas at work again", END_LIMIT, lambda: replicas(history) == 3 or ended(history))
        history.mark(time.time(), "grown", f"node {node} is back: {replicas(history)} replicas")
        until("the end of the run", END_LIMIT, lambda: ended(history))


def victim(stage: Stage, history: History) -> str:
    """A node that has a member of the world, not the operator (that would be another drill)."""
    spared = stage.operator_node()
    return next(str(m["node"]) for m in history.status["world"]["members"] if m["node"] != spared)


def said(history: History) -> str:
    """The job's own words about how it is."""
    ready = [c for c in history.status.get("conditions", []) if c["type"] == "Ready"]
    return f"{ready[0]['reason']}: {ready[0]['message']}" if ready else "nothing yet"


def percent(history: History) -> float:
    return float(history.status.get("progress", {}).get("percent") or 0)


def replicas(history: History) -> int:
    """Replicas at work at the last look."""
    return history.samples[-1].world if history.samples else 0


def ended(history: History) -> bool:
    """Whether the job is complete or failed."""
    over = ("Complete", "Failed")
    return any(c["type"] in over and c["status"] == "True" for c in history.status.get("conditions", []))

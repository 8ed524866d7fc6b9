"""`concertina local`: a Kubernetes cluster on this machine, with nodes that can be made to fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from concertina.local.cluster import LocalCluster

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    help="A Kubernetes cluster on this machine: a real control plane, and nodes that run pods as processes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
node = typer.Typer(help="Show nodes, and inject faults.", no_args_is_help=True, context_settings=HELP)
app.add_typer(node, name="node")

Name = Annotated[str, typer.Option("--name", help="Name of the cluster. Default: a name for this checkout.")]
NodeName = Annotated[str, typer.Argument(help="Name of the node, as in `concertina local node list`.")]


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Context manager that prints an error as a sentence on stderr and exits with status 1.

    Raises:
        typer.Exit: When the block fails with an expected error.
    """
    from concertina.local.errors import LocalClusterError

    try:
        yield
    except (LocalClusterError, ValueError) as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(1) from None


def _name(name: str) -> str:
    from concertina.local.host import paths

    return name or paths.default_name()


def _attach(name: str) -> LocalCluster:
    from concertina.local import cluster

    return cluster.attach(_name(name))


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=200, help="Number of nodes.")] = 3,
    gpus: Annotated[
        int,
        typer.Option(min=0, help="Simulated nvidia.com/gpu per node: they exist only in the scheduler's accounting."),
    ] = 0,
    cpu: Annotated[
        str, typer.Option("--cpu", help="CPUs per node, such as 4 or 500m. Default: all CPUs of the machine.")
    ] = "",
    memory: Annotated[str, typer.Option(help="Memory per node, such as 8Gi. Default: all memory of the machine.")] = "",
    image: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: pods of image NAME run in the virtual environment PATH. May be repeated."),
    ] = None,
    s3: Annotated[bool, typer.Option("--s3", help="Also start an S3 server (SeaweedFS).")] = False,
    name: Name = "",
) -> None:
    """Start the cluster, which runs until `down`. Parts that already run are left unchanged."""
    from concertina.local import cluster
    from concertina.local.host import progress_lines
    from concertina.local.node import images
    from concertina.local.state.record import Options

    with _plain_errors():
        mapping = dict(images.parse(option) for option in image or [])
        options = Options(nodes=nodes, gpus=gpus, cpus=cpu, memory=memory, images=mapping, s3=s3)
        with progress_lines.shown() as say:
            running = cluster.up(_name(name), options, say)
        typer.echo(f"cluster {running.name} is up: {len(running.nodes())} nodes")
        typer.echo(f"  export KUBECONFIG={running.kubeconfig}")
        typer.echo(f"  logs: {running.record.logs}")
        if running.s3:
            typer.echo("  S3: " + " ".join(f"{key}={value}" for key, value in running.s3.environment().items()))


@app.command()
def down(name: Name = "") -> None:
    """Stop the cluster and delete everything except the logs."""
    from concertina.local import cluster

    with _plain_errors():
        cluster.down(_name(name))
        typer.echo(f"cluster {_name(name)} is down")


@app.command()
def status(name: Name = "") -> None:
    """Show which parts of the cluster run. Exit status 1: a part does not run.

    \f

    Raises:
        typer.Exit: When a part of the cluster is down.
    """
    with _plain_errors():
        running = _attach(name)
        processes = running.running()
        table = _table("PART", "STATE", "PID")
        for part, process in processes.items():
            table.add_row(part, "running" if process else "down", str(process.pid) if process else "")
        _print(table)
        if not all(processes.values()):
            raise typer.Exit(1)


@app.command()
def kubeconfig(name: Name = "") -> None:
    """Print the path of the cluster's kubeconfig."""
    with _plain_errors():
        typer.echo(_attach(name).kubeconfig)


@app.command()
def logs(name: Name = "") -> None:
    """Print where the logs of the control plane and of the nodes are."""
    from concertina.local.state import record as state

    with _plain_errors():
        typer.echo(state.directory(_name(name)) / "logs")


@node.command("list")
def list_nodes(name: Name = "") -> None:
    """Show the nodes with their processes, and their status in the API server."""
    with _plain_errors():
        running = _attach(name)
        nodes_by_name = {item["metadata"]["name"]: item for item in running.api.call("GET", "/api/v1/nodes")["items"]}
        processes = running.running()
        table = _table("NODE", "PROCESS", "PID", "STATUS", "ADDRESS")
        for node_name in running.nodes():
            process, item = processes[node_name], nodes_by_name.get(node_name, {})
            state = "running" if process else "down"
            table.add_row(node_name, state, str(process.pid) if process else "", _ready(item), _address(item))
        _print(table)


@node.command()
def kill(node_name: NodeName, name: Name = "") -> None:
    """Send SIGKILL to all processes of the node and its pods at the same time, as in a power failure."""
    with _plain_errors():
        _attach(name).kill_node(node_name)


@node.command()
def stop(node_name: NodeName, name: Name = "") -> None:
    """Send SIGSTOP to all processes of the node and its pods, so that the node stops responding."""
    with _plain_errors():
        _attach(name).stop_node(node_name)


@node.command()
def cont(node_name: NodeName, name: Name = "") -> None:
    """Send SIGCONT to all processes of a node after `stop`."""
    with _plain_errors():
        _attach(name).cont_node(node_name)


@node.command()
def start(node_name: NodeName, name: Name = "") -> None:
    """Boot a node that was killed, make it schedulable again, and wait until it is Ready."""
    with _plain_errors():
        running = _attach(name)
        running.start_node(node_name)
        running.wait_nodes([node_name])


@node.command()
def drain(node_name: NodeName, name: Name = "") -> None:
    """Cordon the node and evict its pods with their grace period. `node uncordon` makes it schedulable again."""
    with _plain_errors():
        _attach(name).drain_node(node_name)


@node.command()
def uncordon(node_name: NodeName, name: Name = "") -> None:
    """Let pods be scheduled to the node again."""
    with _plain_errors():
        _attach(name).uncordon_node(node_name)


@node.command()
def taint(
    node_name: NodeName,
    taints: Annotated[list[str], typer.Argument(help="KEY[=VALUE]:EFFECT, or KEY[:EFFECT]- to remove it.")],
    name: Name = "",
) -> None:
    """Add taints to a node, or remove taints."""
    with _plain_errors():
        _attach(name).taint_node(node_name, *taints)


def _ready(item: dict[str, Any]) -> str:
    """Return the text for a node's status, similar to the column STATUS of `kubectl get nodes`."""
    conditions = item.get("status", {}).get("conditions", [])
    status = next((condition["status"] for condition in conditions if condition["type"] == "Ready"), "Unknown")
    word = {"True": "Ready", "False": "NotReady"}.get(status, "NotReady (silent)")
    return word + (", cordoned" if item.get("spec", {}).get("unschedulable") else "")


def _address(item: dict[str, Any]) -> str:
    addresses = item.get("status", {}).get("addresses", [])
    return next((str(address["address"]) for address in addresses if address["type"] == "InternalIP"), "")


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False)


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)

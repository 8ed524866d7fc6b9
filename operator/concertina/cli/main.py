"""The `concertina` command.

Only typer is imported here, so that `--help` is fast. Each command imports what it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from concertina.terminal.cluster_connection import Target, call

app = typer.Typer(
    name="concertina",
    help="Elastic training jobs on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Typer settings for a command that passes all its arguments to another typer app. That app is only imported then."""
JOBS, CLUSTER = "Jobs", "Clusters"

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace. Default: that of the kubeconfig's context.")
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option("--kubeconfig", help="Path of the kubeconfig. Default: KUBECONFIG, the pod's own, ~/.kube/config."),
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
Job = Annotated[str, typer.Argument(help="Name of the TrainingJob.")]


@app.command(rich_help_panel=JOBS)
def run(
    file: Annotated[Path, typer.Argument(help="Manifest of one TrainingJob; - reads standard input.")],
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Apply the manifest, and do not follow the job.")
    ] = False,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Apply a TrainingJob and follow it to its end. Ctrl-C stops following, not the job."""
    from concertina.cli import jobs

    call(jobs.run(Target(kubeconfig, context, namespace), file, detach))


@app.command(rich_help_panel=JOBS)
def plan(
    file: Annotated[Path, typer.Argument(help="Manifest of one TrainingJob; - reads standard input.")],
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=1, help="Number of replicas. Default: spec.replicas.")
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="Type of the GPUs: A100, H100, H200 or B200.")] = "H100",
    fabric: Annotated[
        str,
        typer.Option("--fabric", help="Network between nodes, for each GPU: Ethernet-100|400, InfiniBand-200|400|800."),
    ] = "InfiniBand-400",
    tokens: Annotated[
        float | None, typer.Option("--tokens", help="Tokens of the run. Default: computed from its steps.")
    ] = None,
    search: Annotated[
        int,
        typer.Option(
            "--top-layouts",
            min=0,
            max=50,
            help="Show this number of the fastest layouts instead of the layout of the manifest.",
        ),
    ] = 0,
    memory: Annotated[bool, typer.Option(help="Measure the memory of ranks. This needs torch.")] = True,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            min=0,
            help="Size of the vocabulary, for a model of your own whose data can't be read here (docs/planning.md).",
        ),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field", help="NAME=TYPE of a field, such as features=float16x20, for data that can't be read here."
        ),
    ] = None,
    python: Annotated[
        str,
        typer.Option(
            "--python", help="Command that runs a Python with torch, for example in a container. Default: this Python."
        ),
    ] = "",
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the ranks on their nodes into this SVG file.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="json: print JSON.")] = "",
) -> None:
    """Estimate sizes, memory, traffic, speed and cost of a job before it runs."""
    from concertina.cli.plan import PlanOptions, asked_hardware, run

    async def planned() -> None:
        hardware = asked_hardware(gpu, fabric)
        options = PlanOptions(
            replicas, *hardware, tokens, search, memory, vocab_size, tuple(fields or ()), python, picture,
            output == "json",
        )  # fmt: skip
        run(file, options)

    call(planned())


@app.command(rich_help_panel=JOBS)
def status(
    job: Annotated[str | None, typer.Argument(help="Name of one TrainingJob. Default: a table of all jobs.")] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the jobs of all namespaces.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the job to its end.")] = False,
    members: Annotated[
        bool, typer.Option("--members", help="List the members of the round, as the coordinator reports them.")
    ] = False,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show all jobs, or one job: its state and the reason, its members, its progress and where its time went."""
    from concertina.cli import jobs

    target = Target(kubeconfig, context, namespace)
    if job is None:
        call(jobs.table(target, all_namespaces))
    elif members:
        call(jobs.members(target, job))
    else:
        call(jobs.follow(target, job) if follow else jobs.detail(target, job))


@app.command(rich_help_panel=JOBS)
def top(
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the jobs of all namespaces.")
    ] = False,
    by: Annotated[
        str, typer.Option("--group-by", help="Group by: namespace, queue (Kueue's label), or a label's key.")
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", help="Order of the jobs: attention, goodput, cost or name.")
    ] = "attention",
    once: Annotated[bool, typer.Option("--once", help="Print the table and end.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="json: print the table once, as JSON.")] = "",
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Watch all jobs. Jobs that wait, stall or lose time come first. Ctrl-C ends the command."""
    from concertina.cli import top

    call(top.top(Target(kubeconfig, context, namespace), all_namespaces, by, sort, once, output))


@app.command(rich_help_panel=JOBS)
def dashboard(
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the jobs of all namespaces.")
    ] = False,
    by: Annotated[
        str, typer.Option("--group-by", help="Group by: namespace, queue (Kueue's label), or a label's key.")
    ] = "",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on this machine. 0: any free port.")
    ] = 8470,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Serve read-only web pages about all jobs and each job on this machine. Ctrl-C ends the command."""
    from concertina.cli.dashboard import run

    call(run(Target(kubeconfig, context, namespace), all_namespaces, by, port))


@app.command(rich_help_panel=JOBS)
def logs(
    job: Job,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the logs, including those of replicas that start later.")
    ] = False,
    replica: Annotated[
        int | None, typer.Option("--replica", "-r", help="Show only the replica with this index.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Show only the output of this rank.")] = None,
    round: Annotated[int | None, typer.Option("--round", min=1, help="Show only the lines of this round.")] = None,
    since_failure: Annotated[
        bool, typer.Option("--since-failure", help="Start a few seconds before the last failure.")
    ] = False,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Show only the last lines of each replica.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="json: print one JSON object per line.")] = "",
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Print the logs of all replicas, merged by time. Each line begins with replica and rank."""
    from concertina.cli import logs
    from concertina.terminal.log_entries import LogFilter

    options = logs.LogOptions(replica, LogFilter(rank, round), tail, since_failure, output == "json")
    call(logs.print_logs(Target(kubeconfig, context, namespace), job, options, follow))


@app.command(rich_help_panel=JOBS)
def trace(
    job: Job,
    steps: Annotated[int, typer.Option("--steps", help="Number of steps.")] = 3,
    ranks: Annotated[str, typer.Option("--ranks", help="Ranks to record, for example 0,3.")] = "0",
    out: Annotated[
        str, typer.Option("--out", help="File to write, compressed if its name ends in .gz. Default: JOB-trace.json.")
    ] = "",
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Trace some steps with torch.profiler and the flight recorder, into one file for ui.perfetto.dev."""
    from concertina.cli.trace import trace

    call(trace(Target(kubeconfig, context, namespace), job, steps, ranks, out))


@app.command(rich_help_panel=JOBS)
def diagnose(
    what: Annotated[
        str,
        typer.Argument(
            help="Name of a TrainingJob, or a file with a TrainingJob and its status (.yaml, .json, or - for "
            "standard input)."
        ),
    ],
    seconds: Annotated[float, typer.Option("--seconds", min=5, max=3600, help="Seconds to observe the job.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, including all evidence.")] = False,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Name the problems of a job and what to try next. Exit status: 0 without problems, 3 with problems."""
    from concertina.cli.diagnose import run

    call(run(Target(kubeconfig, context, namespace), what, seconds, as_json))


@app.command(rich_help_panel=JOBS)
def report(
    job: Job,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write. Default: JOB.html in the current folder.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=5, max=3600, help="Seconds to observe the job.")] = 15,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Write an HTML page about a run: time, members, loss, incidents, checkpoints, and the findings of `diagnose`."""
    from concertina.cli.report import run

    call(run(Target(kubeconfig, context, namespace), job, out, seconds))


@app.command(rich_help_panel=JOBS)
def suspend(job: Job, namespace: Namespace = None, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """Stop a job after the current step, save its state and release its pods."""
    from concertina.cli import jobs

    call(jobs.set_suspend(Target(kubeconfig, context, namespace), job, True))


@app.command(rich_help_panel=JOBS)
def resume(job: Job, namespace: Namespace = None, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """Resume a suspended job from where it stopped."""
    from concertina.cli import jobs

    call(jobs.set_suspend(Target(kubeconfig, context, namespace), job, False))


@app.command(rich_help_panel=JOBS)
def scale(
    job: Job,
    replicas: Annotated[int, typer.Argument(min=1, help="Number of replicas, which becomes spec.replicas.")],
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Set the number of replicas of a job. No step is lost."""
    from concertina.cli import jobs

    call(jobs.scale(Target(kubeconfig, context, namespace), job, replicas))


@app.command(rich_help_panel=JOBS)
def drill(
    job: Job,
    scenario: Annotated[str, typer.Option("--scenario", "-s", help="Fault to inject: see docs/drills.md.")],
    yes: Annotated[bool, typer.Option("--yes", help="Allow the drill on a cluster that is not a local one.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="json: print the verdict as JSON.")] = "",
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Inject a known fault into a running job, revert it, and print a verdict. Exit status 0: the job passed."""
    from concertina.drill.main import drill

    call(drill(Target(kubeconfig, context, namespace), job, scenario, yes, output == "json"))


@app.command(rich_help_panel=JOBS, add_help_option=False, context_settings=FORWARD)
def data(context: typer.Context) -> None:
    """Build, show and verify training data: see `concertina data --help`."""
    from concertina.cli.data import data

    call(data(context.args))


@app.command(rich_help_panel=JOBS, add_help_option=False, context_settings=FORWARD)
def checkpoint(context: typer.Context) -> None:
    """List, show, verify, export, copy and prune checkpoints: see `concertina checkpoint --help`."""
    from concertina.cli.checkpoint import app

    app(args=context.args, prog_name="concertina checkpoint")


@app.command(rich_help_panel=JOBS)
def reproduce(
    uri: Annotated[str, typer.Argument(help="Folder of a run's checkpoints, or of one checkpoint.")],
    step: Annotated[int, typer.Option("--step", help="Step of the checkpoint to reproduce.", min=1)],
    name: Annotated[str, typer.Option("--name", help="Name of the new job. Default: <job>-reproduce-<step>.")] = "",
    checkpoint_uri: Annotated[
        str,
        typer.Option(
            "--checkpoint-uri", help="Folder for the checkpoints of the new job. Default: <uri>-reproduce-<step>."
        ),
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            help="Value of an environment variable, as NAME=VALUE. Checkpoints do not contain the values of variables.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: standard output.")
    ] = None,
) -> None:
    """Write the manifest of a job that trains a checkpoint again, and say how closely the result agrees."""
    from concertina.cli.checkpoint import sentences

    with sentences():
        from concertina.cli import reproduce as command
        from concertina.reproduction import ReproductionOptions

        options = ReproductionOptions(name, checkpoint_uri, command.variables(env or ()))
        reproduction = command.reproduced(uri, step, options)
    if output is None:
        typer.echo(command.text(reproduction), nl=False)
        return
    output.write_text(command.text(reproduction))
    for line in command.words(reproduction):
        typer.echo(line)
    typer.echo(f"The manifest is in {output}. To run it: `concertina run {output}`")


@app.command(rich_help_panel=JOBS)
def generate(
    uri: Annotated[str, typer.Argument(help="Folder of a run's checkpoints, or of one checkpoint.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text that the model continues.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message of a user, and the model answers it.")
    ] = False,
    step: Annotated[int | None, typer.Option("--step", help="Step of the checkpoint. Default: the newest.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Maximum number of tokens to generate.")] = 256,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0.0, help="Temperature of sampling. 0: use the most probable token."),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=1e-6,
            max=1.0,
            help="With a temperature: sample from the fewest tokens whose probabilities add up to this value.",
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampling.")] = 0,
    device: Annotated[str, typer.Option("--device", help="Device, such as cpu. Default: a GPU if there is one.")] = "",
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Folder of the data with the tokenizer. Default: as in the run.",
        ),
    ] = "",
) -> None:
    """Print what the model of a checkpoint writes after a prompt. This needs torch."""
    from concertina.cli.checkpoint import sentences
    from concertina.cli.extras import Extra

    with sentences(Extra.DATA_AND_TORCH):
        from concertina_state.checkpoints.catalogue import at_step
        from concertina_state.checkpoints.reader import opened
        from concertina_trainer.generation.generate import Continuation, Sampling

        with opened(at_step(uri, step).uri) as checkpoint:
            model = Continuation(checkpoint, data, device)
        typer.echo(model.text(prompt, chat, Sampling(tokens, temperature, top_p, seed)))


@app.command(rich_help_panel=CLUSTER)
def version() -> None:
    """Print the version."""
    from importlib.metadata import version

    typer.echo(version("concertina-cli"))


@app.command(rich_help_panel=CLUSTER, add_help_option=False, context_settings=FORWARD)
def local(context: typer.Context) -> None:
    """Start and stop a Kubernetes cluster on this machine, and make its nodes fail: see `concertina local --help`."""
    from concertina.cli.local import app

    app(args=context.args, prog_name="concertina local")


@app.command(rich_help_panel=CLUSTER, add_help_option=False, context_settings=FORWARD)
def demo(context: typer.Context) -> None:
    """Show a job that loses a node, continues, scales back up and completes, in a local cluster of its own."""
    from concertina.demo.main import app

    app(args=context.args, prog_name="concertina demo")

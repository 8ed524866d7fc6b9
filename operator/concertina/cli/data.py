"""`concertina data`: run the data command of the trainer package.

With `--cluster`, `concertina data build` runs as an Indexed Job in a cluster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from concertina.cli.extras import Extra, ExtraMissing, needing
from concertina.terminal.cluster_connection import Target, UserError
from concertina_trainer.cli import main


async def data(arguments: Sequence[str]) -> int:
    """Run `concertina data` and return its exit status.

    Raises:
        UserError: When the extra `data` is not installed.
    """
    if list(arguments[:1]) == ["build"] and "--cluster" in arguments:
        return await _on_cluster(arguments[1:])
    try:
        with needing(Extra.DATA):
            return main(["data", *arguments], prog="concertina")
    except ExtraMissing as error:
        raise UserError(str(error)) from error


async def _on_cluster(arguments: Sequence[str]) -> int:
    """Run `concertina data build --cluster` and return its exit status.

    Raises:
        UserError: When an option is not valid, or when the Job fails.
    """
    from concertina.cli import data_job

    options, build_arguments = parser().parse_known_args(arguments)
    if options.pods < 1:
        raise UserError("--pods must be 1 or more")
    job_options = data_job.DataJobOptions(
        tuple(build_arguments),
        options.pods,
        options.image,
        options.secret,
        tuple(options.claim),
        options.cpus,
        options.memory,
    )
    if options.dry_run:
        print(data_job.text(job_options))
        return 0
    return await data_job.run(Target(options.kubeconfig, options.context, options.namespace), job_options)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options of `concertina data build --cluster`."""
    from concertina.cli import data_job

    parser = argparse.ArgumentParser(
        prog="concertina data build --cluster",
        description="All other options are those of `concertina data build`. They apply in the pods: sources and "
        "--out are URIs, or paths where --claim mounts a volume.",
    )
    add = parser.add_argument
    add("--cluster", action="store_true", help="build in pods of a Kubernetes Job")
    add("--pods", type=int, default=4, help="number of pods that share the work (default: %(default)s)")
    add("--image", default=data_job.default_image(), help="default: %(default)s")
    add("--secret", default="", help="Secret with the storage's credentials, as for the checkpoints of a TrainingJob")
    add(
        "--claim", action="append", default=[], metavar="NAME=PATH", help="mount the PersistentVolumeClaim NAME at PATH"
    )
    add("--cpus", type=int, default=2, help="CPUs and processes of each pod (default: %(default)s)")
    add("--memory", default="4Gi", help="of each pod (default: %(default)s)")
    add("--dry-run", action="store_true", help="only print the manifest of the Job")
    add("--namespace", "-n", default=None)
    add("--kubeconfig", type=Path, default=None)
    add("--context", default=None)
    return parser

"""Reference of the command line, by Typer's own generator of documentation."""

from __future__ import annotations

import typer
import typer.main
from tools.reference import markdown
from typer.cli import get_docs_for_click

from concertina.cli.local import app as local
from concertina.cli.main import app

INTRODUCTION = """
All commands of `concertina` with their arguments and options, as `--help` shows them. Commands that talk to a cluster
take kubectl's `-n`, `--kubeconfig` and `--context`.
"""


def page() -> str:
    """Return the page; `concertina local` is an application of its own."""
    return markdown.page("Command line", INTRODUCTION, _section(app, "concertina"), _section(local, "concertina local"))


def _section(application: typer.Typer, name: str) -> str:
    command = typer.main.get_command(application)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=name)
    # Usage is no command to run, and a page has one first heading.
    return text.replace("```console", "```text").replace("# `concertina", "## `concertina").strip()

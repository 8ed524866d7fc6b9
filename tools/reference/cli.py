"""Reference page of the command line, generated with Typer's documentation generator."""

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
    """Return the text of the page. `concertina local` is a separate application."""
    return markdown.page("Command line", INTRODUCTION, _section(app, "concertina"), _section(local, "concertina local"))


def _section(application: typer.Typer, name: str) -> str:
    command = typer.main.get_command(application)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=name)
    # The usage line is not a command to run, and a page may have only one top-level heading.
    return text.replace("```console", "```text").replace("# `concertina", "## `concertina").strip()

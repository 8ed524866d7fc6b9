"""Reference of the command line, by Typer's own generator of documentation."""

from __future__ import annotations

import click
import typer.main
from tools.reference import markdown
from typer.cli import get_docs_for_click

from concertina.cli.main import app

INTRODUCTION = """
All commands of `concertina` with their arguments and options, as `--help` shows them. Commands that talk to a cluster
take kubectl's `-n`, `--kubeconfig` and `--context`.
"""


def page() -> str:
    """Return the page."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=click.Context(command), name="concertina")
    # `console` blocks of usage are no commands to run, and a page has one first heading.
    body = text.replace("```console", "```text").replace("# `concertina", "## `concertina")
    return markdown.page("Command line", INTRODUCTION, body.strip())

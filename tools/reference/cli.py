"""Reference page of the command line, generated with Typer's documentation generator."""

from __future__ import annotations

import argparse
import re

import typer
import typer.main
from tools.reference import markdown
from typer.cli import get_docs_for_click

from concertina.cli import data
from concertina.cli.checkpoint import app as checkpoint
from concertina.cli.local import app as local
from concertina.cli.main import app
from concertina_trainer import cli as trainer_cli

INTRODUCTION = """
All commands of `concertina` with their arguments and options, as `--help` shows them. Commands that talk to a cluster
take kubectl's `-n`, `--kubeconfig` and `--context`.
"""


GROUPS = {"concertina checkpoint": checkpoint, "concertina local": local}
"""Groups of commands that `concertina` imports only when they run."""


def page() -> str:
    """Return the text of the page."""
    groups = (_section(application, name) for name, application in GROUPS.items())
    return markdown.page("Command line", INTRODUCTION, _section(app, "concertina"), *groups, _data())


def _data() -> str:
    """Return the section of `concertina data`, whose parser is argparse's."""
    texts = (_command(f"concertina data {name}", parser) for name, parser in sorted(data_commands().items()))
    return "\n\n".join(["## `concertina data`", *texts])


def data_commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of `concertina data` by the name of the command."""
    return _subparsers(_subparsers(trainer_cli.parser("concertina"))["data"]) | {"build --cluster": data.parser()}


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [action] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(action.choices)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    lines = [f"### `{name}`", "", *([markdown.paragraph(parser.description), ""] if parser.description else [])]
    for action in parser._actions:
        if action.dest == "help":
            continue
        value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
        names = ", ".join(action.option_strings)
        signature = f"{names} {value}".strip() if names else action.dest
        required = " [required]" if action.required else ""
        help_text = parser._get_formatter()._expand_help(action) if action.help else ""
        help_text = help_text.replace("*", r"\*")
        lines.append(
            _wrapped(f"* `{signature}`: {help_text}{required}" if help_text or required else f"* `{signature}`")
        )
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    return "* " + markdown.paragraph(line[2:], "  ").lstrip()


def _section(application: typer.Typer, name: str) -> str:
    command = typer.main.get_command(application)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=name)
    # Help ends at a form feed. What follows it, such as the section Raises, is for developers.
    text = re.sub(r"\f.*?(?=\*\*Usage)", "", text, flags=re.DOTALL)
    text = re.sub(r"^\* .{158,}$", lambda line: _wrapped(line[0]), text, flags=re.MULTILINE)
    # The usage line is not a command to run, and a page may have only one top-level heading.
    return text.replace("```console", "```text").replace("# `concertina", "## `concertina").strip()

"""Check the text that users read: CRD descriptions, help texts, events, errors, and documentation pages.

`make lint` runs this script. It collects the texts and runs Vale with the style in tools/vale/styles. Without Vale
nothing is checked. `make vale` installs Vale. Only errors fail the check. `--warnings` lists warnings too.
"""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from concertina.api import crd
from concertina.cli.main import app
from concertina.local.binaries import programs

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("operator", "trainer_image")
FOREIGN_SCHEMAS = ("template",)
"""CRD fields whose descriptions come from Kubernetes."""
SCREENS = ("operator/concertina/terminal/show.py", "operator/concertina/terminal/advice.py")
"""Modules whose strings are lines of the screen, also where they are returned or yielded."""
MESSAGE_NAMES = frozenset({"advice", "message", "sentence", "stalled_message"})
"""Names of variables, parameters and functions that contain a message of an event or a condition."""
ERROR_ENDINGS = ("Changed", "Error", "Failed", "Input", "NoAccess", "Unavailable")
"""Endings of the names of exceptions whose messages users read."""
PLACEHOLDER = "`x`"
"""Text that replaces each interpolated part of a message. Vale does not check code in backticks."""
NOT_CHECKED_PAGES = ("reference",)
"""Folders of docs that are not checked: generated pages repeat checked texts."""
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
SHORTEST_TEXT = 3
"""Minimum number of words. Shorter strings are names and fragments."""


class Text(NamedTuple):
    """Text with a name that does not change when the text changes."""

    name: str
    content: str


def crd_texts(schema: Mapping[str, Any], path: str = "") -> Iterator[Text]:
    """Yield the descriptions and the validation messages in an OpenAPI schema."""
    for kind, content in (("description", schema.get("description", "")), *_rule_messages(schema)):
        yield Text(f"{path.lstrip('.') or 'TrainingJob'} {kind}", content)
    for name, field in schema.get("properties", {}).items():
        if name not in FOREIGN_SCHEMAS:
            yield from crd_texts(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            yield from crd_texts(schema[key], f"{path}[]")


def _rule_messages(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for number, rule in enumerate(schema.get("x-kubernetes-validations", ()), start=1):
        yield f"rule {number}", rule.get("message", "")


def help_texts(command: Any, path: str) -> Iterator[Text]:
    """Yield the help texts of a command, its parameters and its subcommands."""
    yield Text(path, command.help or "")
    for parameter in command.params:
        yield Text(f"{path} {parameter.opts[0]}", getattr(parameter, "help", None) or "")
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from help_texts(subcommand, f"{path} {name}")


class MessageCollector(ast.NodeVisitor):
    """Collector of the string literals in a module that become events, conditions or errors."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.texts: list[Text] = []
        self._scopes: list[str] = []
        self._is_screen = module in SCREENS

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        called = _last_name(node.func)
        if called == "Event" or called.endswith(ERROR_ENDINGS):
            self._add(node.args)
        self._add(keyword.value for keyword in node.keywords if keyword.arg in MESSAGE_NAMES)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(_holds_message(_last_name(target)) for target in node.targets):
            self._add([node.value])
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and self._scopes and (self._is_screen or _holds_message(self._scopes[-1])):
            self._add([node.value])
        self.generic_visit(node)

    def visit_Yield(self, node: ast.Yield) -> None:
        if self._is_screen and node.value is not None:
            self._add(node.value.elts if isinstance(node.value, ast.Tuple) else [node.value])
        self.generic_visit(node)

    def _add(self, nodes: Iterable[ast.expr]) -> None:
        name = " ".join([self.module, ".".join(self._scopes)]).strip()
        self.texts += [Text(name, content) for node in nodes for content in contents(node)]


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _holds_message(name: str) -> bool:
    return name.strip("_").lower() in MESSAGE_NAMES


def contents(node: ast.expr) -> list[str]:
    """Return the possible texts of an expression. A placeholder replaces each part that is not a literal."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER for part in values)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(pair) for pair in itertools.product(contents(left), contents(right))]
        case ast.IfExp(body=body, orelse=orelse):
            return contents(body) + contents(orelse)
    return [PLACEHOLDER]


def message_texts(root: Path) -> Iterator[Text]:
    """Yield the messages of events, conditions and errors in the source files."""
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            collector = MessageCollector(str(path.relative_to(root)))
            collector.visit(ast.parse(path.read_text()))
            yield from collector.texts


def all_texts(root: Path) -> Iterator[Text]:
    """Yield every text to check, without duplicates."""
    definition = crd.crd()["spec"]["versions"][0]
    columns = definition["additionalPrinterColumns"]
    texts = itertools.chain(
        crd_texts(definition["schema"]["openAPIV3Schema"]),
        (Text(f"column {column['name']}", column["description"]) for column in columns),
        help_texts(typer.main.get_command(app), "concertina"),
        message_texts(root),
    )
    return (
        text for text in dict.fromkeys(texts) if len(text.content.replace(PLACEHOLDER, "").split()) >= SHORTEST_TEXT
    )


class Finding(NamedTuple):
    severity: str
    rule: str
    message: str
    text: Text

    def __str__(self) -> str:
        return f"{self.text.name}: {self.message} [{self.rule}]\n    {self.text.content}"


def check(vale: Path, texts: Iterable[Text], configuration: Path = ROOT / ".vale.ini") -> list[Finding]:
    """Check texts with Vale, and return the findings. Each text is a paragraph in one temporary file.

    Raises:
        RuntimeError: When Vale could not run. The message says why.
    """
    text_by_line: dict[int, Text] = {}
    lines: list[str] = []
    for text in texts:
        lines += [" ".join(text.content.split()), ""]
        text_by_line[len(lines) - 1] = text
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.md"
        path.write_text("\n".join(lines))
        return [
            Finding(alert["Severity"], alert["Check"], alert["Message"], text_by_line[alert["Line"]])
            for _, alert in _alerts(vale, [path], configuration)
        ]


def check_pages(vale: Path, root: Path, configuration: Path = ROOT / ".vale.ini") -> list[Finding]:
    """Check the hand-written documentation pages with Vale, and return the findings.

    Vale takes text after a link or code for a new sentence. Findings about sentences that begin in lower case are
    therefore ignored.

    Raises:
        RuntimeError: When Vale could not run. The message says why.
    """
    docs = root / "docs"
    pages = [page for page in sorted(docs.rglob("*.md")) if page.relative_to(docs).parts[0] not in NOT_CHECKED_PAGES]
    pages += [root / name for name in ROOT_PAGES if (root / name).exists()]
    found = []
    for page, alert in _alerts(vale, pages, configuration):
        if alert["Check"].endswith("SubjectFirst") and alert["Match"][:1].islower():
            continue
        line = Path(page).read_text().splitlines()[alert["Line"] - 1]
        text = Text(f"{Path(page).relative_to(root)}:{alert['Line']}", line.strip())
        found.append(Finding(alert["Severity"], alert["Check"], alert["Message"], text))
    return found


def _alerts(vale: Path, paths: Iterable[Path], configuration: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield Vale's alerts about files, each with the path of its file.

    Raises:
        RuntimeError: When Vale could not run. The message says why.
    """
    command = [str(vale), f"--config={configuration}", "--no-global", "--no-exit", "--output=JSON", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Vale failed: {done.stdout}{done.stderr}")
    for path, alerts in json.loads(done.stdout).items():
        for alert in alerts:
            yield path, alert


def main(arguments: list[str]) -> int:
    """Check all texts, and return the exit status."""
    vale = programs.ready(programs.VALE).get("vale")
    if vale is None:
        print("prose: Vale was skipped, since it is not here: `make vale` provides it, once")
        return 0
    findings = check(vale, all_texts(ROOT)) + check_pages(vale, ROOT)
    errors = [finding for finding in findings if finding.severity == "error"]
    warnings = [finding for finding in findings if finding.severity != "error"]
    for finding in warnings if "--warnings" in arguments else ():
        print(f"warning: {finding}")
    for finding in errors:
        print(f"error: {finding}", file=sys.stderr)
    if warnings and "--warnings" not in arguments:
        print(f"prose: {len(warnings)} warnings: .venv/bin/python tools/prose.py --warnings lists them")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Reference page of conditions, reasons and events, generated from the calls in the code that create them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tools.reference import markdown, sources

from concertina.api.status import ConditionType
from concertina.plan.facts.decision import Phase, Reason
from concertina.plan.status.conditions import TABLE
from concertina_protocol.messages.reports import FailureReason

INTRODUCTION = """
All conditions, reasons and events of a TrainingJob, from the code that writes them. A message shows `…` for a part that
depends on the job. [When things fail](../failures.md) explains what to do about them.
"""
ENUMS: Mapping[str, Mapping[str, str]] = {
    enum.__name__: {member.name: str(member.value) for member in enum}
    for enum in (Reason, FailureReason, Phase, ConditionType)
}
FOLDERS = ("operator/concertina/plan", "operator/concertina/controller")
PLACEHOLDER = "…"


class Arguments(NamedTuple):
    """Positions of the arguments in a call that contains a reason."""

    reason: int
    message: int
    use: str


CALLS = {
    "Event": Arguments(1, 2, "event"),
    "SentenceEvent": Arguments(1, 2, "event"),
    "stalled": Arguments(0, 1, "the job stalls"),
    "Decision": Arguments(1, 2, "condition"),
    "Failure": Arguments(0, 1, "failure"),
    "RoundTrigger": Arguments(0, 1, "new round"),
}


@dataclass(frozen=True)
class Use:
    """Use of a reason at one place in the code."""

    reason: str
    use: str
    message: str


def page() -> str:
    """Return the text of the page."""
    uses_by_reason: dict[str, list[Use]] = {}
    for use in sorted(set(uses()), key=lambda use: (use.reason, use.use, use.message)):
        uses_by_reason.setdefault(use.reason, []).append(use)
    for reason in (*ENUMS["Reason"].values(), *ENUMS["FailureReason"].values()):
        uses_by_reason.setdefault(reason, [])
    rows = ((markdown.code(reason), _text(uses_by_reason[reason])) for reason in sorted(uses_by_reason))
    return markdown.page(
        "Conditions, reasons and events",
        INTRODUCTION,
        f"## Conditions\n\n{markdown.entries(_conditions())}",
        "## Phases\n\nThe reason of the condition `Ready` is the phase. `kubectl get tj` shows it as STATUS.",
        _phases(),
        "## Reasons and events",
        markdown.paragraph(
            "An event of type Warning or Normal has the reason in its column REASON. A failure's reason is in "
            "`status.restarts.recent` and `status.lastFailure`, and the reason of a new round is that of the condition "
            "`Running`. Agents report a failure without a message below in their own words."
        ),
        markdown.entries(rows),
    )


def _conditions() -> Iterator[tuple[str, str]]:
    texts = _member_texts(ConditionType)
    for condition in ConditionType:
        field = condition.value.lower()
        phases = [f"`{phase.value}`" for phase, row in TABLE.items() if getattr(row, field, False)]
        text = texts.get(condition.name, "")
        yield f"`{condition.value}`", markdown.safe(text) or (f"True in {', '.join(phases)}." if phases else "")


def _phases() -> str:
    texts = _member_texts(Phase)
    return markdown.entries((f"`{phase.value}`", markdown.safe(texts.get(phase.name, ""))) for phase in Phase)


def _member_texts(enum: type) -> dict[str, str]:
    """Return the docstrings of the members of an enum, by member name."""
    body = ast.parse(inspect.getsource(enum)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for member, text in zip(body.body, body.body[1:], strict=False):
        match member, text:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(content))):
                texts[name] = content
    return texts


def _text(used: Iterable[Use]) -> str:
    parts = [f"{use.use}: {use.message}" if use.message else use.use for use in used]
    return markdown.safe("; ".join(dict.fromkeys(parts)))


def uses() -> Iterator[Use]:
    """Yield each use of a reason that the code contains by name."""
    for path, tree in sources.modules().items():
        if path.startswith(FOLDERS):
            names = _strings(tree)
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef):
                    texts = _texts(function)
                    for node in ast.walk(function):
                        if isinstance(node, ast.Call) and (call := CALLS.get(_name(node.func))):
                            yield from _uses(node, call, names, texts)


def _texts(function: ast.FunctionDef) -> dict[str, str]:
    """Return the texts of the variables in a function, for variables that are assigned only once."""
    texts_by_name: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts_by_name.setdefault(node.targets[0].id, []).append(_message(node.value, {}))
    return {name: texts[0] for name, texts in texts_by_name.items() if len(texts) == 1}


def _uses(node: ast.Call, call: Arguments, names: Mapping[str, str], texts: Mapping[str, str]) -> Iterator[Use]:
    if len(node.args) <= call.reason:
        return
    message = _message(node.args[call.message], texts) if len(node.args) > call.message else ""
    use = call.use
    if use == "event" and isinstance(node.args[0], ast.Constant):
        use = f"{node.args[0].value} event"
    for reason in _reasons(node.args[call.reason], names):
        yield Use(reason, use, message)


def _strings(tree: ast.Module) -> dict[str, str]:
    """Return the string constants of a module, by name."""
    strings: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                strings[name] = text
    return strings


def _reasons(node: ast.expr, names: Mapping[str, str]) -> list[str]:
    match node:
        case ast.Constant(value=str(text)) if text:
            return [text]
        case ast.Name(id=name) if name in names:
            return [names[name]]
        case ast.Attribute(value=ast.Name(id=enum) | ast.Attribute(attr=enum), attr=member) if enum in ENUMS:
            return [ENUMS[enum][member]]
        case ast.IfExp(body=body, orelse=orelse):
            return _reasons(body, names) + _reasons(orelse, names)
        case ast.BoolOp(values=values):
            return [reason for value in values for reason in _reasons(value, names)]
    return []


def _message(node: ast.expr, texts: Mapping[str, str]) -> str:
    """Return the text of a message. Return an empty string if the expression does not contain the text."""
    match node:
        case ast.Name(id=name):
            return texts.get(name, "")
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = [str(value.value) if isinstance(value, ast.Constant) else PLACEHOLDER for value in values]
            text = "".join(parts)
            return text if any(character.isalpha() for character in text) else ""
    return ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""

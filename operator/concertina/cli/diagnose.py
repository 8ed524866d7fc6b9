"""`concertina diagnose`: what is wrong with a run, in words, and the next thing to try."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from concertina.api.status import rfc3339
from concertina.cli.collect_evidence import EvidenceRecord, look, read
from concertina.diagnosis.diagnose import Diagnosis, cost, diagnose
from concertina.diagnosis.evidence import JobEvidence
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.console import plain
from concertina.terminal.show import said

FOUND = 3
"""Exit status: something is wrong. (1: it could not be looked at, 2: a command line that was not understood.)"""


async def run(target: Target, what: str, seconds: float, as_json: bool) -> int:
    """`what`: a job's name, or a file: what has a slash or a file's ending, or is -."""
    if _is_file(what):
        record = read(Path(what))
    else:
        async with target.connect() as (client, namespace):
            record = await look(client, namespace, what, seconds)
    seen, found = judge(record)
    if as_json:
        print(json.dumps(as_object(record, found), indent=1))
    else:
        _print(plain(), record, seen, found)
    return FOUND if found.findings else 0


def judge(record: EvidenceRecord) -> tuple[JobEvidence, Diagnosis]:
    """Raises UserError: whoever may write a status, or a file, may write anything for a time."""
    try:
        rfc3339(record.at)
        seen = record.evidence()
        return seen, diagnose(seen)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{record.name} has a time that can't be read: {error}") from error


def _is_file(what: str) -> bool:
    return what == "-" or "/" in what or Path(what).suffix in (".yaml", ".yml", ".json")


def as_object(record: EvidenceRecord, found: Diagnosis) -> dict[str, Any]:
    """With the record itself, so that it can be diagnosed again elsewhere."""
    return {
        "job": record.name,
        "at": rfc3339(record.at),
        "healthy": not found.findings,
        "findings": [{**dataclasses.asdict(one), "runbook": one.runbook} for one in found.findings],
        "saw": [*found.saw, *record.unseen],
        "record": record.manifest(),
    }


def _print(console: Console, record: EvidenceRecord, seen: JobEvidence, found: Diagnosis) -> None:
    console.print(f"{record.name}  {said(seen.status)}")
    price = seen.spec.price if seen.spec else None
    for number, finding in enumerate(found.findings, 1):
        costs = cost(finding, seen.hourly, price.currency if price else "")
        console.print(f"\n{number}. {finding.problem} ({finding.severity}): {finding.sentence}")
        console.print(f"   {costs[0].upper()}{costs[1:]}." if costs else "   It costs no time yet.")
        console.print(f"   Next: {finding.advice}")
        console.print(f"   More: {finding.runbook}")
    if not found.findings:
        console.print("\nHealthy: nothing was found that is wrong.")
    console.print(f"\nSeen at {rfc3339(round(record.at))}:")
    for sentence in (*found.saw, *record.unseen):
        console.print(f"  {sentence}")

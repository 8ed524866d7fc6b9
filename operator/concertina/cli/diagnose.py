"""`concertina diagnose`: name the problems of a job, and what to try next."""

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
"""Exit status of `concertina diagnose` if a problem was found.

With status 1, the job could not be read. With status 2, the command line is invalid.
"""


async def run(target: Target, source: str, seconds: float, as_json: bool) -> int:
    """Print the diagnosis of a job, and return the exit status.

    Args:
        target: Cluster and namespace of the job.
        source: Name of a job, or a file: `-`, a path with a slash, or a name with the suffix of a YAML or JSON file.
        seconds: Seconds between the two readings of the job.
        as_json: Whether to print JSON.
    """
    if _is_file(source):
        record = read(Path(source))
    else:
        async with target.connect() as (client, namespace):
            record = await look(client, namespace, source, seconds)
    evidence, diagnosis = judge(record)
    if as_json:
        print(json.dumps(as_object(record, diagnosis), indent=1))
    else:
        _print(plain(), record, evidence, diagnosis)
    return FOUND if diagnosis.findings else 0


def judge(record: EvidenceRecord) -> tuple[JobEvidence, Diagnosis]:
    """Return the evidence from a record, and the diagnosis.

    Raises:
        UserError: When the record contains an invalid time. Statuses and files can contain any text as a time.
    """
    try:
        rfc3339(record.at)
        evidence = record.evidence()
        return evidence, diagnose(evidence)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{record.name} has a time that can't be read: {error}") from error


def _is_file(source: str) -> bool:
    return source == "-" or "/" in source or Path(source).suffix in (".yaml", ".yml", ".json")


def as_object(record: EvidenceRecord, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as a JSON object.

    The object contains the record too, so that the job can be diagnosed again elsewhere.
    """
    return {
        "job": record.name,
        "at": rfc3339(record.at),
        "healthy": not diagnosis.findings,
        "findings": [{**dataclasses.asdict(finding), "runbook": finding.runbook} for finding in diagnosis.findings],
        "saw": [*diagnosis.saw, *record.unseen],
        "record": record.manifest(),
    }


def _print(console: Console, record: EvidenceRecord, evidence: JobEvidence, diagnosis: Diagnosis) -> None:
    console.print(f"{record.name}  {said(evidence.status)}")
    price = evidence.spec.price if evidence.spec else None
    for number, finding in enumerate(diagnosis.findings, 1):
        costs = cost(finding, evidence.hourly, price.currency if price else "")
        console.print(f"\n{number}. {finding.problem} ({finding.severity}): {finding.sentence}")
        console.print(f"   {costs[0].upper()}{costs[1:]}." if costs else "   It costs no time yet.")
        console.print(f"   Next: {finding.advice}")
        console.print(f"   More: {finding.runbook}")
    if not diagnosis.findings:
        console.print("\nHealthy: no problems were found.")
    console.print(f"\nSeen at {rfc3339(round(record.at))}:")
    for sentence in (*diagnosis.saw, *record.unseen):
        console.print(f"  {sentence}")

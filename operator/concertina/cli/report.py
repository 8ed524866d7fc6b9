"""`concertina report`: write an HTML page about a run. A browser can show the page without a network."""

from __future__ import annotations

from pathlib import Path

from concertina.cli.collect_evidence import look
from concertina.cli.diagnose import judge
from concertina.report.page import page
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.console import plain
from concertina.terminal.follow import events_of


async def run(target: Target, name: str, out: Path | None, seconds: float) -> int:
    async with target.connect() as (client, namespace):
        record = await look(client, namespace, name, seconds)
        events = await events_of(client, record.job)
    evidence, diagnosis = judge(record)
    file = out or Path(f"{name}.html")
    try:
        file.write_text(page(record.name, evidence, diagnosis, record.unseen, events), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} can't be written: {error.strerror}") from error
    plain().print(f"{file} shows {record.name} as of {record.status.goodput.at or 'its creation'}.")
    return 0

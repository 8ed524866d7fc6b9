"""`concertina top`: a table of all jobs, which is updated continuously.

Jobs are listed once and then watched, so a thousand jobs cause little load on the API server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass

from rich.live import Live

from concertina.kube.client import Client
from concertina.kube.reflector import Reflector
from concertina.kube.resources import TRAINING_JOBS
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.console import plain
from concertina.terminal.job_table import JobRow, RowOrder, as_json, ordered, row, screen

REFRESH_SECONDS = 1.0
console = plain()


@dataclass(frozen=True)
class TopView:
    """Options of the table: which jobs to show, how to group them, and in which order."""

    all_namespaces: bool
    by: str
    order: RowOrder


async def top(target: Target, all_namespaces: bool, by: str, sort: str, once: bool, output: str) -> None:
    if sort not in list(RowOrder):
        raise UserError(f"--sort must be one of {', '.join(RowOrder)}, not {sort!r:.80}")
    if output not in ("", "json"):
        raise UserError(f"-o must be json, not {output!r:.80}")
    view = TopView(all_namespaces, by, RowOrder(sort))
    async with target.connect() as (client, namespace):
        selected_namespace = None if view.all_namespaces else namespace
        rows: list[JobRow] = []
        async for page, _ in client.pages(TRAINING_JOBS, selected_namespace):
            rows += map(row, page)
        rows = ordered(rows, view.order, view.by)
        if output:
            sys.stdout.write(json.dumps([as_json(job_row, view.by) for job_row in rows], indent=2) + "\n")
        elif once or not console.is_terminal:
            console.print(screen(rows, time.time(), view.all_namespaces, view.by))
        else:
            await _follow(client, selected_namespace, view)


async def _follow(client: Client, namespace: str | None, view: TopView) -> None:
    """Show the table and update it until Ctrl-C."""
    jobs = Reflector(client, TRAINING_JOBS, row, lambda old, new: None, namespace)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(jobs.run())
        await jobs.synced.wait()
        with Live(console=console, auto_refresh=False, screen=True) as display:
            while True:
                rows = ordered(jobs.values(), view.order, view.by)
                height = console.size.height
                shown = screen(rows, time.time(), view.all_namespaces, view.by, height, jobs.trouble)
                display.update(shown, refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)

"""`concertina top`: all jobs, listed once and watched from then on, so that a thousand cost the API server little."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass

from rich.live import Live

from concertina.kube.client import Client
from concertina.kube.resources import TRAINING_JOBS
from concertina.kube.watch.reflector import Reflector
from concertina.terminal.connection import Complaint, Target
from concertina.terminal.console import plain
from concertina.terminal.top import Order, Row, as_json, ordered, row, screen

REFRESH_SECONDS = 1.0
console = plain()


@dataclass(frozen=True)
class View:
    """What is shown, and how."""

    all_namespaces: bool
    by: str
    order: Order


async def top(target: Target, all_namespaces: bool, by: str, sort: str, once: bool, output: str) -> None:
    if sort not in list(Order):
        raise Complaint(f"--sort takes {', '.join(Order)}, and not {sort!r:.80}")
    if output not in ("", "json"):
        raise Complaint(f"-o takes json, and not {output!r:.80}")
    view = View(all_namespaces, by, Order(sort))
    async with target.connect() as (client, namespace):
        where = None if view.all_namespaces else namespace
        rows: list[Row] = []
        async for page, _ in client.pages(TRAINING_JOBS, where):
            rows += map(row, page)
        rows = ordered(rows, view.order, view.by)
        if output:
            sys.stdout.write(json.dumps([as_json(each, view.by) for each in rows], indent=2) + "\n")
        elif once or not console.is_terminal:
            console.print(screen(rows, time.time(), view.all_namespaces, view.by))
        else:
            await _follow(client, where, view)


async def _follow(client: Client, namespace: str | None, view: View) -> None:
    """Until Ctrl-C."""
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

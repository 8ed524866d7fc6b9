"""Command `concertina drill JOB --scenario NAME`, which tests how a job recovers from a fault."""

from __future__ import annotations

import dataclasses
import json
import sys

from concertina.drill.run import run
from concertina.drill.scenarios import SCENARIOS
from concertina.drill.target import DrillTarget
from concertina.drill.verdict_text import table
from concertina.local import cluster
from concertina.local.errors import LocalClusterError
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.console import plain
from concertina.terminal.watch import Late


async def drill(target: Target, job: str, name: str, yes: bool, as_json: bool) -> int:
    """Run a drill, print its verdict, and return the exit status: 0 for PASS, 1 for FAIL.

    Raises:
        UserError: When the scenario does not exist, the drill can't run, or confirmation by `yes` is missing.
            Confirmation is required on clusters that are not local.
    """
    scenario = SCENARIOS.get(name)
    if scenario is None:
        raise UserError(f"There is no scenario {name!r}; there are: {', '.join(SCENARIOS)}.")
    console = plain(stderr=True)
    async with target.connect() as (client, namespace):
        drilled = DrillTarget(client, namespace, job, cluster.serving(client.access.server))
        if drilled.local is None and not yes:
            raise UserError(
                f"{client.access.server} is not a local cluster of yours. This drill acts on real objects: "
                f"{scenario.about}. Add --yes to run it on {namespace}/{job}."
            )
        try:
            verdict = await run(
                drilled, name, scenario, scenario.fault(drilled), lambda text: console.print(text, style="dim")
            )
        except (Late, LocalClusterError) as error:
            raise UserError(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(verdict), indent=1) + "\n")
    else:
        plain(width=160).print(table(verdict))
    return 0 if verdict.passed else 1

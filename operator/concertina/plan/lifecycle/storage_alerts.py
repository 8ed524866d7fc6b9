"""Stores that fail while a round goes on. A person must act: without data the job is Stalled, and without a store for
its checkpoints it trains on and is Degraded."""

from __future__ import annotations

from dataclasses import replace

from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina_protocol import StorageHealth


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """A decision to let the round go on, where it waits for data or can't save: said as Stalled or Degraded."""
    report = ctx.round.report
    if report is None or decision.stalled:
        return decision
    waits_for = report.progress.waits_for if report.progress else ""
    if waits_for and decision.phase in (Phase.STARTING, Phase.TRAINING, Phase.RECOVERING):
        message = f"training waits for data: {waits_for}"
        return replace(decision, stalled="DataUnavailable", stalled_message=message)
    if report.storage is not None and report.storage.state == StorageHealth.ERROR and decision.phase is Phase.TRAINING:
        message = f"training goes on, but no checkpoint can be written: {report.storage.message}"
        return replace(decision, stalled="StorageUnavailable", stalled_message=message, goes_on=True)
    return decision

"""Tracking of a run in Weights & Biases. The id of the run is the job's uid.

The history of a run is append-only. If steps are trained again, their first values remain. With `uri: file:///folder`,
the run is written into that folder, and `wandb sync` uploads it later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import unquote, urlparse

import wandb

from concertina_protocol.tracking.tracking_records import Checkpointed, RunOutcome, StepDone
from concertina_tracking.about import About
from concertina_tracking.settings import TrackingSettings


class WandbRun:
    """Run that is tracked in Weights & Biases."""

    def __init__(self, settings: TrackingSettings, about: About) -> None:
        """Start the run in Weights & Biases, or resume it. Errors of wandb are raised."""
        parsed = urlparse(settings.uri)
        offline = parsed.scheme == "file"
        folder = unquote(parsed.path) if offline else str(settings.spool)
        team, _, project = settings.experiment.rpartition("/")
        # wandb's own log of sent records grows without limit, and its volume may be memory. The spool makes it
        # unnecessary.
        wandb_settings = wandb.Settings(
            console="off", silent=True, disable_git=True, x_skip_transaction_log=not offline
        )
        if settings.uri and not offline:
            wandb_settings.base_url = settings.uri
        self._run = wandb.init(
            id=settings.run_id, resume="allow", entity=team or None, project=project, name=settings.run_name,
            tags=[f"{name}:{value}"[:64] for name, value in settings.tags.items()], dir=folder,
            config={**about.parameters, "concertina": {**about.code, "job": settings.job}},
            mode="offline" if offline else None, settings=wandb_settings, allow_val_change=True,
        )  # fmt: skip
        self._last = self._run.step - 1
        """Number of the newest step in the run's history."""

    def go_on(self, step: int, *, latest: bool) -> Collection[int]:
        return range(step + 1, self._last + 1)

    def log(self, steps: Sequence[StepDone]) -> None:
        for step in sorted(steps, key=lambda step_done: step_done.step):
            self._run.log({**step.metrics, "_timestamp": step.at}, step=step.step)
            self._last = max(self._last, step.step)

    def annotate(self, name: str, text: str) -> None:
        self._run.summary[f"concertina/{name.replace('.', '/')}"] = text

    def reference(self, checkpoint: Checkpointed, made_of: Mapping[str, str]) -> None:
        facts = {"uri": checkpoint.uri, "step": checkpoint.step, "round": checkpoint.round, "made_of": {**made_of}}
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata=facts)
        self._run.log_artifact(artifact, aliases=[f"step-{checkpoint.step}"])

    def end(self, outcome: RunOutcome) -> None:
        self._run.summary["concertina/outcome"] = outcome.value

    def close(self) -> None:
        self._run.finish()
        wandb.teardown()  # without this, finish returns before wandb's process has written the end of a file

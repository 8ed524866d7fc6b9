"""A run of Weights & Biases, whose id is the job's uid. Its history only grows: of steps that are trained again the
first values stay. `uri: file:///folder` writes a run there that `wandb sync` uploads later."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import unquote, urlparse

import wandb

from concertina_protocol.tracking.tracking_records import Checkpointed, RunOutcome, StepDone
from concertina_tracking.about import About
from concertina_tracking.settings import TrackingSettings


class WandbRun:
    def __init__(self, settings: TrackingSettings, about: About) -> None:
        """Raises what wandb raises."""
        parsed = urlparse(settings.uri)
        offline = parsed.scheme == "file"
        folder = unquote(parsed.path) if offline else str(settings.spool)
        team, _, project = settings.experiment.rpartition("/")
        # Its own log of what it sends grows without a bound, in a volume that may be memory; the spool is ours.
        known = wandb.Settings(console="off", silent=True, disable_git=True, x_skip_transaction_log=not offline)
        if settings.uri and not offline:
            known.base_url = settings.uri
        self._run = wandb.init(
            id=settings.run_id, resume="allow", entity=team or None, project=project, name=settings.run_name,
            tags=[f"{name}:{value}"[:64] for name, value in settings.tags.items()], dir=folder,
            config={**about.parameters, "concertina": {**about.code, "job": settings.job}},
            mode="offline" if offline else None, settings=known, allow_val_change=True,
        )  # fmt: skip
        self._last = self._run.step - 1
        """Step of the newest row that it has."""

    def go_on(self, step: int, *, latest: bool) -> Collection[int]:
        return range(step + 1, self._last + 1)

    def log(self, steps: Sequence[StepDone]) -> None:
        for step in sorted(steps, key=lambda each: each.step):
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
        wandb.teardown()  # finish does not wait until its process has written the end of a file

"""Uploader of the bundled trainer's checkpoints.

The uploader records the trainer's configuration in manifests, and keeps older checkpoints for rollbacks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NoReturn

from concertina_state import uploader
from concertina_trainer.config.trainer import TrainerConfig


def main() -> NoReturn:
    """Answer the agent's requests one by one until the agent ends."""
    uploader.main(run(os.environ))


def run(environment: Mapping[str, str]) -> uploader.UploadedRun:
    config = TrainerConfig.model_validate(json.loads(environment["CONCERTINA_TRAINER"]))
    is_read = (
        config.model.from_ is not None or config.model.hf is not None
    )  # by the workers, which know the whole model
    trainer = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    return uploader.UploadedRun(trainer, config.anomalies.reaches, trainer_in_shards=is_read)

"""Model that `spec.trainer.model.from` describes, when neither the saved state nor the folder can be read."""

from pathlib import Path
from typing import cast

import pytest

from concertina_protocol import Durable, Restore, RestoreSource
from concertina_state.errors import DamagedInput
from concertina_state.saved import Requests
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.state.described_model import with_described_model


def test_a_damaged_checkpoint_is_named_if_the_folder_of_the_model_is_gone(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-5"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{broken")
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": {"from": f"file://{tmp_path}/gone"}})
    durable = Durable(uid="u", uri=f"file://{checkpoint}", round=1, step=5)
    start = Restore(RestoreSource.STORAGE, 5, durable=durable)
    with pytest.raises(DamagedInput, match="step-5"):
        with_described_model(config, start, cast(Requests, None))

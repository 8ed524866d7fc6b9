"""Worker whose rank 0 is asked to drain while the first batch of an evaluation is computed."""

import os
import time

from concertina_state.saving import Saving
from concertina_trainer import worker
from concertina_trainer.training.engine import WholeModel


def main():
    evaluated, local_flags = WholeModel.evaluated, Saving.local_flags
    evaluating = False

    def begun(self, batch):
        nonlocal evaluating
        evaluating = True
        return evaluated(self, batch)

    def asked(self):
        flags = local_flags(self)
        while evaluating and not flags.drain:
            time.sleep(0.01)
            flags = local_flags(self)
        return flags

    if os.environ["RANK"] == "0":
        WholeModel.evaluated, Saving.local_flags = begun, asked
    worker.main()

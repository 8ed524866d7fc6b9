"""A worker whose rank 0 is asked to drain while the first batch of an evaluation is computed."""

import os
import time

from concertina_trainer import worker
from concertina_trainer.training.evaluation import Evaluation
from concertina_trainer.training.saving import Saving


def main():
    parts, say = Evaluation._parts, Saving.say
    evaluating = False

    def begun(self, batch):
        nonlocal evaluating
        evaluating = True
        return parts(self, batch)

    def asked(self):
        said = say(self)
        while evaluating and not said.drain:
            time.sleep(0.01)
            said = say(self)
        return said

    if os.environ["RANK"] == "0":
        Evaluation._parts, Saving.say = begun, asked
    worker.main()

"""Worker whose rank 1 takes four times as long for each sequence, and SECONDS more."""

import os
import time

from concertina_trainer import worker
from concertina_trainer.model.decoder import Decoder

SECONDS = 0.01


def main():
    if os.environ["RANK"] == "1":
        forward = Decoder.forward

        def slowly(self, tokens, *others):
            started = time.perf_counter()
            result = forward(self, tokens, *others)
            print(f"the slow rank computed {len(tokens)} sequences", flush=True)
            time.sleep(3 * (time.perf_counter() - started) + SECONDS * len(tokens))
            return result

        Decoder.forward = slowly
    worker.main()

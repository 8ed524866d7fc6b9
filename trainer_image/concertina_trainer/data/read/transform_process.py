"""Process that transforms samples: `python -m concertina_trainer.data.read.transform_process MODULE:FUNCTION`.

The process reads requests from standard input and writes answers to standard output, both pickled. It ends when
standard input ends, and so it does not outlive the worker that started it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from typing import BinaryIO

from concertina_trainer.data.sample import Refused, Sample, Transform, transformed


def main() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a program that the transform starts must not read the requests
    os.dup2(2, 1)  # what the transform prints must not get between the answers
    try:
        module, _, name = sys.argv[1].partition(":")
        transform: Transform = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        _answer(answers, f"it can't be imported ({type(error).__name__}: {str(error)[:300]})")
        return
    _answer(answers, "")
    while True:
        try:
            samples, seed, vocab_size = pickle.load(requests)
        except EOFError:
            return
        results: list[Sample | str] = []
        for sample in samples:
            try:
                results.append(transformed(transform, sample, seed, vocab_size))
            except Refused as error:
                traceback.print_exc()
                results.append(f"sample {sample.position}: {error}")
                break
        _answer(answers, results)


def _answer(answers: BinaryIO, value: object) -> None:
    pickle.dump(value, answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()


if __name__ == "__main__":
    main()

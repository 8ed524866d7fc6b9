"""Worker of the bundled trainer that prints at its end how many graphs the compiler's cache had, and how many not."""

import os
from typing import NoReturn

from torch._dynamo.utils import counters

from concertina_trainer import worker

_exit = os._exit


def _end(code: int) -> NoReturn:
    found = counters["inductor"]
    print(f"cache: {found['fxgraph_cache_hit']} hits, {found['fxgraph_cache_miss']} misses", flush=True)
    _exit(code)


def main() -> NoReturn:
    os._exit = _end
    worker.main()

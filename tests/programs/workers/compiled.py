"""Worker of the bundled trainer whose blocks are compiled by a backend that takes a second instead of a minute."""

from typing import NoReturn

from concertina_trainer import worker
from concertina_trainer.parallel import compiled


def main() -> NoReturn:
    compiled.BACKEND = {"backend": "aot_eager"}
    worker.main()

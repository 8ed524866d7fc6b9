"""`concertina data`: the trainer package's own command, and the same work on a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from concertina.cli.connection import Complaint


async def data(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    try:
        from concertina_trainer.cli import main
    except ImportError as error:
        raise Complaint(f"{error}: install concertina[trainer], or use the image concertina/trainer.") from error
    return main(["data", *arguments], prog="concertina")

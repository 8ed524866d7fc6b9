"""Cases of tests in which a job goes through several layouts, one after the other."""

from collections.abc import Sequence
from typing import Any

import pytest


def chains(test: str, first: Sequence[str], *more: Sequence[str]) -> list[Any]:
    """Return the cases `(chain, stays)` of a test, given its node id.

    The gate plays the chain `first` with processes that stay. The long suite plays the others, and each chain with new
    processes in each round (`forked`).
    """
    names = {" > ".join(chain): chain for chain in (first, *more)}
    in_gate, *_ = names
    return [
        pytest.param(
            chain,
            stays,
            id=name + mode,
            marks=[] if stays and name == in_gate else [pytest.mark.long(law=f"{test}[{in_gate}]")],
        )
        for stays, mode in ((True, ""), (False, ", forked"))
        for name, chain in names.items()
    ]

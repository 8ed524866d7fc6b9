"""Last lines of a process that ended, as reports have them."""

from __future__ import annotations

import asyncio
import os

from concertina_agent.workers import output

LEAKS = b"""nanobind: leaked 4 instances!
 - leaked instance 0x7fce3417a348 of type "triton._C.libtriton.ir.attribute"
nanobind: leaked 64 types!
 - leaked type "TMEM_LOAD_REDUCE_MODIFIER"
 - ... skipped remainder
nanobind: leaked 514 functions!
 - leaked function "get_blocked_layout"
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_what_nanobind_prints_at_the_end_does_not_replace_the_error() -> None:
    async def body() -> output.Tail:
        with output.pipes() as (_, err, tail):
            tail.start("")
            os.write(err, b"Traceback\nValueError: no such layer\n\n" + 9 * LEAKS + b" - leaked water\n")
        await tail.closed(5.0)
        return tail

    tail = asyncio.run(body())
    assert tail.last() == ("Traceback", "ValueError: no such layer", "", " - leaked water")
    assert tail.last_error == " - leaked water"

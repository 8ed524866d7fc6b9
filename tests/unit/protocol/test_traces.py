"""Id of a round's trace: it stays as documented, for agents and operators of all versions."""

from __future__ import annotations

import subprocess

from concertina_protocol.traces import trace_id


def test_it_is_what_the_page_computes() -> None:
    command = "printf 5ba7b810-9dad-11d1-80b4-00c04fd430c8/7 | sha256sum | cut -c -32"
    output = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout.strip()
    assert trace_id("5ba7b810-9dad-11d1-80b4-00c04fd430c8", 7) == output

"""Commands that `launcher: Agent` refuses because they start a launcher, as Python reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.launcher_commands import ACCEPTED, REFUSED
from concertina.api.parse import SpecError, parse_spec

ROOT = Path(__file__).resolve().parents[3]


def job(command: tuple[str, ...], words: int, **spec: Any) -> dict[str, Any]:
    """Return a job whose container has that many words in `command`, and the others in `args`."""
    made: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "own-command.yaml").read_text())
    made["spec"] |= spec
    container = made["spec"]["template"]["spec"]["containers"][0]
    container["command"], container["args"] = list(command[:words]), list(command[words:])
    return made


@pytest.mark.parametrize("command", REFUSED, ids=lambda words: repr(words)[:100])
def test_a_launcher_under_the_agent_is_refused(command: tuple[str, ...]) -> None:
    for words in {1, min(2, len(command)), len(command)}:
        with pytest.raises(SpecError, match="set launcher: Torchrun"):
            parse_spec(job(command, words))
    parse_spec(job(command, len(command), launcher="Torchrun"))


@pytest.mark.parametrize("command", ACCEPTED, ids=lambda words: repr(words)[:100])
def test_a_command_that_may_start_no_launcher_is_accepted(command: tuple[str, ...]) -> None:
    for words in {1, len(command)}:
        parse_spec(job(command, words))

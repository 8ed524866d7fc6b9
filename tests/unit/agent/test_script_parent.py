"""Warm parent process in the user's own Python."""

import subprocess
import sys

from builders.programs import SEARCH_PATH

SAYS = f"""
import sys
sys.path.insert(0, {SEARCH_PATH!r})
import concertina_agent.workers.script_parent
print(*sorted(name for name in sys.modules if name.startswith("concertina_agent.workers.")))
print("asyncio" in sys.modules, "concertina_protocol" in sys.modules)
"""


def test_it_imports_little_as_each_start_waits_for_it() -> None:
    output = subprocess.run([sys.executable, "-I", "-c", SAYS], capture_output=True, text=True, check=True).stdout
    names = (
        f"concertina_agent.workers.{name}"
        for name in ("blas", "family", "forkserver", "hand_over", "learned", "script_parent", "take_over")
    )
    assert output == " ".join(names) + "\nFalse False\n"


SAYS_HAND_OVER = SAYS.replace("script_parent", "hand_over")


def test_an_interpreter_that_hands_itself_over_imports_less() -> None:
    output = subprocess.run(
        [sys.executable, "-I", "-c", SAYS_HAND_OVER], capture_output=True, text=True, check=True
    ).stdout
    assert output == "concertina_agent.workers.hand_over concertina_agent.workers.learned\nFalse False\n"

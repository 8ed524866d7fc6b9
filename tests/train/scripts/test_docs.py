"""The whole scripts in docs/scripts.md run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from builders.programs import SEARCH_PATH
from concertina_trainer.data.build.build import build

PAGE = Path(__file__).parents[3] / "docs" / "scripts.md"
TOKENS = "s3://bucket/tokens"
WHOLE = [text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if text.startswith("import ")]


def test_there_are_some():
    assert {name for name in ("scheduler", "data") for text in WHOLE if f"{name}={name}" in text} == {
        "scheduler",
        "data",
    }


@pytest.mark.parametrize("text", WHOLE)
def test_a_script_runs_and_goes_on_where_it_ended(text, tmp_path):
    path = tmp_path / "script.py"
    if TOKENS in text:
        list(build([PAGE], str(tmp_path / "tokens")))
        text = text.replace(TOKENS, str(tmp_path / "tokens"))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    trained: list[set[int]] = []
    for steps in (20, 30):
        told = text.replace("steps = 200", f"steps = {steps}")
        told = told.replace("    loss.backward", "    print(f'step {step}.', flush=True)\n    loss.backward")
        path.write_text(told)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert all(f"rank {rank} is through" in done.stdout for rank in (0, 1))
        trained.append(set(map(int, re.findall(r"step (\d+)\.", done.stdout))))
    assert trained == [set(range(20)), set(range(20, 30))]

"""Every snippet of Python in these pages is run: it is a whole script, or stands in one of the examples."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from builders.programs import SEARCH_PATH
from builders.train import forked
from builders.train.node import Parent
from concertina.api.parse import parse_spec
from concertina_trainer.data.build.build import build

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "scripts"
NAMES = ("script-state.md", "script-run.md", "script-data.md", "frameworks.md", "scripts.md", "from-ray-train.md")
PAGES = {name: (ROOT / "docs" / name).read_text() for name in NAMES}
SNIPPETS = [text for page in PAGES.values() for text in re.findall(r"```python\n(.*?)```", page, re.S)]
WHOLE = [text for text in SNIPPETS if text.startswith("import ")]
STATE = ["hf_accelerate_state.py", "hf_trainer_state.py", "lightning_state.py", "loader_state.py"]
TOKENS = "s3://bucket/tokens"
FIRST = "tests/train/scripts/test_docs.py::test_a_script_runs_and_goes_on_where_it_ended"
LAW = "tests/train/scripts/test_loops.py::test_killed_and_started_again[frameworks:accelerated]"
LIMIT = 400
pytestmark = pytest.mark.timeout(LIMIT)


def run(folder: Path, script: Path, *arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in_forks(parent: Parent, folder: Path, script: Path) -> str:
    done = forked.run(parent, folder, 2, script)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=str(i), marks=pytest.mark.long(law=f"{FIRST}[0]") if i else ())
        for i, text in enumerate(WHOLE)
    ],
)
def test_a_script_runs_and_goes_on_where_it_ended(text, parents, tmp_path):
    """Begin in forks of a process that has imported torch, and go on under torchrun."""
    path = tmp_path / "script.py"
    if TOKENS in text:
        list(build([ROOT / "docs" / name for name in NAMES], str(tmp_path / "tokens")))
        text = text.replace(TOKENS, str(tmp_path / "tokens"))
    trained: list[set[int]] = []
    for steps in (20, 30):
        first = not trained
        told = text.replace("steps = 200", f"steps = {steps}")
        told = re.sub(
            r"^( +)loss\.backward", r"\1print(f'step {step}.', flush=True)\n\1loss.backward", told, flags=re.M
        )
        path.write_text(told)
        out = run_in_forks(parents["loops.preload"], tmp_path, path) if first else run(tmp_path, path)
        assert all(f"rank {rank} is through" in out for rank in (0, 1))
        trained.append(set(map(int, re.findall(r"step (\d+)\.", out))))
    assert trained == [set(range(20)), set(range(20, 30))]


def test_what_is_no_whole_script_stands_in_an_example():
    examples = [(EXAMPLES / name).read_text() for name in [*STATE, "numpy_state.py"]]
    for snippet in set(SNIPPETS) - set(WHOLE):
        assert any(textwrap.indent(snippet, "    ") in text for text in examples), snippet


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("name", STATE)
def test_an_example_goes_on_where_it_ended(name, tmp_path):
    for steps in (10, 15):
        out = run(tmp_path, EXAMPLES / name, "--steps", str(steps))
        assert all(f"rank {rank} is through at step {steps}" in out for rank in (0, 1))


def test_an_example_of_numpy_goes_on_where_it_ended(tmp_path):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH}
    said = []
    for steps in (50, 100):
        command = [sys.executable, str(EXAMPLES / "numpy_state.py"), "--steps", str(steps)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        said.append(re.fullmatch(r"through at step (\d+), after (\d+) items, loss (\S+)\n", done.stdout).groups())
    assert [(step, items) for step, items, _ in said] == [("50", "1600"), ("100", "3200")]
    assert float(said[1][2]) < float(said[0][2])


def test_manifests_are_accepted():
    found = [text for page in PAGES.values() for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    jobs = [job for job in map(yaml.safe_load, found) if "kind" in job]
    assert jobs
    for job in jobs:
        parse_spec(job)

"""Count of a script's optimizer steps, with a stand-in for torch; tests/train/scripts uses torch itself."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders.programs import SEARCH_PATH
from concertina_agent.core.events import StepCount
from concertina_agent.settings import HOOK
from concertina_agent.workers import optimizer_steps
from concertina_agent.workers.optimizer_steps import StepCounter
from concertina_agent.workers.step_file import StepFile

STAND_IN = """
hooks = []

class Handle:
    def __init__(self, hook):
        self.hook = hook
    def remove(self):
        hooks.remove(self.hook)

def register_optimizer_step_post_hook(hook):
    hooks.append(hook)
    return Handle(hook)

class SGD:
    def step(self):
        for hook in tuple(hooks):
            hook(self, (), {})
"""


class Adam:
    pass


class SGD:
    pass


class Torch:
    """Stand-in for torch's module of optimizers, as far as the counter uses it."""

    def __init__(self) -> None:
        self.hooks: list = []

    def register_optimizer_step_post_hook(self, hook):
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    def step(self, *optimizers: object) -> None:
        for optimizer in optimizers:
            for hook in tuple(self.hooks):
                hook(optimizer, (), {})


def counting(path: Path) -> Torch:
    torch = Torch()
    StepCounter(str(path)).register(torch)
    return torch


def counted(path: Path) -> StepCount | None:
    return StepFile(3, str(path)).read(time.monotonic())


def steps(path: Path) -> tuple[int, str]:
    count = counted(path)
    assert count is not None
    return count.steps, count.optimizer


def test_a_count_says_how_many_steps_were_made_when_and_by_which_optimizer(tmp_path):
    path, begun = tmp_path / "steps", time.time()
    torch, optimizer = counting(path), SGD()
    assert counted(path) is None, "nothing is said before the first step"
    torch.step(optimizer)
    first = counted(path)
    assert (first.rank, first.steps, first.seconds, first.optimizer) == (3, 1, 0.0, "SGD")
    assert begun <= first.first_at <= time.time()
    torch.step(optimizer, optimizer)
    last = counted(path)
    assert (last.steps, last.first_at) == (3, first.first_at)
    assert last.seconds > 0
    assert 0 <= last.still < 60


def test_optimizers_that_take_turns_make_one_step(tmp_path):
    path = tmp_path / "steps"
    torch, generator, critic = counting(path), Adam(), SGD()
    for _ in range(4):
        torch.step(critic, generator)
    assert steps(path) == (4, "SGD")


def test_of_two_optimizers_the_one_that_steps_more_often_counts(tmp_path):
    path = tmp_path / "steps"
    torch, generator, critic = counting(path), Adam(), SGD()
    for _ in range(3):
        torch.step(*[critic] * 5, generator)
    assert steps(path) == (15, "SGD")


def test_a_model_with_an_optimizer_for_each_parameter_makes_one_step_a_pass(tmp_path):
    path = tmp_path / "steps"
    torch, optimizers = counting(path), [SGD() for _ in range(50)]
    for _ in range(3):
        torch.step(*optimizers)
    assert steps(path) == (3, "SGD")


def test_the_count_goes_on_with_another_optimizer(tmp_path):
    path = tmp_path / "steps"
    torch = counting(path)
    torch.step(*[SGD()] * 3, *[adam := Adam()] * 4)
    assert steps(path) == (6, "Adam"), "the first step of the second one belongs to the last step of the first one"
    torch.step(adam)
    assert steps(path)[0] == 7


def test_an_error_of_the_hook_ends_the_count_and_not_the_script(tmp_path):
    torch = counting(tmp_path / "no folder" / "steps")
    torch.step(SGD())
    assert torch.hooks == []


def test_a_second_process_of_the_worker_counts_nothing(tmp_path):
    path = tmp_path / "steps"
    first, second = counting(path), counting(path)
    first.step(SGD())
    second.step(*[SGD()] * 5)
    assert steps(path)[0] == 1
    assert second.hooks == []


def test_a_forked_process_counts_nothing(tmp_path):
    path = tmp_path / "steps"
    torch, optimizer = counting(path), SGD()
    torch.step(optimizer)
    if (pid := os.fork()) == 0:
        torch.step(optimizer)
        os._exit(len(torch.hooks))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    torch.step(optimizer)
    assert steps(path)[0] == 2


@pytest.mark.parametrize("content", [b"", b"short", bytes(optimizer_steps.LAYOUT.size), b"\xff" * 64])
def test_a_file_that_says_nothing_is_no_count(tmp_path, content):
    (tmp_path / "steps").write_bytes(content)
    assert counted(tmp_path / "steps") is None


def run(folder: Path, script: str, **variables: str) -> str:
    """Return the output of a script that starts as a worker does."""
    packages = folder / "packages" / "torch" / "optim"
    packages.mkdir(parents=True, exist_ok=True)
    (packages.parent / "__init__.py").touch()
    (packages / "__init__.py").touch()
    (packages / "optimizer.py").write_text(STAND_IN)
    environment = {
        "PYTHONPATH": os.pathsep.join((HOOK, str(packages.parents[1]))),
        optimizer_steps.VARIABLE: str(folder / "steps"),
        **variables,
    }
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_a_script_is_counted_from_the_import_of_torch(tmp_path):
    script = """
        import inspect, sys
        from torch.optim import optimizer
        assert "def step" in inspect.getsource(optimizer), "its loader is as ever"
        assert "exec_module" not in vars(optimizer.__loader__)
        sgd = optimizer.SGD()
        sgd.step(), sgd.step()
        print([name for name in sys.modules if name.startswith("concertina")], len(optimizer.hooks))
    """
    assert run(tmp_path, script) == "[] 1\n"
    assert steps(tmp_path / "steps") == (2, "SGD")


def test_a_script_without_torch_imports_none(tmp_path):
    script = "import sys, json; print('torch' in sys.modules, 'typing' in sys.modules)"
    assert run(tmp_path, script) == "False False\n"
    assert counted(tmp_path / "steps") is None


def test_a_torch_without_the_hook_is_imported_as_ever(tmp_path):
    run(tmp_path, "")
    other = tmp_path / "older"
    (other / "torch" / "optim").mkdir(parents=True)
    for name in ("__init__", "optim/__init__", "optim/optimizer"):
        (other / "torch" / f"{name}.py").write_text("version = 1\n")
    path = os.pathsep.join((HOOK, str(other)))
    assert run(tmp_path, "import torch.optim.optimizer as o; print(o.version)", PYTHONPATH=path) == "1\n"


def test_the_images_own_sitecustomize_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = True\n")
    path = os.pathsep.join((HOOK, str(tmp_path), SEARCH_PATH))
    assert run(tmp_path, f"import sys; print(mine, {HOOK!r} in sys.path)", PYTHONPATH=path) == "True False\n"


def test_a_process_that_stays_counts_anew_in_each_round(tmp_path, monkeypatch):
    """Its file is that of the round, and nothing more is written into that of an earlier one."""
    torch, optimizer = Torch(), Adam()
    first, second = str(tmp_path / "round-1"), str(tmp_path / "round-2")
    monkeypatch.setenv(optimizer_steps.VARIABLE, first)
    StepCounter(first).register(torch)
    torch.step(optimizer, optimizer, optimizer)
    before = Path(first).read_bytes()
    monkeypatch.setenv(optimizer_steps.VARIABLE, second)
    begun = time.time()
    torch.step(optimizer)
    assert Path(first).read_bytes() == before
    count = StepFile(0, second).read(time.monotonic())
    assert (count.steps, count.seconds) == (1, 0.0)
    assert count.first_at >= begun

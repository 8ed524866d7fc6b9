"""`trainingjob.State` where there is no job: in a folder, by each way of cutting a model.

The gate runs most scripts in forks of a process that has imported torch. Under torchrun, test_docs.py runs a script.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from builders.programs import PROGRAMS, SEARCH_PATH
from builders.train import forked

SCRIPT = PROGRAMS / "stateful.py"
pytestmark = pytest.mark.timeout(400)


def under_torchrun(folder: Path, world: int, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return subprocess.run(
        [sys.executable, *(launcher if world > 1 else []), *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def trained(folder: Path, world: int, kind: str, steps: int) -> tuple[set[int], dict[int, float]]:
    """Return the steps at which ranks began, and the losses by step."""
    done = under_torchrun(folder, world, str(SCRIPT), kind, "--steps", str(steps), "--pause", "0")
    assert done.returncode == 0, done.stderr
    begun = {int(step) for step in re.findall(r"starts at step (\d+)", done.stdout)}
    return begun, {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}


LAW = "tests/train/scripts/test_run.py::test_a_script_keeps_its_process"


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "hsdp"])
def test_four_then_two_then_four_train_as_one(tmp_path, kind):
    (tmp_path / "one").mkdir()
    _, alone = trained(tmp_path / "one", 1, "plain", 30)
    for world, begin, end in ((4, 0, 10), (2, 10, 20), (4, 20, 30)):
        begun, losses = trained(tmp_path, world, kind, end)
        assert begun == {begin}
        assert losses == pytest.approx({step: alone[step] for step in range(begin, end)}, abs=1e-5)
    rounds = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert rounds == ["round-3"], "older rounds are not needed any more"


@pytest.fixture
def run(parents):
    """Run a script in a folder, in a fork for each rank."""

    def ran(folder: Path, world: int, text: str) -> subprocess.CompletedProcess[str]:
        path = folder / "script.py"
        path.write_text("import torch, torch.distributed as dist, trainingjob\n" + textwrap.dedent(text))
        return forked.run(parents["loops.preload"], folder, world, path)

    return ran


ALL = """
    import random, numpy
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    tied["b"].weight = tied["a"].weight
    both = [*model.parameters(), *tied.parameters()]
    optimizer = torch.optim.SGD([{"params": both[:2], "lr": 0.5}, {"params": both[2:]}], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    arrays = {"mean": numpy.zeros(3), "seen": 0, "deep": [{"names": ["a"]}]}
    state = trainingjob.State(model=model, tied=tied, optimizer=optimizer, scheduler=scheduler, arrays=arrays)
    start = state.restore(default=0)
    for step in range(start, start + 4):
        loss = tied["b"](model(torch.rand(5, 3))).square().sum()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        arrays["mean"] += 1; arrays["seen"] += 1; arrays["deep"][0]["names"].append(str(step))
        drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
        print(step, loss.item(), drawn, optimizer.param_groups[0]["lr"], arrays, model[1].running_mean.tolist())
        state.commit(step, durable=True)
"""


def test_all_that_it_keeps_comes_back_in_one_process(run, tmp_path):
    """Buffers, tied weights, groups of their own rate, schedulers, arrays, everybody's random numbers."""
    seeded = "import random, numpy; random.seed(3); numpy.random.seed(3); torch.manual_seed(1)\n" + textwrap.dedent(ALL)
    first, second = (run(tmp_path, 1, seeded) for _ in range(2))
    (tmp_path / "whole").mkdir()
    longer = seeded.replace("start + 4", "start + 8")
    whole = run(tmp_path / "whole", 1, longer)
    assert whole.returncode == 0, whole.stderr
    assert (first.stderr, second.stderr) == ("", "")
    assert first.stdout + second.stdout == whole.stdout


FLAT = """
    import gc
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Counting(torch.nn.Module):
        seen = 0
        def forward(self, x):
            self.seen += 1
            return x
        def get_extra_state(self):
            return {"seen": self.seen}
        def set_extra_state(self, state):
            self.seen = state["seen"]

    class Counted(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for each in self.param_groups[0]["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state["step"] = state.get("step", 0) + 1
                    state["moment"] = state.get("moment", torch.zeros_like(each)) + each.grad

    def made(original):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), Counting(), torch.nn.Linear(6, 1))
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
        optimizer = Counted(model.parameters(), {})
        return model, optimizer, trainingjob.State(folder=str(original), model=model, optimizer=optimizer)

    def told(model, optimizer):
        counts = {state["step"] for state in optimizer.state.values()}
        seen = [each.seen for each in model.modules() if isinstance(each, Counting)]
        print(" ".join(map(str, [*seen, *counts])) + "\\n", end="", flush=True)  # a line is one write: two ranks write

    dist.init_process_group("gloo")
    for original in (True, False):
        model, optimizer, state = made(original)
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward(); optimizer.step()
            state.commit(step, durable=step == 2)
        told(model, optimizer)
        del state; gc.collect()  # as if its process had ended
        model, optimizer, state = made(original)
        state.restore()
        told(model, optimizer)
        del state; gc.collect()
"""


def test_what_fsdp1_keeps_beside_tensors_comes_back(run, tmp_path):
    done = run(tmp_path, 2, FLAT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 3"] * 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainingjob.State(model=3)", "model is a int, which has no state"),
        (
            "class Engine(torch.nn.Module): __module__ = 'deepspeed.runtime.engine'\ntrainingjob.State(model=Engine())",
            "model is an engine of DeepSpeed, which shards states in its own way",
        ),
        (
            "trainingjob.State(model=torch.nn.Linear(1, 1), gather=lambda data: [data])",
            "model is an object of torch: its ranks communicate through torch.distributed, so leave out State",
        ),
        (
            "trainingjob.State(kept={'a': torch.zeros(2)}, gather=lambda data: [data]).commit(0)",
            "kept.a contains a tensor of torch: its ranks communicate through torch.distributed",
        ),
        ("trainingjob.State(random={})", "the name random is reserved"),
        (
            "m = torch.nn.Linear(2, 2, dtype=torch.complex64); trainingjob.State(model=m).commit(0)",
            "model.weight has the dtype torch.complex64, which can't be saved",
        ),
        (
            "import collections\nclass S:\n def state_dict(self): return {'a': collections.deque()}\n"
            " def load_state_dict(self, s): pass\ntrainingjob.State(sampler=S()).commit(0)",
            "sampler.a is a collections.deque, which can't be saved",
        ),
        (
            "trainingjob.State(model=torch.nn.Linear(2, 2)).commit(0, durable=True)\n"
            "trainingjob.State(model=torch.nn.Linear(2, 3)).restore()",
            "model.bias was saved as F32 [2] but is now F32 [3]",
        ),
    ],
)
def test_what_can_not_be_kept_is_said(run, tmp_path, text, sentence):
    done = run(tmp_path, 1, text)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_snapshots_do_not_become_rarer_as_a_run_goes_on(run, tmp_path):
    text = """
        import time
        from pathlib import Path
        model = torch.nn.Linear(512, 512)
        state, seen, halves = trainingjob.State(model=model, overhead=0.1), set(), []
        for step in range(state.restore(), 400):
            time.sleep(0.01)
            state.commit(step)
            slots = Path("checkpoints").glob("round-1/shard-0/slot-?.json")
            seen |= {(each, each.stat().st_mtime_ns) for each in slots}
            if step in (199, 399):
                halves.append(len(seen))
        print("HALVES", *halves)
    """
    done = run(tmp_path, 1, text)
    first, both = map(int, re.search(r"HALVES (\d+) (\d+)", done.stdout).groups())
    assert both - first > first / 3 > 1, (first, both)


def test_what_was_restored_has_room_for_its_first_snapshot_before_the_first_commit(run, folder):
    text = """
        import time
        from pathlib import Path
        model = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters())
        state = trainingjob.State(model=model, optimizer=optimizer)
        step = state.restore()
        slots, give_up = Path("checkpoints/round-2/shard-0"), time.monotonic() + 120
        ahead = []
        while step and not ahead and time.monotonic() < give_up:
            lines = Path("/proc/self/maps").read_text().splitlines()
            ahead = [int(line.split()[4]) for line in lines if f" {slots.resolve()}/#" in line]
        model(torch.rand(1, 512)).sum().backward()
        optimizer.step()
        state.commit(step, durable=True)
        if step:
            print("AHEAD", ahead == [(slots / "slot-0").stat().st_ino])
    """
    for _ in range(2):
        done = run(folder, 1, text)
        assert done.returncode == 0, done.stderr
    assert "AHEAD True" in done.stdout


@pytest.mark.parametrize("kept", ["model=torch.nn.Linear(2, 2)", "kept={'a': torch.rand(2)}"])
def test_what_differs_from_rank_to_rank_is_no_copy(run, tmp_path, kept):
    text = f"""
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        trainingjob.State({kept}).commit(0)
    """
    done = run(tmp_path, 2, text)
    assert done.returncode != 0
    assert "differs between ranks, and is not marked as sharded" in done.stderr


PARTS = """
    import array, numpy
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = range(7 * rank // world, 7 * (rank + 1) // world)
    rows, whole = torch.zeros(len(mine), 2), numpy.zeros(5, numpy.uint32)
    plain = array.array("d", [0.0])
    kept = {"rows": trainingjob.ArrayShard(rows, (mine.start, 0), (7, 2)), "whole": whole, "plain": plain}
    state = trainingjob.State(kept=kept)
    start = state.restore()
    assert rows[:, 1].tolist() == [start * row for row in mine] and whole.tolist() == [start * 3] * 5, (rows, whole)
    assert plain[0] == start
    for step in range(start, start + 4):
        rows[:, 1] += torch.tensor(list(mine)); whole += 3; plain[0] += 1
        state.commit(step, durable=True)
    print(f"from {start}\\n", end="", flush=True)
"""


def test_parts_and_arrays_that_are_not_torchs_are_cut_anew(run, tmp_path):
    """In another world, and beside torch.distributed."""
    for number, world in enumerate((2, 3)):
        done = run(tmp_path, world, PARTS)
        assert done.stdout.count(f"from {4 * number}\n") == world, done.stderr

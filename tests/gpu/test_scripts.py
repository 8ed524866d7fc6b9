"""`trainingjob.State` on GPUs: users' own scripts that were killed or have ended continue at their last step."""

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from builders.programs import PROGRAMS, SEARCH_PATH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="this machine has no CUDA device: no script was run on it"
    ),
]


def run(folder, launcher, *command):
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(folder, world, kind, steps):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    launcher = [] if kind == "plain" else torchrun
    output = run(folder, launcher, str(PROGRAMS / "stateful.py"), kind, "--cuda", "--steps", str(steps), "--pause", "0")
    begun = {int(step) for step in re.findall(r"starts at step (\d+)", output)}
    return begun, {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", output)}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_then_one_then_two_train_as_one(tmp_path, kind):
    (tmp_path / "one").mkdir()
    _, alone = trained(tmp_path / "one", 1, "plain", 30)
    for world, begin, end in ((2, 0, 10), (1, 10, 20), (2, 20, 30)):
        begun, losses = trained(tmp_path, world, kind, end)
        assert begun == {begin}
        assert losses == pytest.approx({step: alone[step] for step in range(begin, end)}, abs=1e-5)


SCRIPT = """
    import os, sys, torch, trainingjob
    torch.manual_seed(7); torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    state = trainingjob.State(model=model, optimizer=optimizer)
    for step in range(state.restore(default=0), int(sys.argv[1])):
        loss = model(torch.rand(50, 3, device="cuda")).square().sum()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(step, loss.item().hex(), flush=True)
        state.commit(step, durable=step % 4 == 3)
    os._exit(0)
"""


def test_random_numbers_and_what_the_forward_changes_go_on_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", [], str(path), "12")
    seeded = [run(tmp_path / "parts", [], str(path), str(steps)) for steps in (4, 8, 12)]
    assert "".join(seeded) == whole
    assert len(whole.splitlines()) == 12

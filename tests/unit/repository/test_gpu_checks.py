"""`make test-gpu`: which checks run, what becomes of each, and what the results say. No GPU is needed here."""

from __future__ import annotations

import collections
import getpass
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from builders import pages
from builders.gpu.__main__ import main, pick, status
from builders.gpu.checks import CHECKS, MOST_SECONDS, TITAN_PACKAGES, Check, Kind
from builders.gpu.machine import ROOT, Card, Machine, environment, why_not_runnable
from builders.gpu.results import Outcome, Result, Revision, document, table
from builders.gpu.running import run, run_all

SPEC = importlib.util.spec_from_file_location("gpu_packages", ROOT / "tools" / "gpu_packages.py")
assert SPEC
assert SPEC.loader
gpu_packages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_packages)
H100 = Card("NVIDIA H100 80GB HBM3", 79.6, (9, 0))
MACHINE = Machine("3.12.3", "2.15.0", "13.0", "2.28", "580", (H100,), frozenset({"pipelines of given microbatches"}))
FOREVER = 600


def fake_tests(folder: Path, name: str, text: str, limit_seconds: int = FOREVER, **needs) -> Check:
    path = folder / f"test_{name}.py"
    path.write_text(textwrap.dedent(text))
    (folder / "pytest.ini").touch()  # Names of tests are relative to this folder.
    return Check(name, "a fake", Kind.TESTS, (str(path),), limit_seconds, **needs)


def fake_benchmark(folder: Path, name: str, text: str, **needs) -> Check:
    path = folder / f"{name}.py"
    path.write_text("import json, pathlib, sys\ntarget = pathlib.Path(sys.argv[-1])\n" + textwrap.dedent(text))
    return Check(name, "a fake", Kind.BENCHMARK, (str(path),), FOREVER, **needs)


def outcome_of(check: Check, seconds_left: float = FOREVER) -> Result:
    return run(check, environment(), seconds_left)


def test_tests_that_pass_give_their_figures(tmp_path):
    check = fake_tests(tmp_path, "measured",
        """
        def test_a(record_property):
            record_property("first step, s", 1.25)
        def test_b(): pass
        """,
    )  # fmt: skip
    result = outcome_of(check)
    assert (result.outcome, result.reason) == (Outcome.PASSED, "")
    assert result.figures == {"first step, s": 1.25}
    assert [(case.name.rpartition("::")[2], case.outcome) for case in result.cases] == [
        ("test_a", "passed"), ("test_b", "passed"),
    ]  # fmt: skip


def test_a_test_that_fails_is_named_with_the_end_of_its_error(tmp_path):
    check = fake_tests(tmp_path, "failing", "def test_a(): pass\ndef test_b(): assert 1 == 2, 'not the same'\n")
    result = outcome_of(check)
    assert (result.outcome, result.reason) == (Outcome.FAILED, "test_failing.py::test_b")
    assert "not the same" in "\n".join(result.error)
    assert [case.outcome for case in result.cases] == ["passed", "failed"]


NOTHING = "tests/unit/repository/test_gpu_checks.py::test_a_check_never_passes_by_running_nothing"


@pytest.mark.parametrize(
    ("text", "outcome", "reason"),
    [
        ("import pytest\ndef test_a(): pytest.skip('no NVLink')\n", Outcome.SKIPPED, "no NVLink"),
        pytest.param(
            "import absent_module\n",
            Outcome.FAILED,
            "pytest ended with exit status 2",
            marks=pytest.mark.long(law=NOTHING),
        ),
        ("", Outcome.FAILED, "pytest ended with exit status 5"),
        ("import os\ndef test_a(): os._exit(0)\n", Outcome.FAILED, "pytest ended early, in test_early.py::test_a"),
        (
            "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no NVLink')\n",
            Outcome.PASSED,
            "1 of its tests were skipped: no NVLink",
        ),
    ],
    ids=["all skipped", "no import", "no tests", "ends early", "some skipped"],
)
def test_a_check_never_passes_by_running_nothing(tmp_path, text, outcome, reason):
    result = outcome_of(fake_tests(tmp_path, "early", text))
    assert (result.outcome, result.reason) == (outcome, reason)
    assert bool(result.error) == (outcome is Outcome.FAILED)


HANGING = """
    import os, subprocess, sys, time
    def test_a(): pass
    def test_b():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open({path!r} + ".new", "w") as file:
            file.write(str(child.pid))
        os.rename({path!r} + ".new", {path!r})
        time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_check_that_hangs_is_killed_with_all_its_processes_and_the_next_one_runs(tmp_path):
    path = tmp_path / "child"
    hanging = fake_tests(tmp_path, "hanging", HANGING.format(path=str(path)), limit_seconds=20)
    after = fake_tests(tmp_path, "after", "def test_a(): pass\n")
    first, second = run_all([hanging, after], MACHINE, environment(), time.monotonic() + FOREVER)
    assert first.outcome is Outcome.FAILED
    assert first.reason.startswith("did not end within 20 s, in ")
    assert first.reason.endswith("test_hanging.py::test_b")
    assert [case.outcome for case in first.cases] == ["passed"]
    assert "test_hanging.py" in "\n".join(first.error), "the stack of the process that hung"
    assert gone(int(path.read_text()))
    assert second.outcome is Outcome.PASSED


@pytest.mark.long(
    law="tests/unit/repository/test_gpu_checks.py::test_a_check_that_hangs_is_killed_with_all_its_processes_and_the_next_one_runs"
)
def test_what_the_deadline_cuts_off_and_what_follows_is_not_reached(tmp_path):
    hanging = fake_tests(tmp_path, "hanging", HANGING.format(path=str(tmp_path / "child")))
    after = fake_tests(tmp_path, "after", "def test_a(): pass\n")
    unfit = fake_benchmark(tmp_path, "unfit", "", gpus=2)
    first, second, third = run_all([hanging, after, unfit], MACHINE, environment(), time.monotonic() + 20)
    assert (first.outcome, first.reason) == (Outcome.NOT_REACHED, "the time was over; 1 of its tests had passed")
    assert (second.outcome, second.reason) == (Outcome.NOT_REACHED, "the time was over before it began")
    assert third.outcome is Outcome.NOT_RUNNABLE


def test_a_benchmark_gives_medians_and_the_numbers_beside_them(tmp_path):
    written = {
        "benchmark": "gpu", "machine": {"cores": 2}, "rows": {"a step": {"median": 0.2, "all": [0.1, 0.2]}},
        "GPU": "H100", "0.3B": {"MFU": 0.34, "exact": True},
    }  # fmt: skip
    result = outcome_of(fake_benchmark(tmp_path, "measures", f"target.write_text(json.dumps({written}))"))
    assert (result.outcome, result.figures) == (Outcome.PASSED, {"a step": 0.2, "0.3B: MFU": 0.34})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sys.exit('out of memory')", "ended with exit status 1"),
        ("target.write_text('{\"rows\": {}}')", "measured nothing"),
        ("pass", "measured nothing"),
    ],
)
def test_a_benchmark_that_measures_nothing_has_failed(tmp_path, text, reason):
    result = outcome_of(fake_benchmark(tmp_path, "silent", text))
    assert (result.outcome, result.reason) == (Outcome.FAILED, reason)
    assert ("out of memory" in result.error) == (reason != "measured nothing")


def test_a_benchmark_whose_figure_is_beyond_its_bound_has_failed_with_its_figures(tmp_path):
    text = """
        target.write_text('{"rows": {"a step": {"median": 0.2}}}')
        sys.exit("the memory differs from the plan by more than 5 %")
    """
    result = outcome_of(fake_benchmark(tmp_path, "bounded", text))
    assert (result.outcome, result.figures) == (Outcome.FAILED, {"a step": 0.2})
    assert "more than 5 %" in result.error[-1]


NEEDY = Check(
    "needy", "a fake", Kind.TESTS, ("x",), 1, ("numpy", "pydantic"), ("pipelines of given microbatches",), 2, 48, (9, 0)
)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine("3.12", fault="torch cannot be used: ImportError"), "torch cannot be used: ImportError"),
        (Machine("3.12"), "this Python has no torch"),
        (Machine("3.12", "2.11.0"), "no CUDA device: torch 2.11.0 finds none on this machine"),
        (
            Machine("3.12", "2.11.0", cards=(H100,), missing_packages=frozenset({"pydantic", "cryptography"})),
            "this Python has no pydantic: see `make test-gpu-packages`",
        ),
        (
            Machine("3.12", "2.11.0", cards=(H100,)),
            "not runnable on this torch: 2.11.0 has no pipelines of given microbatches",
        ),
        (MACHINE, "needs 2 GPUs, and this machine has 1"),
        (
            Machine("3.12", "2.15.0", cards=(H100, Card("L4", 22.5, (8, 9))), features=MACHINE.features),
            "needs 48 GiB of GPU memory, and this GPU has 22 GiB",
        ),
        (
            Machine("3.12", "2.15.0", cards=(H100, Card("A100", 79.3, (8, 0))), features=MACHINE.features),
            "needs compute capability 9.0, and this GPU has 8.0",
        ),
    ],
    ids=["fault", "torch", "GPU", "package", "feature", "GPUs", "memory", "capability"],
)
def test_what_a_machine_lacks_is_named(machine, reason):
    assert (why_not_runnable(NEEDY, machine) or "").startswith(reason)


def test_a_machine_that_lacks_nothing_runs_the_check():
    machine = Machine("3.12", "2.15.0", cards=(H100, H100), features=MACHINE.features)
    assert why_not_runnable(NEEDY, machine) is None


def test_checks_are_picked_by_name_in_the_order_of_their_worth():
    assert [check.name for check in pick(CHECKS, "scripts, trainer")] == ["trainer", "scripts"]
    assert pick(CHECKS, "") == list(CHECKS)


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--only", "trainer,bogus"])
    assert ended.value.code == 2
    assert "no check is named bogus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ((Outcome.PASSED, Outcome.NOT_RUNNABLE, Outcome.NOT_REACHED), 0),
        ((Outcome.PASSED, Outcome.FAILED), 1),
        ((Outcome.NOT_RUNNABLE, Outcome.NOT_REACHED, Outcome.SKIPPED), 3),
        ((), 3),
    ],
)
def test_the_exit_status_says_whether_anything_ran(outcomes, expected):
    assert status([Result("a", outcome) for outcome in outcomes]) == expected


def test_without_a_gpu_every_check_says_so(tmp_path, monkeypatch, capsys):
    """This test asks a real torch, in the process that `make test-gpu` starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    target = tmp_path / "results" / "gpu.json"
    assert main(["run", "--only", "trainer,overlap", "--commit", "1234abc-dirty", "--json", str(target)]) == 3
    assert "NO CHECK RAN: 2 not runnable" in capsys.readouterr().out
    results = json.loads(target.read_text())
    assert (results["card"], results["commit"], results["dirty"]) == ("no GPU", "1234abc", True)
    assert results["namesAddedToTorch"] == [], "the lock's torch is used as it is"
    assert [(check["name"], check["outcome"]) for check in results["checks"]] == [
        ("trainer", "not runnable"), ("overlap", "not runnable"),
    ]  # fmt: skip
    assert all("no CUDA device" in check["reason"] for check in results["checks"])


def results(*checks: Result, machine: Machine = MACHINE, described: str = "1234567890abcdef") -> dict:
    return document(machine, Revision.of(described), "2026-01-01T00:00:00+00:00", 1.0, checks)


def test_results_hold_no_names_of_hosts_or_users_and_no_addresses(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7.lab.example")
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpu7.lab.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    lines = (
        f"{ROOT}/tests/gpu/test_bits.py:12: in /home/ada/venv/lib/torch/nn.py",
        "gpu7:4711 NCCL WARN gpu7.lab.example/10.4.0.17<33210>, fe80::5054:ff:fe12:3456 refused, 127.0.0.1 did not",
        "/tmp/pytest-of-ada/0: Canada stays, as do torch 2.11.0 and GPU 0000:19:00.0",
    )
    check = Result("a", Outcome.FAILED, lines[1], figures={"at": "gpu7", "seconds": 1.5}, error=lines)
    (public,) = results(check)["checks"]
    assert public["error"] == [
        "./tests/gpu/test_bits.py:12: in ~/venv/lib/torch/nn.py",
        "HOST:4711 NCCL WARN HOST/ADDRESS<33210>, ADDRESS refused, 127.0.0.1 did not",
        "/tmp/pytest-of-USER/0: Canada stays, as do torch 2.11.0 and GPU 0000:19:00.0",
    ]
    assert public["reason"] == public["error"][1]
    assert public["figures"] == {"at": "HOST", "seconds": 1.5}


def test_results_of_several_machines_make_one_table(tmp_path):
    """The command of docs/gpu-checks.md makes the table."""
    h200 = Machine("3.12", "2.11.0", cards=(Card("NVIDIA H200", 139.0, (9, 0)),))
    written = [
        results(Result("throughput", Outcome.PASSED, figures={"a step, s": 0.20512}), Result("bits", Outcome.FAILED)),
        results(Result("throughput", Outcome.PASSED, figures={"a step, s": 0.21}), Result("bits", Outcome.PASSED)),
        results(Result("throughput", Outcome.NOT_REACHED), machine=h200, described="1234567890abcdef-dirty"),
    ]
    for number, contents in enumerate(written):
        (tmp_path / f"gpu-{number}.json").write_text(json.dumps(contents))
    (block,) = pages.beginning_with("gpu-checks.md", "PYTHONPATH=tests python3 -m builders.gpu merge")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = block.text.replace("out/gpu-", f"{tmp_path}/gpu-")
    merged = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert merged.stdout.splitlines() == [
        "|  | NVIDIA H100 80GB HBM3, torch 2.15.0, 1234567890ab | NVIDIA H200, torch 2.11.0, 1234567890ab (changed) |",
        "| --- | --- | --- |",
        "| throughput | passed; passed | not reached |",
        "| bits | failed; passed | - |",
        "| throughput: a step, s | 0.2051; 0.21 | - |",
    ]
    assert table(written[:1]).count("\n") == 4


@pytest.mark.parametrize("contents", ["{", "[]", '{"format": 0, "checks": []}'])
def test_a_file_that_holds_no_results_is_refused_by_name(tmp_path, capsys, contents):
    path = tmp_path / "other.json"
    path.write_text(contents)
    with pytest.raises(SystemExit):
        main(["merge", str(path)])
    assert "other.json" in capsys.readouterr().err


def test_every_gpu_test_belongs_to_one_check():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "--import-mode=importlib"]
    asked = subprocess.run([*command, "tests/gpu"], cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stdout
    collected = [line for line in asked.stdout.splitlines() if line.startswith("tests/gpu/")]
    assert collected
    arguments = [name for check in CHECKS if check.kind is Kind.TESTS for name in check.arguments]
    owners = collections.Counter(
        (name, argument) for argument in arguments for name in collected if holds(argument, name)
    )
    names = collections.Counter(name for name, _ in owners)
    assert [name for name in collected if names[name] != 1] == []
    assert set(arguments) == {argument for _, argument in owners}, "an argument names no test"


def holds(argument: str, name: str) -> bool:
    return name == argument or name.startswith((f"{argument}::", f"{argument}["))


def test_programs_of_benchmarks_exist_and_names_are_given_once():
    programs = [check.arguments[0] for check in CHECKS if check.kind is Kind.BENCHMARK]
    assert [program for program in programs if not (ROOT / program).is_file()] == []
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_no_check_takes_more_than_its_share_of_ten_minutes():
    assert {check.name: check.limit_seconds for check in CHECKS if check.limit_seconds > MOST_SECONDS} == {}


def test_a_run_of_ten_minutes_begins_with_what_is_worth_most():
    """Speed beside torchtitan, recovery, a small model's speed, and float8."""
    assert [check.name for check in CHECKS[:4]] == ["beside-torchtitan", "recovery", "throughput", "float8"]


def test_each_check_has_passed_on_a_gpu_or_is_due():
    notebook = (ROOT / "notebook" / "gpu.md").read_text()
    results, _, due = notebook.partition("\n## Due\n")
    assert due
    tables = [line.split("|") for line in results.splitlines() if line.startswith("| `")]
    passed = {name for cells in tables if "passed" in cells[2].lower() for name in re.findall(r"`([^`]+)`", cells[1])}
    listed = set(re.findall(r"^\| `([^`]+)` \|", due, re.MULTILINE))
    names = {check.name for check in CHECKS}
    assert names - passed - listed == set()
    assert listed - names == set(), "the notebook names a check that does not exist"


def test_carried_packages_hold_what_checks_import():
    lock = gpu_packages.locked((ROOT / "requirements/dev.txt").read_text())
    entries = [line.partition("==")[0] for line in lock.splitlines() if "==" in line]
    assert set(entries) == gpu_packages.PACKAGES
    needed = {package for check in CHECKS for package in check.packages} - {"numpy"}  # This module comes with torch.
    assert needed - set(TITAN_PACKAGES) <= set(entries)


def test_carried_packages_of_torchtitan_hold_what_its_check_imports():
    """No package is in both folders, because the folder of torchtitan precedes the other on the path."""
    lock = gpu_packages.locked((ROOT / "requirements/dev.txt").read_text(), gpu_packages.TITAN_LOCKED)
    entries = [line.partition("==")[0] for line in (lock + gpu_packages.TITAN.read_text()).splitlines() if "==" in line]
    assert len(set(entries)) == len(entries)
    assert set(TITAN_PACKAGES) <= set(entries)
    assert gpu_packages.PACKAGES.isdisjoint(entries)


@pytest.mark.parametrize("newer", [False, True])
def test_an_older_torch_is_given_the_names_that_it_lacks(tmp_path, newer):
    folder = tmp_path / "torch" / "distributed"
    folder.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (folder / "__init__.py").write_text(
        "def all_gather_into_tensor(): return 'older'\n" + "def all_gather_single(): return 'own'\n" * newer
    )
    program = "import sitecustomize, torch.distributed as d; print(d.all_gather_single(), sitecustomize.added)"
    asked = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/gpu/older_torch"), str(tmp_path)])},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = "own []" if newer else "older ['torch.distributed.all_gather_single']"
    assert asked.stdout.strip() == expected

"""Traces of a worker's steps: the steps that they contain, and the message if there is no trace."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from builders.until import until
from concertina_protocol import step_traces
from concertina_protocol.heartbeat import VARIABLE
from concertina_protocol.worker_channel import TraceSteps
from concertina_state import step_trace
from concertina_state.step_trace import Traces


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a worker's traces."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "heartbeats" / "rank-0"))
    traces = step_traces.folder(tmp_path)
    traces.mkdir()
    return traces


def wanted(folder: Path, name: str, rank: int) -> Path:
    """Mark a trace as requested, and return its path."""
    file = step_traces.trace_file(folder, name, rank)
    step_traces.wanted_file(file).touch()
    return file


def train(worker: Traces, first: int, last: int) -> None:
    for step in range(first, last + 1):
        torch.ones(4, 4) @ torch.ones(4, 4)
        worker.after(step)
        worker.after(step)  # A script with a State that also reports its steps does this.


def test_it_holds_the_steps_that_were_asked_for_and_the_next_one_takes_its_turn(folder: Path) -> None:
    worker, expected = Traces(3), {"aa": ["step 6", "step 7"], "bb": ["step 8"]}
    train(worker, 1, 2)
    assert list(folder.iterdir()) == []
    files = {name: wanted(folder, name, 3) for name in expected}
    worker.ask(TraceSteps(6, 2, "aa"))
    train(worker, 3, 6)
    worker.ask(TraceSteps(0, 1, "bb"))
    train(worker, 7, 9)
    for name, steps in expected.items():
        file = files[name]
        until(file.exists, f"the trace {name}")
        parsed = json.loads(gzip.decompress(file.read_bytes()))
        marks = [event["name"] for event in parsed["trace"]["traceEvents"] if event["name"].startswith("step ")]
        assert (parsed["rank"], marks, parsed["flightRecorder"]) == (3, steps, {})
        multiplied = [event for event in parsed["trace"]["traceEvents"] if event["name"] == "aten::mm"]
        assert len(multiplied) == len(steps)
    left = {file.name for file in folder.iterdir() if not file.name.endswith(".wanted")}
    assert left == {file.name for file in files.values()}, "nothing else"


def test_one_that_is_too_large_is_not_left_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trace.step_traces, "MOST_BYTES", 100)
    worker, file = Traces(0), wanted(folder, "aa", 0)
    worker.ask(TraceSteps(0, 1, "aa"))
    train(worker, 1, 3)
    error = step_traces.error_file(file)
    until(error.exists, "the reason")
    assert "ask for fewer steps" in error.read_text()
    assert not file.exists()


def test_one_that_nobody_waits_for_any_more_is_not_made(folder: Path) -> None:
    worker = Traces(0)
    worker.ask(TraceSteps(0, 1, "aa"))
    train(worker, 1, 3)
    file = wanted(folder, "bb", 0)
    worker.ask(TraceSteps(0, 1, "bb"))
    train(worker, 4, 6)
    until(file.exists, "the next one")
    assert not step_traces.trace_file(folder, "aa", 0).exists()


def test_what_goes_wrong_is_said_and_training_goes_on(folder: Path) -> None:
    """The script has not imported torch."""
    file = wanted(folder, "aa", 0)
    code = """
from concertina_protocol.worker_channel import TraceSteps
from concertina_state.step_trace import Traces
worker = Traces(0)
worker.ask(TraceSteps(0, 1, "aa"))
for step in range(3):
    worker.after(step + 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "does not use torch" in done.stderr
    assert "does not use torch" in step_traces.error_file(file).read_text()

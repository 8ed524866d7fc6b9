"""Offline run of Weights & Biases, whose file is read back: 7 bytes of header, then LevelDB's log blocks of 32 KiB."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2 as pb

from concertina_protocol.tracking.tracking_records import Checkpointed, RunOutcome, StepDone
from concertina_tracking.about import About
from concertina_tracking.settings import Backend, TrackingSettings

BLOCK, HEADER = 32 << 10, 7


def records(path: Path) -> Iterator[pb.Record]:
    content, at, parts = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # This is a whole record, or the last part of one.
            yield pb.Record.FromString(parts)
            parts = b""


def test_a_run_has_each_step_once_its_parameters_and_its_checkpoints(tmp_path: Path) -> None:
    from concertina_tracking.trackers.wandb import WandbRun

    uri = f"file://{tmp_path}"
    settings = TrackingSettings(Backend.WANDB, uri, "project", "job", {"team": "x"}, "uid-1", "test/job", tmp_path)
    run = WandbRun(settings, About({"steps": "8"}, {"python": "3"}))
    run.log([StepDone(1, step, 1000.0 + step, {"loss": 1 / step}) for step in range(1, 6)])
    run.annotate("round.1", "2 workers")
    run.reference(Checkpointed(1, 5, 1.0, "s3://bucket/step-5"), {"images": "trainer@sha256:abc"})
    assert list(run.go_on(3, latest=True)) == [4, 5], "it forgets nothing"
    run.log([StepDone(2, 6, 1006.0, {"loss": 0.1})])
    run.end(RunOutcome.SUCCEEDED)
    run.close()

    (file,) = tmp_path.glob("wandb/offline-run-*/run-uid-1.wandb")
    run_records = list(records(file))
    rows = [
        {i.key or "/".join(i.nested_key): i.value_json for i in r.history.item}
        for r in run_records
        if r.HasField("history")
    ]
    assert [int(row["_step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert json.loads(rows[5]["loss"]) == 0.1
    (begun,) = {(r.run.run_id, r.run.project, r.run.display_name) for r in run_records if r.HasField("run")}
    assert begun == ("uid-1", "project", "job")
    text = file.read_bytes()
    assert b"s3://bucket/step-5" in text
    assert b"trainer@sha256:abc" in text
    assert b"2 workers" in text


class Server(BaseHTTPRequestHandler):
    """Server that implements the part of W&B's API with which a client begins a run and logs to it."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
        project = {"name": "project", "entity": {"name": "team"}}
        bucket = {"id": "1", "name": "uid-1", "displayName": "job", "config": "{}", "project": project}
        data: dict[str, object] = {}
        if "createRunFiles" in asked:
            data = {"createRunFiles": {"runID": "uid-1", "uploadHeaders": [], "files": []}}
        elif "upsertBucket" in asked:
            data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def test_what_goes_to_a_server_takes_no_room_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume of the spool may be memory, and a run of weeks has millions of steps."""
    from concertina_tracking.trackers.wandb import WandbRun

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = TrackingSettings(
        Backend.WANDB,
        f"http://127.0.0.1:{server.server_port}",
        "team/project",
        "job",
        {},
        "uid-1",
        "test/job",
        tmp_path,
    )
    settings.spool.mkdir()
    run = WandbRun(settings, About({}, {}))
    run.log([StepDone(1, step, 1000.0 + step, {"loss": 1 / step}) for step in range(1, 2001)])
    run.close()
    server.shutdown()
    sizes = {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert sizes, "it was never begun"
    assert sum(sizes.values()) < 100_000, sizes

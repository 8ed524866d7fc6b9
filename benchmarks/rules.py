"""What the chart's rules cost a real Prometheus: `python benchmarks/rules.py [--jobs N] [--pods N] [--json FILE]`.

Of so many jobs and pods the series that rules ask for, as operator and agents expose them, an hour and more of them at
a scrape each 15 s: `promtool` makes blocks of the past, and a Prometheus that has these scrapes on and evaluates the
rules each 15 s. Printed: seconds of an evaluation of the group as Prometheus itself measures them
(prometheus_rule_group_last_duration_seconds), what they are of the interval, which rules take the most, and the
processor time of the process. `make prometheus` has both programs."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import report
import yaml
from metrics import BEGUN, job, progress
from until import until

from concertina.controller.cache.cluster import ClusterCache
from concertina.controller.job_metrics import JobCollector
from concertina.local.binaries import programs
from concertina.local.host import processes
from concertina_agent.metrics import families as f
from concertina_agent.metrics.text import Sample, render
from concertina_agent.metrics.training import Training
from prometheus_client.exposition import generate_latest

RULES = Path(__file__).parents[1] / "charts" / "concertina" / "rules" / "concertina.yaml"
INTERVAL_SECONDS = 15
PAST_SECONDS = 4500
"""More than the hour that rules look back, and the twenty minutes that some look back from there."""
EVALUATIONS = 12
VALUE = re.compile(r"^(\S+) (\S+)$")


def asked_for(rules: dict[str, Any]) -> frozenset[str]:
    """Names of metrics."""
    expressions = " ".join(rule["expr"] for group in rules["groups"] for rule in group["rules"])
    return frozenset(re.findall(r"\b(?:concertina|leader_election)_\w+", expressions))


def series(jobs: int, pods: int, names: frozenset[str]) -> list[tuple[str, float]]:
    """Of one scrape of everything, those that rules ask for: with labels, and a value."""
    cache = ClusterCache(lambda uid: None, lambda uid: {})
    for number in range(jobs):
        cache.on_job(job(number, pods))
    lines = generate_latest(JobCollector([each.view for each in cache.jobs()], BEGUN)).decode().splitlines()
    for number in range(jobs):
        for index in range(pods):
            told = Training()
            told.on_progress(1, progress(), 0.0)
            samples = [*(told.samples(progress(), None, 0.0) if index == 0 else ()), Sample(f.WORKER_MEMORY, 1 << 30)]
            if index == 0:
                samples += [Sample(f.SHIPPED, 7), Sample(f.STORAGE_FAILURES, 0)]
            names_of = ("namespace", f"team-{number % 50}"), ("trainingjob", f"training-job-{number:04}")
            base = (*names_of, ("replica", f"training-job-{number:04}-{index}-0"))
            lines += render(samples, base).decode().splitlines()
    lines.append('leader_election_master_status{name="concertina-operator"} 1')
    found = (VALUE.match(line) for line in lines if line.partition("{")[0] in names)
    return [(each[1], float(each[2])) for each in found if each]


def past(file: Path, lines: list[tuple[str, float]], now: int) -> None:
    """The same again and again, a little more each time."""
    with file.open("w") as out:
        for at in range(now - PAST_SECONDS, now, INTERVAL_SECONDS):
            out.writelines(f"{name} {_at(value, at)} {at}\n" for name, value in lines)
        out.write("# EOF\n")


def _at(value: float, at: int) -> float:
    return value + at % 100_000 / 16 if value > 1 else value


@contextlib.contextmanager
def exposed(lines: list[tuple[str, float]]) -> Iterator[int]:
    """At that port, as it is when it is asked for."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            at = int(time.time())
            text = "".join(f"{name} {_at(value, at)}\n" for name, value in lines).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()


def ask(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
        return json.load(answer)["data"]


@contextlib.contextmanager
def prometheus(program: Path, folder: Path, target: int) -> Iterator[tuple[str, int]]:
    """Its address and process."""
    [port] = processes.free_ports("127.0.0.1", 1)
    scrapes = [{"job_name": "all", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}]
    often = {"scrape_interval": f"{INTERVAL_SECONDS}s", "evaluation_interval": f"{INTERVAL_SECONDS}s"}
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump({"global": often, "rule_files": [str(RULES)], "scrape_configs": scrapes}))
    command = [str(program), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until("Prometheus", 120.0, lambda: _ready(url))
        yield url, started.pid
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(60)


def _ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5):
        return True
    return False


def measure(url: str, pid: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """By row, an evaluation each; and seconds by rule, of the last one."""
    rows: dict[str, list[float]] = {"seconds of an evaluation": [], "part of the interval": []}
    seen, used = "", processes.processor_seconds(pid)
    began = time.monotonic()
    groups: list[Any] = []
    while len(rows["seconds of an evaluation"]) < EVALUATIONS:
        time.sleep(1)
        groups = ask(url, "rules")["groups"]
        [group] = groups
        if group["lastEvaluation"] != seen and not group["lastEvaluation"].startswith("0001"):
            seen = group["lastEvaluation"]
            rows["seconds of an evaluation"].append(group["evaluationTime"])
            rows["part of the interval"].append(group["evaluationTime"] / INTERVAL_SECONDS)
    took = time.monotonic() - began
    rows["processor of Prometheus, cores"] = [(processes.processor_seconds(pid) - used) / took]
    rules = {rule["name"]: rule["evaluationTime"] for group in groups for rule in group["rules"]}
    wrong = [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]
    if wrong:
        sys.exit(f"rules that could not be evaluated: {wrong}")
    return rows, rules

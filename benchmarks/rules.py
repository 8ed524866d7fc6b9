"""Cost of the chart's rules for a real Prometheus: `python benchmarks/rules.py [--jobs N] [--pods N] [--json FILE]`.

The benchmark generates the series that the rules query, for the given number of jobs and pods, as the operator and the
agents expose them. `promtool` makes blocks of more than an hour of past scrapes, one every 15 s. A Prometheus continues
with further scrapes and evaluates the rules every 15 s. The benchmark prints the seconds of an evaluation of the rule
group, as the API of Prometheus reports them, and their share of the interval. It also prints the slowest rules, and the
processor time of the process. `make prometheus` installs both programs.
"""

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
from measuring import processor_seconds
from metrics import BEGUN, job, progress
from prometheus_client.exposition import generate_latest
from until import until

from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.job_metrics import JobCollector
from concertina.local.binaries import programs
from concertina.local.host.linux_namespaces import die_with_parent
from concertina.local.host.processes import free_ports
from concertina_agent.metrics import families as f
from concertina_agent.metrics.exposition import MetricSample, render
from concertina_agent.metrics.training import Training

RULES = Path(__file__).parents[1] / "charts" / "concertina" / "rules" / "concertina.yaml"
INTERVAL_SECONDS = 15
PAST_SECONDS = 3900
"""Duration of the generated past in seconds. It is longer than the hour that rules look back."""
EVALUATIONS = 20
"""Number of evaluations of the rule group to wait for."""
OFTEN = "concertina"


def asked_for(rules: dict[str, Any]) -> frozenset[str]:
    """Return the names of the metrics that the rules use."""
    expressions = " ".join(rule["expr"] for group in rules["groups"] for rule in group["rules"])
    return frozenset(re.findall(r"\b(?:concertina|leader_election)_\w+", expressions))


def series(jobs: int, pods: int, names: frozenset[str]) -> list[tuple[str, float]]:
    """Return the series that the rules use, from one scrape of all targets: name with labels, and value."""
    cache = ClusterCache(lambda uid: None, lambda uid: {})
    for number in range(jobs):
        cache.on_job(job(number, pods))
    text = generate_latest(JobCollector([each.view for each in cache.jobs()], BEGUN))
    for number in range(jobs):
        for index in range(pods):
            text += _of_agent(number, index)
    lines = (line for line in text.decode().splitlines() if line.partition("{")[0] in names)
    values = [(name, float(value)) for name, _, value in (line.rpartition(" ") for line in lines)]
    return [*values, ('leader_election_master_status{name="concertina-operator"}', 1.0)]


def _of_agent(number: int, index: int) -> bytes:
    """Return the metrics of an agent in text form.

    All agents have workers, and the agent of pod 0 is the coordinator.
    """
    samples = [MetricSample(f.WORKER_MEMORY, 1 << 30)]
    if index == 0:
        training = Training()
        training.on_progress(1, progress(0), 0.0)
        samples += [
            *training.samples(progress(0), None, 0.0),
            MetricSample(f.SHIPPED, 7),
            MetricSample(f.STORAGE_FAILURES, 0),
        ]
    name = f"training-job-{number:04}"
    return render(samples, tuple(zip(f.POD_LABELS, (f"team-{number % 50}", name, f"{name}-{index}-0"), strict=True)))


def past(file: Path, lines: list[tuple[str, float]], now: int) -> None:
    """Write a file of past scrapes whose values increase slightly from scrape to scrape."""
    with file.open("w") as out:
        for at in range(now - PAST_SECONDS, now, INTERVAL_SECONDS):
            out.writelines(f"{name} {_at(value, at)} {at}\n" for name, value in lines)
        out.write("# EOF\n")


def _at(value: float, at: int) -> float:
    return value + at % 100_000 / 16 if value > 1 else value


@contextlib.contextmanager
def exposed(lines: list[tuple[str, float]]) -> Iterator[int]:
    """Serve the series over HTTP, and yield the port. The values depend on the time of the request."""

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
    """Run Prometheus, and yield its URL and its pid."""
    [port] = free_ports("127.0.0.1", 1)
    scrapes = [{"job_name": "all", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}]
    often = {"scrape_interval": f"{INTERVAL_SECONDS}s", "evaluation_interval": f"{INTERVAL_SECONDS}s"}
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump({"global": often, "rule_files": [str(RULES)], "scrape_configs": scrapes}))
    command = [str(program), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        address = f"--web.listen-address=127.0.0.1:{port}"
        started = subprocess.Popen([*command, address], stdout=log, stderr=log, preexec_fn=die_with_parent)
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
    """Return the seconds of each evaluation by row, and the seconds of the last evaluation by rule."""
    rows: dict[str, list[float]] = {}
    seen, used = dict[str, str](), processor_seconds(pid)
    began = time.monotonic()
    groups: list[Any] = []
    while len(rows.get(f"{OFTEN}: seconds", ())) < EVALUATIONS:
        time.sleep(1)
        groups = ask(url, "rules")["groups"]
        for group in groups:
            name, at = group["name"], group["lastEvaluation"]
            if at != seen.get(name) and not at.startswith("0001"):
                seen[name] = at
                rows.setdefault(f"{name}: seconds", []).append(group["evaluationTime"])
                rows.setdefault(f"{name}: part of the interval", []).append(group["evaluationTime"] / group["interval"])
    took = time.monotonic() - began
    rows["processor of Prometheus, cores"] = [(processor_seconds(pid) - used) / took]
    rules = {rule["name"]: rule["evaluationTime"] for group in groups for rule in group["rules"]}
    wrong = [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]
    if wrong:
        sys.exit(f"rules that could not be evaluated: {wrong}")
    return rows, rules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=10, help="of each job")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    program_paths = programs.ready(programs.PROMETHEUS)
    if not program_paths:
        sys.exit("there is no Prometheus here: `make prometheus`, once")
    lines = series(options.jobs, options.pods, asked_for(yaml.safe_load(RULES.read_text())))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with report.step(f"{len(lines)} series, {PAST_SECONDS} s of them"):
            past(folder / "past", lines, int(time.time()) // INTERVAL_SECONDS * INTERVAL_SECONDS)
            paths = (folder / "past", folder / "data")
            make = [str(program_paths["promtool"]), "tsdb", "create-blocks-from", "openmetrics", *map(str, paths)]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
            (folder / "past").unlink()
        with exposed(lines) as target, prometheus(program_paths["prometheus"], folder, target) as (url, pid):
            rows, rules = measure(url, pid)
    rows["series that rules ask for"] = [len(lines)]
    report.show(f"the chart's rules, {options.jobs} jobs of {options.pods} pods", rows, unit="")
    print("\n| rule | seconds |\n|---|---|")
    for name, seconds in sorted(rules.items(), key=lambda rule: -rule[1])[:8]:
        print(f"| {name} | {seconds:.3f} |")
    report.write(options.json, "rules", rows, jobs=options.jobs, pods=options.pods, rules=rules)


if __name__ == "__main__":
    main()

"""Real Prometheus, and promtool. `make prometheus` provides them, once."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.until import until
from concertina.local.binaries import programs
from concertina.local.host import linux_namespaces, processes

DURATION = re.compile(r"\b(\d+)([smh])\b")
MILLISECONDS = {"s": 1_000, "m": 60_000, "h": 3_600_000}
FOUND = programs.ready(programs.PROMETHEUS)
needed = pytest.mark.skipif(
    not FOUND, reason="there is no Prometheus here: `make prometheus`, once, or install Debian's package prometheus"
)


def promtool(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [FOUND["promtool"], *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query. Raises HTTPError if the query is invalid."""
        return self._get("query", query=expression)["result"]  # type: ignore[no-any-return]

    def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that are pending or firing."""
        return self._get("alerts")["alerts"]  # type: ignore[no-any-return]

    def targets(self) -> Mapping[str, str]:
        """Return the error of the last scrape of each address; empty if the scrape succeeded."""
        active = self._get("targets", state="active")["activeTargets"]
        return {each["scrapeUrl"]: each["lastError"] for each in active if each["health"] != "unknown"}

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data


def shortened(rules: Path, times: int, written: Path) -> Path:
    """Return the same rules with shorter times: each window, offset and `for` is divided, and nothing else changes."""

    def cut(match: re.Match[str]) -> str:
        return f"{int(match[1]) * MILLISECONDS[match[2]] // times}ms"

    content = yaml.safe_load(rules.read_text())
    for group in content["groups"]:
        for timed in (group, *group["rules"]):
            for field in {"interval", "expr", "for"} & timed.keys():
                timed[field] = DURATION.sub(cut, timed[field])
    written.write_text(yaml.safe_dump(content))
    return written


@contextlib.contextmanager
def serve(folder: Path, scrapes: Sequence[Mapping[str, Any]], rules: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes these targets each second, and evaluates the rules."""
    [port] = processes.free_ports("127.0.0.1", 1)
    often = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration = folder / "prometheus.yaml"
    configuration.write_text(
        yaml.safe_dump({"global": often, "rule_files": [str(rules)], "scrape_configs": list(scrapes)})
    )
    log = folder / "prometheus.log"
    command = [
        str(FOUND["prometheus"]),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=linux_namespaces.die_with_parent) as process,
    ):
        try:
            yield Prometheus(until(lambda: _ready(f"http://127.0.0.1:{port}"), "Prometheus", log.read_text))
        finally:
            process.terminate()


def _ready(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
            return url
    except OSError:
        return ""

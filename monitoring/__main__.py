"""Write dashboards and alerts into the chart (`python -m monitoring`), or compare them with it (`--check`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from monitoring.alerts import rules
from monitoring.boards import as_json
from monitoring.dashboards import DASHBOARDS

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "concertina"
RULES = CHART / "rules" / "concertina.yaml"


def files() -> Mapping[Path, str]:
    """Return the content of each dashboard and alert file in the chart, keyed by path."""
    header = "# Made by `make monitoring` from monitoring/alerts.py; not edited by hand.\n"
    written = {RULES: header + yaml.safe_dump(rules(), sort_keys=False, width=120, allow_unicode=True)}
    return written | {CHART / "dashboards" / f"{name}.json": as_json(made) for name, made in DASHBOARDS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write dashboards and alerts into the chart.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    check = parser.parse_args().check
    wanted = files()
    there = {*RULES.parent.glob("*"), *(CHART / "dashboards").glob("*")}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in (*stale, *sorted(there - wanted.keys())):
        if check:
            print(f"{path.relative_to(ROOT)} is not current: run `make monitoring`", file=sys.stderr)
        elif path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()
    return 1 if check and {*stale, *(there - wanted.keys())} else 0


if __name__ == "__main__":
    sys.exit(main())

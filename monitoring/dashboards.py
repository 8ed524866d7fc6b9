"""List of the four Grafana dashboards."""

from __future__ import annotations

from monitoring.boards import Board
from monitoring.fleet import FLEET
from monitoring.job import JOB
from monitoring.operator import OPERATOR
from monitoring.ranks import RANKS

DASHBOARDS: dict[str, Board] = {board.name: board for board in (FLEET, JOB, RANKS, OPERATOR)}

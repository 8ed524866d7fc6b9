"""The connection of this process to its agent (which is opened on first use), and the settings of the job.

Standard library only, Python 3.9+.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Mapping, Optional

if TYPE_CHECKING:
    from trainingjob._channel import Channel, Tracer


def agent_channel() -> Optional[Channel]:
    """Return the connection to the agent, or None outside of a job."""
    path, rank = os.environ.get("CONCERTINA_SOCKET"), os.environ.get("RANK")
    if not path or rank is None:
        return None
    from trainingjob import _channel  # imported here because it takes tens of milliseconds

    return _channel.connected(path, int(rank), make_tracer)


def checkpoint_settings() -> Mapping[str, Any]:
    """Return `spec.checkpoint` of the job, or an empty mapping if there is none."""
    return json.loads(os.environ.get("CONCERTINA_CHECKPOINT") or "null") or {}


def make_tracer(rank: int) -> Tracer:
    """Return the tracer of a rank."""
    from concertina_state.step_trace import Traces

    return Traces(rank)

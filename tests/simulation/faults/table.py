"""Tables of all faults. A fault is a function of the world and of a random generator of its own."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from simulation.faults import anomalies, control, lies, machines, partitions, processes

if TYPE_CHECKING:
    from simulation.runs.world import World

Fault = Callable[["World", Random], None]

CONDITIONS: dict[str, float] = {
    "unruly_network": 0.6,
    "crashing_operators": 0.5,
    "wrong_clocks": 0.25,
    "slow_starts": 0.15,
    "ever_slow_node": 0.1,
}
"""Conditions that hold from the start, and their probabilities."""

_FAULTS: tuple[Fault, ...] = (
    processes.kill_worker,
    processes.kill_agent,
    processes.restart_agent,
    processes.stop_agent,
    processes.stop_workers,
    processes.hang_worker,
    processes.out_of_memory,
    processes.break_replica,
    processes.damage_snapshots,
    machines.kill_node,
    machines.stop_node,
    machines.spot_notice,
    machines.sudden_end,
    machines.shut_down,
    machines.slow_node,
    machines.cordon,
    machines.no_image,
    partitions.isolate_node,
    partitions.cut_operator,
    partitions.cut_all_from_operator,
    partitions.cut_nodes,
    partitions.cut_from_peers,
    partitions.cut_from_control,
    partitions.cut_in_two,
    partitions.one_way,
    partitions.closed_door,
    partitions.closed_node,
    control.delete_pod,
    control.preempt_all,
    control.storage_down,
    control.api_down,
    control.quota,
    control.scale,
    control.suspend,
    control.kill_operator,
    control.second_operator,
    control.stop_operator,
)
_CONDITIONS: tuple[Fault, ...] = (
    partitions.unruly_network,
    control.crashing_operators,
    machines.wrong_clocks,
    machines.ever_slow_node,
    processes.slow_starts,
)
_ANOMALIES: tuple[Fault, ...] = (anomalies.bad_samples, anomalies.glitch, anomalies.flip_bits)
_MORE: tuple[Fault, ...] = (machines.set_clock, control.slow_api, control.refused_pods, lies.lying_agent)
_STARVE: tuple[Fault, ...] = (machines.starve,)
_ALONE: tuple[Fault, ...] = (
    anomalies.bad_run,
    control.delete_held_job,
    partitions.reset_connection,
    processes.die_passing_on,
)
"""Faults that have stories of their own: those that rightly end the job, those that must not be noticed, and those that
need another fault."""
BY_NAME: dict[str, Fault] = {
    fault.__name__: fault for fault in (*_FAULTS, *_CONDITIONS, *_ANOMALIES, *_MORE, *_STARVE, *_ALONE)
}
FAULTS: tuple[str, ...] = (*(fault.__name__ for fault in _FAULTS), "kill_worker", "kill_agent")
"""Faults. The most common ones are listed twice."""
ANOMALIES: tuple[str, ...] = tuple(fault.__name__ for fault in _ANOMALIES)
"""Faults of the training itself."""
MORE: tuple[str, ...] = tuple(fault.__name__ for fault in _MORE)
"""Faults that are drawn separately, so that FAULTS occur as often with them as without."""
STARVE: tuple[str, ...] = tuple(fault.__name__ for fault in _STARVE)
"""Faults that are drawn separately from all others, for the same reason."""
CALM = ("kill_operator", "second_operator", "api_down", "stop_operator")
CALM_MORE = ("set_clock", "slow_api")

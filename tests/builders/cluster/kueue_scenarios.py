"""Scenarios of Kueue's protocol with an external controller, which are recorded from the real controller.

`recorded()` reads the recordings. A stand-in for Kueue answers each write as the recordings say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from builders.cluster.protocol import Player, settled
from builders.cluster.queues import KUEUE, Client, cluster_queue, local_queue, priority_class, resource_flavor, workload

Object = dict[str, Any]
NAMESPACE = "team"
RECORDINGS = Path(__file__).resolve().parents[2] / "recordings/kueue/v0.19.2.json"
LEAST = -2147483648
"""Lowest priority: a growth slice with it preempts nothing in its own queue."""
QUEUES: tuple[tuple[str, Object], ...] = (
    ("resourceflavors", resource_flavor("spot", {"pool": "spot"})),
    ("workloadpriorityclasses", priority_class("high", 100)),
    ("clusterqueues", cluster_queue("alone", "spot", 4)),
    ("clusterqueues", cluster_queue("red", "spot", 2, cohortName="both")),
    ("clusterqueues", cluster_queue("blue", "spot", 2, cohortName="both")),
    *((f"namespaces/{NAMESPACE}/localqueues", local_queue(NAMESPACE, name, name)) for name in ("alone", "red", "blue")),
)
"""Objects of all scenarios: a queue by itself with 4 cpu, and two that share 2 + 2 cpu."""


def create_queues(client: Client) -> None:
    for kind, body in QUEUES:
        client.call("POST", f"{KUEUE}/{kind}", body)


def _make(name: str, count: int, priority: int = 0, queue: str = "alone", **more: Any) -> Object:
    return workload(NAMESPACE, name, queue, count, priority, **more)


def admit_and_finish(player: Player) -> None:
    """Play: a Workload fits, its pods become ready, and its job ends."""
    player.create(_make("a", 2))
    player.wait_admitted("a", 2)
    player.settle()
    player.ready("a")
    player.settle()
    player.finish("a")
    player.settle()
    player.remove("a")


def wait_for_quota(player: Player) -> None:
    """Play: a Workload waits, its count is walked down, and it is admitted when another one ends."""
    player.create(_make("a", 3))
    player.wait_admitted("a", 3)
    player.settle()
    player.create(_make("b", 4))
    player.wait_pending("b")
    player.settle()
    player.resize("b", 2)
    player.settle()
    player.finish("a")
    player.wait_admitted("b", 2)


def preempt_and_release(player: Player) -> None:
    """Play: a Workload is preempted, gives its quota back, waits, and is admitted again."""
    _preempted(player, 3)
    player.release("victim")
    player.wait_admitted("high", 3)
    player.settle()
    player.finish("high")
    player.wait_admitted("victim", 4)


def shrink_by_slice(player: Player) -> None:
    """Play: a preempted Workload shrinks to 1, a slice of 1 replaces it, and a slice of 4 grows back."""
    _shrunk(player)
    player.finish("high")
    player.settle()
    player.create(_make("grown", 4, LEAST, replaces="slice", first="victim"))
    player.wait_admitted("grown", 4)
    player.settle()
    player.patch("grown", {"spec": {"priority": 0}})


def shrink_by_steps(player: Player) -> None:
    """Play: a preempted Workload shrinks one by one until the preemptor fits."""
    _preempted(player, 2)
    player.resize("victim", 3)
    player.settle()
    player.resize("victim", 2)
    player.wait_admitted("high", 2)


def shrink_and_release(player: Player) -> None:
    """Play: a preempted Workload shrinks to 1 and is released: it is admitted again at 1, after the preemptor."""
    _preempted(player, 3)
    player.resize("victim", 1)
    player.wait_admitted("high", 3)
    player.settle()
    player.release("victim")
    player.wait_admitted("victim", 1)


def shrink_in_vain(player: Player) -> None:
    """Play: the preemptor needs all: a slice is not looked at, so it is removed and the victim released."""
    _preempted(player, 4)
    player.resize("victim", 1)
    player.settle()
    player.create(_make("slice", 1, replaces="victim"))
    player.settle()
    player.remove("slice")
    player.settle()
    player.release("victim")
    player.wait_admitted("high", 4)


def slice_before_shrink(player: Player) -> None:
    """Play: a slice waits without an answer while the Workload that it replaces still has the preemptor's quota."""
    _preempted(player, 3)
    player.create(_make("slice", 1, replaces="victim"))
    player.settle()
    player.resize("victim", 1)
    player.wait_admitted("slice", 1)


def shrunk_slice_preempted(player: Player) -> None:
    """Play: the slice after a shrink is preempted as well, released, and admitted again when there is room."""
    _shrunk(player)
    player.create(_make("higher", 1, 200))
    player.wait_evicted("slice")
    player.settle()
    player.release("slice")
    player.wait_admitted("higher", 1)
    player.settle()
    player.finish("high")
    player.wait_admitted("slice", 1)


def shrink_freely(player: Player) -> None:
    """Play: a running Workload shrinks without a preemption, and another one gets the quota."""
    player.create(_make("a", 4))
    player.wait_admitted("a", 4)
    player.settle()
    player.create(_make("b", 2))
    player.wait_pending("b")
    player.settle()
    player.resize("a", 2)
    player.wait_admitted("b", 2)


def growth_waits_for_room(player: Player) -> None:
    """Play: a growth slice of the lowest priority waits, is patched meanwhile, and is admitted when there is room."""
    for name in ("a", "b"):
        player.create(_make(name, 2))
        player.wait_admitted(name, 2)
        player.settle()
    player.create(_make("grown", 4, LEAST, replaces="a"))
    player.wait_pending("grown")
    player.settle()
    player.resize("grown", 3)
    player.settle()
    player.finish("b")
    player.wait_admitted("grown", 3)


def growth_turned_into_shrink(player: Player) -> None:
    """Play: a pending growth slice becomes the slice after a shrink when the running one is preempted."""
    player.create(_make("victim", 3))
    player.wait_admitted("victim", 3)
    player.settle()
    player.create(_make("other", 1, 200))
    player.wait_admitted("other", 1)
    player.settle()
    player.create(_make("grown", 4, LEAST, replaces="victim"))
    player.wait_pending("grown")
    player.settle()
    player.create(_make("high", 2, 100))
    player.wait_evicted("victim")
    player.settle()
    player.resize("grown", 1)
    player.settle()
    player.resize("victim", 1)
    player.wait_admitted("grown", 1)


def reclaim_in_cohort(player: Player) -> None:
    """Play: a queue that borrowed gives back by a shrink, and grows again when the other one has ended."""
    player.create(_make("red", 4, queue="red"))
    player.wait_admitted("red", 4)
    player.settle()
    player.create(_make("blue", 2, queue="blue"))
    player.wait_evicted("red")
    player.settle()
    player.resize("red", 2)
    player.wait_admitted("blue", 2)
    player.settle()
    player.create(_make("red-2", 2, queue="red", replaces="red"))
    player.wait_admitted("red-2", 2)
    player.settle()
    player.create(_make("red-3", 4, LEAST, queue="red", replaces="red-2", first="red"))
    player.wait_pending("red-3")
    player.settle()
    player.finish("blue")
    player.wait_admitted("red-3", 4)


def deactivate(player: Player) -> None:
    """Play: a person deactivates a Workload, and activates it again."""
    player.create(_make("a", 2))
    player.wait_admitted("a", 2)
    player.settle()
    player.patch("a", {"spec": {"active": False}})
    player.wait_evicted("a")
    player.settle()
    player.release("a")
    player.settle()
    player.patch("a", {"spec": {"active": True}})
    player.wait_admitted("a", 2)


def deactivate_beside_a_rival(player: Player) -> None:
    """Play: a Workload is deactivated while another one waits.

    Kueue lends the quota of an inactive Workload at once, although its admission remains.
    """
    player.create(_make("a", 4))
    player.wait_admitted("a", 4)
    player.settle()
    player.create(_make("b", 4))
    player.wait_pending("b")
    player.settle()
    player.patch("a", {"spec": {"active": False}})
    player.wait_admitted("b", 4)


def _preempted(player: Player, count: int) -> None:
    """Let a Workload of 4 be preempted by one of `count`."""
    player.create(_make("victim", 4))
    player.wait_admitted("victim", 4)
    player.settle()
    player.create(_make("high", count, 100))
    player.wait_evicted("victim")
    player.settle()


def _shrunk(player: Player) -> None:
    """Let a preempted Workload of 4 shrink to 1, with a slice in its place."""
    _preempted(player, 3)
    player.resize("victim", 1)
    player.wait_admitted("high", 3)
    player.settle()
    player.create(_make("slice", 1, replaces="victim"))
    player.wait_admitted("slice", 1)
    player.settle()


SCENARIOS: tuple[Callable[[Player], None], ...] = (
    admit_and_finish,
    wait_for_quota,
    preempt_and_release,
    shrink_by_slice,
    shrink_by_steps,
    shrink_and_release,
    shrink_in_vain,
    slice_before_shrink,
    shrunk_slice_preempted,
    shrink_freely,
    growth_waits_for_room,
    growth_turned_into_shrink,
    reclaim_in_cohort,
    deactivate,
    deactivate_beside_a_rival,
)


def recorded() -> Mapping[str, list[Object]]:
    """Return the steps of each scenario: a write, Kueue's answers, and the usage of each queue that changed."""
    recordings: Mapping[str, list[Object]] = json.loads(RECORDINGS.read_text())["scenarios"]
    return recordings


def write_recording(version: str, name: str, steps: list[Object]) -> None:
    """Replace one scenario in the recordings, with one line for each step."""
    scenarios = {**(recorded() if RECORDINGS.exists() else {}), name: steps}
    parts = [
        f"  {json.dumps(key)}: [\n" + ",\n".join(f"   {json.dumps(step)}" for step in value) + "\n  ]"
        for key, value in scenarios.items()
    ]
    RECORDINGS.parent.mkdir(parents=True, exist_ok=True)
    RECORDINGS.write_text(f'{{"kueue": {json.dumps(version)},\n "scenarios": {{\n' + ",\n".join(parts) + "\n }\n}\n")


def differences(expected: list[Object], actual: list[Object]) -> list[str]:
    """Return a line for each Workload whose last state after a write differs, with both states."""
    lines: list[str] = []
    for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
        if one["write"]["workload"] != other["write"]["workload"]:
            return [*lines, f"step {number} writes to {other['write']['workload']}, not {one['write']['workload']}"]
        wanted, got = settled(one), settled(other)
        lines += [
            f"step {number} ({one['write']['method']} {one['write']['workload']}): {name} is {got.get(name)}, "
            f"not {wanted.get(name)}"
            for name in sorted(wanted.keys() | got.keys())
            if wanted.get(name) != got.get(name)
        ]
    return lines + ([f"{len(actual)} steps, not {len(expected)}"] if len(actual) != len(expected) else [])

"""Faults of nodes: dead, stopped as a whole, without the image, with a clock of their own."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.runs.world import World

STRAGGLER_TOLD = 20.0
"""Seconds for which the windows of `concertina_agent.core.round.stragglers` may still name a rank that was slow."""
NODE_DEATH = 40.0
"""Seconds for which the pods of a dead node may be taken for lost."""


def some(world: World, random: Random) -> str:
    return random.choice(sorted(world.cluster.nodes))


def kill_node(world: World, random: Random) -> None:
    node = some(world, random)
    world.trouble(node, NODE_DEATH)
    world.cluster.kill_node(node)
    world.clock.after(random.uniform(5, 30), world.cluster.node_back, node)


def stop_node(world: World, random: Random) -> None:
    """Stop a node: its kernel answers and nothing else does. Then everything continues as before."""
    node, seconds = some(world, random), random.uniform(1, 30)
    world.tell(f"{node} stops for {seconds:.1f} s")
    world.trouble(node, seconds)
    world.cluster.stopped_until[node] = world.clock.now + seconds
    for process in world.agents.values():
        if process.host == node and process.alive:
            world.clock.freeze(process, seconds)
            if process.collective is not None:
                process.collective.stopped[process.replica] = world.clock.now + seconds
    world.cluster.watch_node(node)


def spot_notice(world: World, random: Random) -> None:
    """Announce the end of a node by a taint. Usually the node ends after a while; sometimes it was a false alarm."""
    node, seconds = some(world, random), random.uniform(2, 20)
    world.tell(f"{node} is tainted: it goes in {seconds:.1f} s")
    world.trouble(node, NODE_DEATH + seconds)
    world.cluster.mark_node(node, notice="karpenter.sh/disrupted")
    world.clock.after(seconds, _goes, world, node, random.random() < 0.7, random.uniform(5, 20))


def _goes(world: World, node: str, truly: bool, seconds: float) -> None:
    if truly and not world.mended:
        world.cluster.kill_node(node)
        world.clock.after(seconds, world.cluster.node_back, node)
    world.clock.after(seconds, _untainted, world, node)


def _untainted(world: World, node: str) -> None:
    world.cluster.mark_node(node, notice="")


def sudden_end(world: World, random: Random) -> None:
    """Give a node a notice with hardly any time: it is gone before a drain can be finished."""
    node, seconds = some(world, random), random.uniform(0.05, 1.5)
    world.tell(f"{node} is tainted: it goes in {seconds:.2f} s")
    world.trouble(node, NODE_DEATH)
    world.cluster.mark_node(node, notice="aws-node-termination-handler/spot-itn")
    world.clock.after(seconds, _goes, world, node, True, random.uniform(5, 20))


def shut_down(world: World, random: Random) -> None:
    """Shut down a node, or all nodes, in order.

    The kubelet tells all containers to stop, and ends their pods as Terminated.
    """
    nodes = sorted(world.cluster.nodes) if random.random() < 0.3 else [some(world, random)]
    grace, seconds = random.choice((0.3, 1.0, 3.0, 10.0)), random.uniform(5, 20)
    for node in nodes:
        world.tell(f"{node} is shut down, with {grace:g} s for its pods")
        world.trouble(node, NODE_DEATH)
        world.cluster.shut_down(node, grace)
        world.clock.after(grace + seconds, world.cluster.node_back, node)


def slow_node(world: World, random: Random) -> None:
    """Make steps take longer on a node, permanently."""
    _slow_down(world, random, random.uniform(15, 40))


def ever_slow_node(world: World, random: Random) -> None:
    """Set a condition of the run: steps take longer on a node from the start."""
    _slow_down(world, random, 1000.0)


def _slow_down(world: World, random: Random, seconds: float) -> None:
    node, factor = some(world, random), random.uniform(3, 5)
    world.tell(f"{node} is {factor:.1f} times slower than the others")
    world.slow_nodes[node] = factor
    world.invariants.slow_until[node] = world.clock.now + seconds + STRAGGLER_TOLD
    world.clock.after(seconds, _fast_again, world, node)


def _fast_again(world: World, node: str) -> None:
    world.slow_nodes.pop(node, None)


def starve(world: World, random: Random) -> None:
    """Make agents of some nodes answer Pings at once and Prepares late, because their workers end slowly."""
    nodes = [node for node in sorted(world.cluster.nodes) if random.random() < 0.6]
    seconds = random.uniform(5, 40)
    world.tell(f"workers on {', '.join(nodes)} end late for {seconds:.1f} s")
    world.starved = {node: random.uniform(0.6, 2.5) for node in nodes}
    world.clock.after(seconds, _fed, world)


def _fed(world: World) -> None:
    world.starved.clear()


def cordon(world: World, random: Random) -> None:
    node, seconds = some(world, random), random.uniform(5, 30)
    world.tell(f"{node} is cordoned for {seconds:.1f} s")
    world.trouble(node, seconds)
    world.cluster.mark_node(node, cordoned=True)
    world.clock.after(seconds, _uncordoned, world, node)


def _uncordoned(world: World, node: str) -> None:
    world.cluster.mark_node(node, cordoned=False)


def no_image(world: World, random: Random) -> None:
    node, seconds = some(world, random), random.uniform(5, 60)
    world.tell(f"{node} can't pull the image for {seconds:.1f} s")
    world.cluster.no_image_until[node] = world.clock.now + seconds


def set_clock(world: World, random: Random) -> None:
    """Set the wall clock of the operator or a node by up to an hour; often it is corrected soon."""
    host = world.operators[-1].name if random.random() < 0.6 else some(world, random)
    seconds = random.choice((-1, 1)) * random.choice((random.uniform(1, 30), random.uniform(30, 3600)))
    _set(world, host, seconds)
    if random.random() < 0.4:
        world.clock.after(random.uniform(1, 20), _set, world, host, -seconds)


def _set(world: World, host: str, seconds: float) -> None:
    world.tell(f"the clock of {host} is set {'back' if seconds < 0 else 'forward'} by {abs(seconds):.0f} s")
    world.clocks[host] = world.clock_of(host) + seconds
    if host not in world.cluster.nodes:
        world.invariants.clock_was_set = True
        world.invariants.farthest = max(world.invariants.farthest, world.clocks[host])


def wrong_clocks(world: World, random: Random) -> None:
    """Set a condition of the run: the clocks of nodes are off by minutes, and those of operators by seconds.

    Operators run on nodes with NTP, because nothing in the cluster would work without it.
    """
    world.clocks = {node: random.uniform(-300, 300) for node in world.cluster.nodes if random.random() < 0.6}
    world.clocks |= {f"operator-{i}": random.uniform(-3, 3) for i in range(20)}
    off = ", ".join(f"{node} {seconds:+.0f} s" for node, seconds in world.clocks.items() if node.startswith("node"))
    world.tell(f"clocks are off: {off}")

"""Faults of the network. Its hosts are nodes, operators, "api" and "s3"."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.faults.machines import some

if TYPE_CHECKING:
    from simulation.runs.world import World


def isolate_node(world: World, random: Random) -> None:
    """Isolate a node from all hosts, as if it fell off the network.

    After healing, its old processes are still there.
    """
    node, seconds = some(world, random), random.uniform(0.5, 25)
    world.tell(f"{node} is cut off for {seconds:.1f} s")
    world.trouble(node, seconds)
    world.network.isolate(node, seconds)
    world.cluster.watch_node(node)


def cut_operator(world: World, random: Random) -> None:
    node, seconds = some(world, random), random.uniform(0.5, 25)
    operator = world.operators[-1].name
    world.tell(f"{operator} and {node} can't reach each other for {seconds:.1f} s")
    world.trouble(node, seconds)
    world.network.cut(operator, node, seconds)


def cut_all_from_operator(world: World, random: Random) -> None:
    """Cut all agents off from the operator. The round continues, and kubelets still reach the API server."""
    seconds, operator = random.uniform(1, 40), world.operators[-1].name
    world.tell(f"{operator} reaches no node for {seconds:.1f} s")
    for node in world.cluster.nodes:
        world.trouble(node, seconds)
        world.network.cut(operator, node, seconds)


def cut_nodes(world: World, random: Random) -> None:
    """Cut the link between two nodes.

    A member then reaches the operator and some members, but not one of them, which may be the coordinator.
    """
    a, b = some(world, random), some(world, random)
    if a != b:
        seconds = random.uniform(0.5, 20)
        world.tell(f"{a} and {b} can't reach each other for {seconds:.1f} s")
        world.network.cut(a, b, seconds)


def cut_from_peers(world: World, random: Random) -> None:
    """Cut a node off from the other nodes, but not from the operator and the API server.

    If the coordinator is on it, the coordinator reaches no member and accuses all of them.
    """
    coordinator = world.status.world.coordinator
    pod = world.cluster.pods.get(coordinator or "")
    node = pod.node if pod is not None and pod.node and random.random() < 0.6 else some(world, random)
    seconds = random.uniform(1, 40)
    world.tell(f"{node} reaches no other node for {seconds:.1f} s")
    world.trouble(node, seconds)
    for other in world.cluster.nodes:
        if other != node:
            world.network.cut(node, other, seconds)


def cut_from_control(world: World, random: Random) -> None:
    """Cut a node off from the operator and the API server, but not from the other nodes."""
    node, seconds = some(world, random), random.uniform(1, 30)
    world.tell(f"{node} reaches its peers only, for {seconds:.1f} s")
    world.trouble(node, seconds)
    for other in ("api", world.operators[-1].name):
        world.network.cut(node, other, seconds)
    world.cluster.watch_node(node)


def cut_in_two(world: World, random: Random) -> None:
    """Divide the nodes into two parts; the operator reaches both."""
    nodes, seconds = sorted(world.cluster.nodes), random.uniform(1, 30)
    one = set(random.sample(nodes, max(1, len(nodes) // 2)))
    world.tell(f"{', '.join(sorted(one))} and the other nodes can't reach each other for {seconds:.1f} s")
    for node in nodes:
        world.trouble(node, seconds)
        for other in one - {node}:
            if node not in one:
                world.network.cut(node, other, seconds)


def one_way(world: World, random: Random) -> None:
    """Lose all messages from one host to another. Messages in the other direction arrive."""
    sender, receiver = _link(world, random)
    seconds = random.uniform(0.5, 25)
    world.tell(f"what {sender} sends to {receiver} is lost for {seconds:.1f} s")
    _trouble(world, (sender, receiver), seconds)
    world.network.lose(sender, receiver, seconds)


def closed_door(world: World, random: Random) -> None:
    """Keep one host from opening connections to another, as a firewall or a policy may.

    The other host can open connections, and open connections stay open.
    """
    caller, called = _link(world, random)
    seconds = random.uniform(0.5, 40)
    world.tell(f"{caller} can't call {called} for {seconds:.1f} s")
    _trouble(world, (caller, called), seconds)
    world.network.close(caller, called, seconds)


def closed_node(world: World, random: Random) -> None:
    """Keep all peers from opening connections to a node that can reach them: its members can't join it."""
    node, seconds = some(world, random), random.uniform(1, 40)
    world.tell(f"no node can call {node} for {seconds:.1f} s")
    world.trouble(node, seconds)
    for other in world.cluster.nodes:
        if other != node:
            world.network.close(other, node, seconds)


def reset_connection(world: World, random: Random) -> None:
    """Reset the connection of a member to its coordinator. Both live, and can reach each other at once."""
    members = [name for name, process in sorted(world.agents.items()) if process.follows]
    if members:
        name = random.choice(members)
        world.tell(f"the connection of {name} to its coordinator is reset")
        world.agents[name].reset_stream()


def _link(world: World, random: Random) -> tuple[str, str]:
    """Return a link between two nodes, or between a node and the operator."""
    a, b = some(world, random), some(world, random)
    if a == b:
        b = world.operators[-1].name
    return (a, b) if random.random() < 0.5 else (b, a)


def _trouble(world: World, hosts: tuple[str, str], seconds: float) -> None:
    for host in hosts:
        world.trouble(host, seconds)


def unruly_network(world: World, random: Random) -> None:
    """Set a condition of the run: messages are lost, doubled and delayed."""
    world.network.unruly = True

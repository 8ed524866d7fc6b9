"""Table of the drills: their faults, and the expectations that a job must meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from concertina.drill.faults import api_server, by_object, in_container, local_cluster, tenants
from concertina.drill.faults.by_command import ByCommand
from concertina.drill.target import OUTAGE, STANDSTILL, DrillTarget, Fault, ProgressSource
from concertina.drill.verdict import Expect
from concertina.terminal.cluster_connection import UserError


@dataclass(frozen=True)
class Scenario:
    """Fault of a drill, and the expectations that the job must meet.

    `local` is the fault on a local cluster, and `elsewhere` the fault on other clusters. If a fault can't be injected
    there, the field is a sentence with the reason.
    """

    about: str
    local: Fault | str
    elsewhere: Fault | str
    expect: Expect

    def fault(self, target: DrillTarget) -> Fault:
        """Return the fault for the cluster on which the job runs.

        Raises:
            UserError: When the fault can't be injected on this cluster.
        """
        fault = self.local if target.local else self.elsewhere
        if isinstance(fault, str):
            raise UserError(fault)
        if isinstance(fault, ByCommand):
            fault.commands()
        return fault


CRASH = Expect(seconds=30.0, counted=True)
LOST_NODE = Expect(seconds=30.0, counted=False)
UNTOUCHED = Expect(seconds=60.0, new_round=False, replayed=0, counted=False)

SCENARIOS: dict[str, Scenario] = {
    "kill-worker": Scenario(
        "a training process is killed", api_server.kill_worker, api_server.kill_worker, CRASH,
    ),
    "kill-coordinator": Scenario(
        "the agent of the member that coordinates is killed, elsewhere its whole pod",
        local_cluster.kill_coordinator, api_server.kill_coordinator_pod, Expect(seconds=30.0),
    ),
    "kill-node": Scenario(
        "a node loses power, its peers see connections closed",
        local_cluster.kill_node,
        ByCommand("NODE_KILL", "NODE_UP", "killed node {node}"), LOST_NODE,
    ),
    "stop-node": Scenario(
        "a node falls silent, and later goes on where it was",
        local_cluster.stop_node,
        ByCommand("NODE_STOP", "NODE_CONTINUE", "silenced node {node}"), LOST_NODE,
    ),
    "partition": Scenario(
        "a node is cut off, all on it runs on, and later is reached again: what it did meanwhile counts for nothing",
        "The nodes of the local cluster share one network, which can't be cut between them. `stop-node` comes near; "
        "on real kubelets `make test-e2e` plays this one.",
        ByCommand("NODE_ISOLATE", "NODE_REJOIN", "cut off node {node}"), LOST_NODE,
    ),
    "notice": Scenario(
        "a pod is evicted, as by `kubectl drain`; no step is lost",
        api_server.evict, api_server.evict, Expect(seconds=60.0, replayed=0, counted=False),
    ),
    "oom": Scenario(
        "a worker's container runs out of memory, and the kernel kills the worker",
        "The containers of the local cluster have no memory limit, and a SIGKILL alone is no want of memory: on real "
        "kubelets `make test-e2e` plays this one.",
        in_container.out_of_memory, Expect(seconds=30.0, counted=True, reasons=("OutOfMemory",)),
    ),
    "hang": Scenario(
        "a worker stands still, its connections stay open",
        api_server.hang, api_server.hang, Expect(seconds=120.0, counted=True, reasons=("WorkerStopped", "Hang")),
    ),
    "straggle": Scenario(
        "a worker is slow (stopped for moments whenever it computes), and the others wait for it in every step",
        in_container.straggle, in_container.straggle,
        Expect(seconds=100.0, new_round=None, replayed=0, counted=False, named=True),
    ),
    "operator-kill": Scenario(
        "the operator is killed; the job must not notice",
        local_cluster.kill_operator, api_server.delete_operator, UNTOUCHED,
    ),
    "operator-stop": Scenario(
        f"the operator stands still for {STANDSTILL:g} s and goes on where it was; the job must not notice",
        local_cluster.stop_operator,
        ByCommand(
            "OPERATOR_STOP", "OPERATOR_CONTINUE", "stopped the operator {operator}", ProgressSource.LOGS, STANDSTILL
        ),
        UNTOUCHED,
    ),
    "operator-partition": Scenario(
        "the operator reaches no agent of the job, only the API server; the job must not notice, and says so",
        "The nodes of the local cluster share one network, in which an operator can't be cut off. `operator-stop` "
        "comes near; on real kubelets `make test-e2e` plays this one.",
        by_object.part_operator, replace(UNTOUCHED, told=("AgentsUnreachable",)),
    ),
    "refused-pods": Scenario(
        "a pod is killed while a broken webhook lets no other be made; those left go on, and it comes back later",
        by_object.refuse_pods, by_object.refuse_pods,
        Expect(seconds=30.0, counted=False, told=("PodRefused", by_object.HOOK)),
    ),
    "hostile-agent": Scenario(
        "a worker is killed while a pod of another namespace floods the operator, in a namespace made for that",
        tenants.hostile_agent, tenants.hostile_agent, CRASH,
    ),
    "long-queue": Scenario(
        "a worker is killed while many jobs wait for room, in namespaces made for that",
        tenants.long_queue, tenants.long_queue, CRASH,
    ),
    "apiserver-restart": Scenario(
        f"the API server is killed and {OUTAGE:g} s later started again; the job must not notice",
        local_cluster.kill_apiserver,
        ByCommand("APISERVER_STOP", "APISERVER_START", "stopped the API server", ProgressSource.NOTHING, OUTAGE),
        UNTOUCHED,
    ),
    "storage-outage": Scenario(
        f"durable storage is away for {OUTAGE:g} s; training continues, a checkpoint follows",
        local_cluster.kill_storage,
        ByCommand("STORAGE_STOP", "STORAGE_START", "stopped the storage", seconds=OUTAGE),
        Expect(seconds=60.0, new_round=False, replayed=0, counted=False, checkpoint=True),
    ),
}  # fmt: skip

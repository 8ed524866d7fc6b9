"""Node taints that announce the termination of a node, as set by well-known tools and clouds.

The list is part of the code, so an upgrade of the operator can extend it (decision "The well-known taints are in
code").

Each entry is a taint's key. If the key can also have another meaning, the entry is key=value. These taints are left
out:

- taints that a node has for its whole life (kubernetes.azure.com/scalesetpriority, on each spot node);
- taints that may be removed again (DeletionCandidateOfClusterAutoscaler);
- taints for problems that may pass (node.kubernetes.io/not-ready, and the taints for pressure);
- node.kubernetes.io/out-of-service, which says that the node is already off. `NodeView.out_of_service` shows this
  taint.
"""

from __future__ import annotations

NOTICE_TAINTS = (
    # AWS node termination handler, with taintNode
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "aws-node-termination-handler/rebalance-recommendation",
    # GKE: a spot VM or a GPU host that is about to be reclaimed or maintained
    "cloud.google.com/impending-node-termination",
    # AKS: drain after a scheduled event, and node auto-repair by its two names
    "remediator.aks.microsoft.com/unschedulable",
    "remediator.kubernetes.azure.com/unschedulable",
    # every cloud controller manager: the instance is shut down
    "node.cloudprovider.kubernetes.io/shutdown",
    # Karpenter from 1.0, and before
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption=disrupting",
    # cluster autoscaler: scale-down has begun
    "ToBeDeletedByClusterAutoscaler",
)


def parse(text: str) -> tuple[str, ...]:
    """Return the taints in a comma-separated list, such as the value of CONCERTINA_NOTICE_TAINTS."""
    return tuple(name for part in text.split(",") if (name := part.strip()))

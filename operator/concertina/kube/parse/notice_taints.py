"""Taints that announce the end of a node, as well-known tools and clouds set them.

They are in the code, so that an upgrade of the operator extends the list (decision "The well-known taints are in
code").

Each entry is a key, or key=value when the key alone has another meaning. The list excludes marks that a node has for
its whole life (kubernetes.azure.com/scalesetpriority, on every spot node), candidates that may be dropped
(DeletionCandidateOfClusterAutoscaler), problems that may pass (node.kubernetes.io/not-ready and the pressures), and
node.kubernetes.io/out-of-service, which means that the node is off already: NodeView has a field for it.
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
    """Return the entries of a comma-separated list, such as CONCERTINA_NOTICE_TAINTS."""
    return tuple(name for part in text.split(",") if (name := part.strip()))

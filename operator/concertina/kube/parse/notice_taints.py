"""The taints that announce the end of a node, as the well-known tools and clouds set them; here, so that the list grows
with an upgrade of the operator (decision "The well-known taints are in code").

Each is a key, or key=value where the key alone says something else. Not among them: marks that a node bears all its
life (kubernetes.azure.com/scalesetpriority, of every spot node), candidates that nothing may come of
(DeletionCandidateOfClusterAutoscaler), troubles that may pass (node.kubernetes.io/not-ready and the pressures), and
node.kubernetes.io/out-of-service, which says that the node is off already: NodeView has that on its own.
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
    """A list with commas, as in CONCERTINA_NOTICE_TAINTS."""
    return tuple(name for part in text.split(",") if (name := part.strip()))

"""Run the pods of a node as a kubelet does."""

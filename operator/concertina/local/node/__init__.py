"""Node agent of the local cluster, which registers a Node and runs the pods bound to it, as a kubelet does."""

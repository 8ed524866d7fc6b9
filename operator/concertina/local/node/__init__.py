"""Node agent of the local cluster: registers a Node and runs the pods bound to it, as a kubelet does."""

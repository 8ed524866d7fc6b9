"""Node agent: registers one Node and runs the pods that are bound to it, as a kubelet does."""

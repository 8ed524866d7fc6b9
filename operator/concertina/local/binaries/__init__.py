"""Programs that the local cluster runs, such as kube-apiserver: found on PATH, downloaded, or built from Go modules."""

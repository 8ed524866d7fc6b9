"""Programs of the local cluster, such as kube-apiserver.

They are found on PATH, downloaded, or built from Go modules.
"""

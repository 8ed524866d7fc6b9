"""etcd, the API server, the controller manager and the scheduler as processes, and a client for the API server."""

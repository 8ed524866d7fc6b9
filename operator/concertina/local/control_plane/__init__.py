"""etcd, API server, controller manager and scheduler as processes, and a client for the API server."""

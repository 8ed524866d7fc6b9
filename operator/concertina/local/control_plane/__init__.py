"""etcd, the API server, the controller manager and the scheduler, as processes; how the launcher asks them."""

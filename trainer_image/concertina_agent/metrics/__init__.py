"""What this agent tells Prometheus: of rank 0's training, of the workers of its pod, of the pod's network and its GPUs.
Scrapes are answered in a thread of their own; the agent's loop is asked for what it knows, once a scrape."""

"""Connection to a cluster, and views of jobs, that the commands share."""

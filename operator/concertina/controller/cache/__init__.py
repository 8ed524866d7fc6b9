"""What the operator knows of the cluster; `cluster` gives one consistent look at one job after the other."""

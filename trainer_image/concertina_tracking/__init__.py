"""Ships what a coordinator's agent tells of a run to MLflow, Weights & Biases or TensorBoard files.

`process` is the process that the agent starts; `shipper` decides what of the spool is shipped, and that nothing is
twice; `tracker` is the interface that the modules of `trackers` fill in, one a tool. Python 3.10, the protocol and the
tool alone: it runs in images of users."""

"""Shipping of the run's records to MLflow, Weights & Biases or TensorBoard files.

The coordinator's agent writes the records and starts `process`. `shipper` decides which records of the spool are
shipped, and ensures that none is shipped twice. `tracker` is the interface that the modules of `trackers` implement,
one per tool. The package requires Python 3.9, the protocol and the tool only, because it runs in users' images.
"""

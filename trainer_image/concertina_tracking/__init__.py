"""Export of a run's records to MLflow, Weights & Biases or TensorBoard files.

The coordinator's agent writes records of the run into a spool folder and starts `process`, which sends them to the
tool. `shipper` selects the records to send, and ensures that none is sent twice. `tracker` is the interface to a tool.
`trackers` has one implementation for each tool.

The package runs in users' images, so it requires only Python 3.9, `concertina_protocol` and the tool.
"""

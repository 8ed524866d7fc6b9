"""Export of a run's records to MLflow, Weights & Biases or TensorBoard files.

The coordinator's agent writes records of the run into a spool folder and starts `process`, which sends them to the
tool. The module `shipper` selects the records to send, and ensures that no step is logged twice. `tracker` is the
interface to a tool. `trackers` has one implementation for each tool.

The package runs in users' images, so it requires only Python 3.9, `concertina_protocol` and the tool.
"""

"""Parallel layouts of the model: FSDP2, tensor, context, pipeline and expert parallelism, and their collectives."""

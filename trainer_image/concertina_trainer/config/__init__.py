"""Configuration of the bundled trainer: `spec.trainer`, `spec.checkpoint` and `spec.parallelism`.

Each section of `spec.trainer` has a module. The operator imports this package, so it does not import torch. Names are
camelCase in YAML and snake_case in Python. An unknown name is an error. The unit of a size (layers, elements, tokens or
sequences) is in its description.
"""

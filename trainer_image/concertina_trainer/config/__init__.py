"""Configuration of the bundled trainer: a module for each section of `spec.trainer`, and two sections beside it.

The operator imports this package, so it does not import torch. Names are camelCase in YAML and snake_case in Python. An
unknown name is an error. Sizes are counted in layers, elements, tokens or sequences, as each description says.
"""

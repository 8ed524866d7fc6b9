"""The bundled trainer's configuration: a file a section of `spec.trainer`, and the two sections beside it that it
reads. No torch here: the operator imports this.

In YAML the names are camelCase, in Python snake_case; a name that is not here is an error. Sizes are counted in
layers, elements, tokens or sequences, as each description says.
"""

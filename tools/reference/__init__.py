"""The generated pages of docs/reference, each one made from the code that it describes.

`python -m tools.reference` writes the pages, and `--check` names those that differ from the code.
"""

"""Generator of the pages in docs/reference. Each page is generated from the code that it describes.

`python -m tools.reference` writes the pages. `--check` lists pages that are out of date.
"""

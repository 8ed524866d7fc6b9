"""In pods that have the folder above on their PYTHONPATH, `tiny` is the bundled trainer: the real agent runs it under
the name that it knows, and nothing imports torch."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "tiny")]

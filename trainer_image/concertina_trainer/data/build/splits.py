"""Split of a data set (such as train or test) that a file belongs to, derived from the file's name."""

from __future__ import annotations

import re

TRAINING = "train"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAINING),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Split that a word in a file's name denotes, keyed by the word. The words are those of the Hugging Face Hub."""


def split_of(name: str) -> str:
    """Return the split that a file belongs to, or "" if its path does not show one.

    The function looks for a word such as `train` in the file's own name, and then in the names of its folders,
    beginning with the innermost (https://huggingface.co/docs/hub/datasets-file-names-and-splits).
    """
    for part in reversed(name.lower().split("/")):
        splits = [SPLITS[word] for word in re.split(r"[^a-z]+", part) if word in SPLITS]
        if splits:
            return splits[0]
    return ""

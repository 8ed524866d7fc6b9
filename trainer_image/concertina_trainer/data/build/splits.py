"""Split of a file of data, by its name."""

from __future__ import annotations

import re

TRAINING = "train"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAINING),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Split by the word that file names use for it, as Hugging Face's hub reads them."""


def split_of(name: str) -> str:
    """Return the split of a file by the words of its name, else by those of its folders, from the innermost out.

    The result is "" if no word is a split's (https://huggingface.co/docs/hub/datasets-file-names-and-splits).
    """
    for part in reversed(name.lower().split("/")):
        splits = [SPLITS[word] for word in re.split(r"[^a-z]+", part) if word in SPLITS]
        if splits:
            return splits[0]
    return ""

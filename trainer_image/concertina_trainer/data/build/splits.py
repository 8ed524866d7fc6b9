"""Which split a file of data is of, by its name."""

from __future__ import annotations

import re

TRAINING = "train"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAINING),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""By what names of files call them, as Hugging Face's hub reads them."""


def split_of(name: str) -> str:
    """Of a file of data, by the words of its name, else by those of its folders, from the innermost out: "" where none
    is a split's (https://huggingface.co/docs/hub/datasets-file-names-and-splits)."""
    for part in reversed(name.lower().split("/")):
        found = [SPLITS[word] for word in re.split(r"[^a-z]+", part) if word in SPLITS]
        if found:
            return found[0]
    return ""

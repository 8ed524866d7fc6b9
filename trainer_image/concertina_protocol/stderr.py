"""Writing of lines to the stderr of a training process.

The module uses the standard library only and supports Python 3.9 and later.
"""

import sys


def write_line(sentence: str) -> None:
    """Write a line to stderr in a single system call.

    If PYTHONUNBUFFERED is set, as it is in workers, `print` makes two calls: one for the sentence and one for the
    newline. Another process with the same stderr, such as one of a DataLoader, could write between them.
    """
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()

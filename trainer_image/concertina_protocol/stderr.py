"""Lines on the standard error of a training process.

The module uses the standard library only and supports Python 3.9 and later.
"""

import sys


def write_line(sentence: str) -> None:
    """Write a line to stderr in a single system call.

    `print` makes two calls if PYTHONUNBUFFERED is set, as it is in workers. Processes that share the stream, such as
    those of a DataLoader, could then write between the sentence and the end of its line.
    """
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()

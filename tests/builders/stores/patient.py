"""A request to a server that is only starting."""

import time
import urllib.error
import urllib.request

GIVE_UP = 120
"""Seconds until it must."""


def answer(request: urllib.request.Request) -> bytes:
    """Waits until it listens. Raises HTTPError where it refuses."""
    deadline = time.monotonic() + GIVE_UP
    while True:
        try:
            with urllib.request.urlopen(request) as opened:
                return bytes(opened.read())
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)

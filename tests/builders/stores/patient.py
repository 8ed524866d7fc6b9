"""Request to a server that is still starting."""

import time
import urllib.error
import urllib.request

GIVE_UP = 120
"""Seconds within which the server must answer."""


def answer(request: urllib.request.Request) -> bytes:
    """Return the answer as soon as the server listens.

    Raises:
        HTTPError: If the server refuses the request.
        OSError: If it does not listen in time.
    """
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

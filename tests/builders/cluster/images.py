"""Images for a cluster that does not pull any: a command from the environment loads them onto its nodes."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable

VARIABLE = "CONCERTINA_E2E_LOAD"
"""Command with {image} (the image's whole name) and {name} (its last part without tag), as `kind load docker-image
{image}` or `load out/{name}.tar {image}`. Empty: the cluster pulls its images."""


def name_of(image: str) -> str:
    """Return the last part of an image's name: `agent` of registry:5000/concertina/agent:1 or of agent@sha256:..."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]


def load(images: Iterable[str], command: str | None = None) -> list[list[str]]:
    """Load each image once, and return the commands that were run."""
    command = os.environ.get(VARIABLE, "") if command is None else command
    done: list[list[str]] = []
    for image in dict.fromkeys(images if command else ()):
        words = [word.replace("{image}", image).replace("{name}", name_of(image)) for word in shlex.split(command)]
        subprocess.run(words, check=True)
        done.append(words)
    return done

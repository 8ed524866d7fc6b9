"""Mapping of image names to folders of this machine (virtual environments), which replace container images."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# concertina's own images, for which the running environment is used, with their default commands (see the Dockerfiles).
OWN_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "concertina/operator": ("concertina-operator",),
    "concertina/agent": ("concertina-agent",),
    "concertina/trainer": (),
}


@dataclass(frozen=True)
class Image:
    """Replacement for a container image: a virtual environment (or another folder with bin/), and a default command."""

    environment: str
    command: tuple[str, ...] = ()


def own() -> dict[str, str]:
    """Return the mapping of the names of concertina's own images to the Python environment of this process."""
    return dict.fromkeys(OWN_COMMANDS, sys.prefix)


def find(name: str, mapping: Mapping[str, str]) -> Image | None:
    """Return the replacement for the image `name`; None if `mapping` does not contain the name.

    An entry of `mapping` without a tag applies to all tags. The prefix docker.io/ may be left out.
    """
    short = name.removeprefix("docker.io/").removeprefix("library/")
    repository = _repository(short)
    for candidate in (name, short, repository):
        if candidate in mapping:
            return Image(mapping[candidate], OWN_COMMANDS.get(repository, ()))
    return None


def why_not(name: str) -> str:
    """Return the error message for an image name that is not mapped."""
    return (
        f'Failed to pull image "{name}": the local cluster has no images, it runs pods as processes of this machine. '
        f"Map the name to an environment: concertina local up --image {_repository(name)}=/path/to/venv"
    )


def parse(option: str) -> tuple[str, str]:
    """Return the image name and the path from an --image option in the form NAME=PATH.

    Raises:
        ValueError: When the option is invalid. The message is a sentence.
    """
    name, separator, path = option.partition("=")
    if not (name and separator and path):
        raise ValueError(f"--image {option}: give it as NAME=PATH, for example my/trainer=/path/to/venv")
    folder = os.path.abspath(os.path.expanduser(path))
    if not os.path.isdir(folder):
        raise ValueError(f"--image {option}: there is no folder {folder}")
    return name, folder


def _repository(name: str) -> str:
    """Return the image name without tag and digest."""
    name = name.partition("@")[0]
    head, slash, tail = name.rpartition("/")
    return head + slash + tail.partition(":")[0]

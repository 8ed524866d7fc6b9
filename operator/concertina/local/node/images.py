"""Image names, and the folders (virtual environments) of this machine that represent them."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# concertina's images, represented by the running environment, with their default commands (see the Dockerfiles).
OWN_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "concertina/operator": ("concertina-operator",),
    "concertina/agent": ("concertina-agent",),
    "concertina/trainer": (),
}


@dataclass(frozen=True)
class Image:
    """Virtual environment (or any folder with bin/) that represents an image, and the image's default command."""

    environment: str
    command: tuple[str, ...] = ()


def own() -> dict[str, str]:
    """Return the mapping of concertina's images to the running environment."""
    return dict.fromkeys(OWN_COMMANDS, sys.prefix)


def find(name: str, mapping: Mapping[str, str]) -> Image | None:
    """Return the image of this name, or None when it is not mapped.

    A mapping without a tag applies to every tag, and docker.io/ may be omitted.
    """
    short = name.removeprefix("docker.io/").removeprefix("library/")
    repository = _repository(short)
    for candidate in (name, short, repository):
        if candidate in mapping:
            return Image(mapping[candidate], OWN_COMMANDS.get(repository, ()))
    return None


def why_not(name: str) -> str:
    """Return the error message for an image that is not mapped."""
    return (
        f'Failed to pull image "{name}": the local cluster has no images, it runs pods as processes of this machine. '
        f"Map the name to an environment: concertina local up --image {_repository(name)}=/path/to/venv"
    )


def parse(option: str) -> tuple[str, str]:
    """Parse NAME=PATH of the --image option.

    Raises:
        ValueError: When the option is not valid, with a sentence.
    """
    name, separator, path = option.partition("=")
    if not (name and separator and path):
        raise ValueError(f"--image {option}: give it as NAME=PATH, for example my/trainer=/path/to/venv")
    folder = os.path.abspath(os.path.expanduser(path))
    if not os.path.isdir(folder):
        raise ValueError(f"--image {option}: there is no folder {folder}")
    return name, folder


def _repository(name: str) -> str:
    """Return the name without tag and digest."""
    name = name.partition("@")[0]
    head, slash, tail = name.rpartition("/")
    return head + slash + tail.partition(":")[0]

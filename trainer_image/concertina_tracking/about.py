"""What is known of a run before it trains: its parameters, and what it is made of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from concertina_state.checkpoints import manifest

MOST_VALUE = 500
"""Characters; MLflow takes no more in every version."""
MOST_PARAMETERS = 500
OF_KUBERNETES = ("KUBERNETES_", "CONCERTINA_")
LIBRARIES = ("concertina", "torch", "numpy", "transformers", "lightning", "accelerate")


@dataclasses.dataclass(frozen=True)
class About:
    parameters: Mapping[str, str]
    """The trainer's configuration, a value each, or the command and the names of its variables."""
    code: Mapping[str, str]
    """commit, image, python, and versions of libraries, as far as they are known."""


def about(environment: Mapping[str, str]) -> About:
    trainer = json.loads(environment.get("CONCERTINA_TRAINER") or "{}")
    command = environment.get("CONCERTINA_COMMAND", "")
    if command:
        names = sorted(name for name in environment if _is_users(name))
        parameters = {"command": command[:MOST_VALUE], "environment": " ".join(names)[:MOST_VALUE]}
    else:
        parameters = dict(list(_flat(trainer))[:MOST_PARAMETERS])
    known = manifest.code(environment, LIBRARIES)
    code = {"commit": known.commit, "image": known.image, "python": known.python, **known.libraries}
    return About(parameters, {name: value[:MOST_VALUE] for name, value in code.items() if value})


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """A value each, by the dotted path of its field."""
    for name, field in value.items():
        if isinstance(field, Mapping):
            yield from _flat(field, f"{before}{name}.")
        else:
            text = field if isinstance(field, str) else json.dumps(field)
            yield f"{before}{name}", text[:MOST_VALUE]


def _is_users(name: str) -> bool:
    """Not what Kubernetes says of Services, nor what the operator sets."""
    return not name.startswith(OF_KUBERNETES) and "_SERVICE_" not in name and "_PORT" not in name

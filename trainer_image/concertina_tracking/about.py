"""Description of a run, made before the run trains: its parameters and its origin."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from concertina_state.checkpoints import manifest

MOST_VALUE = 500
"""Maximum length of a value in characters; some versions of MLflow accept no more."""
MOST_PARAMETERS = 500
OF_KUBERNETES = ("KUBERNETES_", "CONCERTINA_")
LIBRARIES = ("concertina", "torch", "numpy", "transformers", "lightning", "accelerate")


@dataclasses.dataclass(frozen=True)
class About:
    """Description of a run, which is sent to the tracking tool when the run starts."""

    parameters: Mapping[str, str]
    """Fields of the trainer's configuration. For a script: its command, and the names of its environment variables."""
    code: Mapping[str, str]
    """Versions of code: commit, image, python and libraries, as far as they are known."""


def about(environment: Mapping[str, str]) -> About:
    """Return the description of the run whose environment variables are `environment`."""
    trainer = json.loads(environment.get("CONCERTINA_TRAINER") or "{}")
    command = environment.get("CONCERTINA_COMMAND", "")
    if command:
        names = sorted(name for name in environment if _is_set_by_user(name))
        parameters = {"command": command[:MOST_VALUE], "environment": " ".join(names)[:MOST_VALUE]}
    else:
        parameters = dict(list(_flat(trainer))[:MOST_PARAMETERS])
    origin = manifest.code(environment, LIBRARIES)
    code = {"commit": origin.commit, "image": origin.image, "python": origin.python, **origin.libraries}
    return About(parameters, {name: value[:MOST_VALUE] for name, value in code.items() if value})


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value in nested mappings, after the dotted path of its field, such as `trainer.batchSize`."""
    for name, field in value.items():
        if isinstance(field, Mapping):
            yield from _flat(field, f"{before}{name}.")
        else:
            text = field if isinstance(field, str) else json.dumps(field)
            yield f"{before}{name}", text[:MOST_VALUE]


def _is_set_by_user(name: str) -> bool:
    """Return whether a variable was set by the user, and not by Kubernetes (for its Services) or the operator."""
    return not name.startswith(OF_KUBERNETES) and "_SERVICE_" not in name and "_PORT" not in name

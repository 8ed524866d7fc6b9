"""Parse the manifest of a TrainingJob into a JobSpec, or describe its errors in sentences.

The API server normally refuses all manifests with such errors. If a manifest fails here, it was stored when the cluster
had another version of the CRD.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

from concertina.api.rules import broken
from concertina.api.shapes import Shapes
from concertina.api.spec import JobSpec

MOST_SPEC_BYTES = 256 << 10
"""Maximum size of a spec as compact JSON. Real specs have less than a tenth of it.

A decoded spec takes up to 30 times as much memory.
"""
MOST_OPTIONS_BYTES = 8 << 10
"""Maximum size of trainer.model.options as compact JSON. The limit is lower because options stay decoded in memory."""
MOST_SPEC_VALUES = 10_000
"""Maximum number of lists, mappings and elements in a spec.

Validation of each takes microseconds in the event loop, and more if it is invalid.
"""
ADVICE = "put large values into a ConfigMap or an image, and mount it"


class SpecError(ValueError):
    """Error that the spec is invalid.

    `problems` contains a sentence for each error, with the field's path and what to do.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def parse_spec(manifest: Mapping[str, Any]) -> JobSpec:
    """Return the spec from the manifest of a TrainingJob.

    Raises:
        SpecError: When the spec is missing, too large or invalid.
    """
    return _parsed(_spec(manifest))


def parse_stored(manifest: Mapping[str, Any]) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the spec from a stored manifest without unknown fields, and the paths of the unknown fields.

    A stored manifest has the fields of the cluster's CRD, with default values. If the CRD is of another version than
    this operator, it may have fields that the operator does not know (decision "Version skew between CRD, operator and
    agents").

    Raises:
        SpecError: When the spec is missing, too large or invalid.
    """
    spec = _spec(manifest)
    try:
        return _parsed(spec), ()
    except SpecError:
        known_fields, unknown = _without_unknown(spec)
        if known_fields == spec:
            raise
        return _parsed(known_fields), unknown


def _spec(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec as a dict, after a check of its size.

    Raises:
        SpecError: When the spec is missing or too large.
    """
    if not isinstance(manifest.get("spec"), Mapping):
        raise SpecError(("spec is missing: add the fields of the job below spec",))
    spec = dict(manifest["spec"])
    _refuse_large("spec", spec, MOST_SPEC_BYTES)
    _refuse_many("spec", spec, MOST_SPEC_VALUES)
    options: Any = spec
    for field in ("trainer", "model", "options"):
        options = options.get(field) if isinstance(options, Mapping) else None
    _refuse_large("spec.trainer.model.options", options, MOST_OPTIONS_BYTES)
    return spec


def _refuse_large(path: str, value: object, most_bytes: int) -> None:
    """Raise an error if a value is too large as JSON.

    Raises:
        SpecError: When the value has more than `most_bytes` bytes.
    """
    try:
        size = len(to_json(value))
    except ValueError:  # half of a surrogate pair, which only the json module can escape
        size = len(json.dumps(value, separators=(",", ":")))
    if size > most_bytes:
        raise SpecError((f"{path} has {-(-size // 1024)} KiB as JSON, more than {most_bytes >> 10} KiB: {ADVICE}",))


def _refuse_many(path: str, value: object, limit: int) -> None:
    """Raise an error if a value has too many elements. Counting stops at the limit.

    Raises:
        SpecError: When the value has more than `limit` elements.
    """
    remaining_values, unread = limit, [value]
    while unread:
        entry = unread.pop()
        remaining_values -= 1
        if isinstance(entry, Mapping):
            unread.extend(entry.values())
        elif isinstance(entry, (list, tuple)):
            unread.extend(entry)
        if len(unread) > remaining_values:
            raise SpecError((f"{path} has more than {limit} values (lists, mappings and their contents): {ADVICE}",))


def _without_unknown(spec: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the spec without fields that this version does not know, and the paths of these fields."""
    known_fields, unknown = copy.deepcopy(spec), []
    try:
        _checked(known_fields)
    except ValidationError as error:
        details = error.errors(include_url=False)
        for *parents, last in (detail["loc"] for detail in details if detail["type"] == "extra_forbidden"):
            target: Any = known_fields
            for part in parents:
                target = target[part]
            del target[last]
            unknown.append(_path((*parents, last)))
    except SpecError:
        pass
    return known_fields, tuple(sorted(unknown))


def _parsed(spec: dict[str, Any]) -> JobSpec:
    try:
        return _checked(spec)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from error


def _checked(raw: Any) -> JobSpec:
    """Return the validated spec from decoded JSON or YAML.

    Raises:
        ValidationError: When a field is invalid.
        SpecError: When fields that are valid by themselves contradict each other.
    """
    # Validate as JSON: only then do strict types accept the values of YAML, such as lists for tuples and strings for
    # enums.
    text = json.dumps(raw)
    spec = JobSpec.model_validate_json(text, strict=True)
    Shapes.model_validate_json(text, strict=True)
    if problems := tuple(f"{rule.path}: {rule.refusal(spec)}" for rule in broken(spec)):
        raise SpecError(problems)
    return spec


def _refusal(details: list[ErrorDetails]) -> SpecError:
    return SpecError(tuple(dict.fromkeys(_sentence(detail) for detail in details if not _echo(detail, details))))


SENTENCES = {
    "missing": "is missing: add it",
    "extra_forbidden": "is not a field of this version of concertina: remove it, or correct its name",
    "int_type": "must be a whole number, not {value}",
    "int_from_float": "must be a whole number, not {value}",
    "float_type": "must be a number, not {value}",
    "finite_number": "must be a finite number, not {value}",
    "bool_type": "must be true or false, not {value}",
    "string_type": "must be a string (in quotes where it looks like a number), not {value}",
    "enum": "must be {expected}, not {value}",
    "literal_error": "must be {expected}, not {value}",
    "tuple_type": "must be a list, not {value}",
    "list_type": "must be a list, not {value}",
    "dict_type": "must be a mapping, not {value}",
    "model_type": "must be a mapping of fields, not {value}",
    "greater_than_equal": "must be at least {ge}, not {value}",
    "greater_than": "must be more than {gt}, not {value}",
    "less_than_equal": "must be at most {le}, not {value}",
    "less_than": "must be less than {lt}, not {value}",
    "multiple_of": "must be a multiple of {multiple_of}, not {value}",
    "string_pattern_mismatch": "does not have the form {pattern}: {value}",
    "string_too_short": "must not be empty",
    "too_short": "has too few entries: at least {min_length}",
    "too_long": "has too many entries: at most {max_length}",
    "value_error": "{error}",
    "json_invalid": "has values that are nested too deeply: reduce the nesting",
}


BRANCHES = ("constrained-int", "literal['Auto']", "int")
"""Names in pydantic's error locations for the alternatives of fields that are a number or `Auto`."""
LARGEST = {"workersPerReplica": 1024, "everySeconds": 31536000}
"""Maximum value of each field that is a number or `Auto`."""


def _sentence(detail: ErrorDetails) -> str:
    """Return one of pydantic's errors as a sentence: the field's path, what is wrong, and what to do."""
    if _is_branch(detail["loc"], len(detail["loc"]) - 1):
        largest = LARGEST[str(detail["loc"][-2])]
        return (
            f"{_path(detail['loc'])} must be Auto or a whole number from 1 to {largest}, not {_shown(detail['input'])}"
        )
    template = SENTENCES.get(detail["type"], detail["msg"].replace("{", "{{").replace("}", "}}"))
    return f"{_path(detail['loc'])} {template.format(**{**detail.get('ctx', {}), 'value': _shown(detail['input'])})}"


def _echo(detail: ErrorDetails, details: list[ErrorDetails]) -> bool:
    """Return whether an error about a list's length is only a consequence of an invalid entry.

    pydantic leaves an invalid entry out, so the list seems too short. The entry has an error of its own, so the error
    about the length is not reported.
    """
    where = detail["loc"]
    return detail["type"] == "too_short" and any(
        entry["loc"][: len(where)] == where and entry is not detail for entry in details
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _path(location: tuple[int | str, ...]) -> str:
    """Return the path of a field from pydantic's error location.

    Alternatives of a union are left out. For example, ('template', 'spec', 'containers', 0) becomes
    spec.template.spec.containers[0].
    """
    parts = [part for index, part in enumerate(location) if not _is_branch(location, index)]
    return "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _is_branch(location: tuple[int | str, ...], index: int) -> bool:
    """Return whether a part of pydantic's error location is an alternative of a union.

    For example, `int` can be an alternative, but also a key that a user has chosen.
    """
    return index > 0 and location[index] in BRANCHES and location[index - 1] in LARGEST

"""Parameter groups of an optimizer, matched to the saved groups by the names of their parameters. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from concertina_state.errors import InvalidInput
from trainingjob import _values
from trainingjob._refusals import INSTEAD


def match_groups(
    optimizer: str, saved: Sequence[tuple[Sequence[str], Mapping[str, Any]]], now: Sequence[Sequence[str]]
) -> list[int]:
    """Return, for each present parameter group, the index of the saved group whose options it gets.

    A present group may hold parameters of several saved groups if these groups have the same options.

    Args:
        optimizer: Name of the optimizer in an error message.
        saved: Parameter names and options of each saved group.
        now: Parameter names of each present group.

    Raises:
        InvalidInput: A parameter is missing in the saved or in the present groups, or parameters that were saved with
            different options are in one group now.
    """
    group_by_name = {name: number for number, (names, _) in enumerate(saved) for name in names}
    current_names = {name for names in now for name in names}
    if missing := [name for name in group_by_name if name not in current_names]:
        raise InvalidInput(
            f"{optimizer} was saved with {_list(missing)}, which no group of the optimizer has now: add it "
            "(optimizer.add_param_group) before State.restore()."
        )
    if new := [name for names in now for name in names if name not in group_by_name]:
        raise InvalidInput(
            f"{optimizer} now has {_list(new)}, which no group had when the optimizer was saved: {INSTEAD}."
        )
    return [_source(optimizer, saved, names, number, group_by_name) for number, names in enumerate(now)]


def _source(
    optimizer: str,
    saved: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    names: Sequence[str],
    number: int,
    group_by_name: Mapping[str, int],
) -> int:
    """Return the index of the saved group whose options a present group gets, given the group's parameter names.

    Raises:
        InvalidInput: The parameters were saved with different options.
    """
    sources = list(dict.fromkeys(group_by_name[name] for name in names))
    if not sources:  # an empty group has nothing but its place
        return min(number, len(saved) - 1)
    first = sources[0]
    for other in sources[1:]:
        if differing := differing_options(saved[first][1], saved[other][1]):
            one, two = (next(name for name in names if group_by_name[name] == source) for source in (first, other))
            raise InvalidInput(
                f"{optimizer} was saved with {one} and {two} in groups of different {', '.join(differing)}, "
                f"but they are now in one group: {INSTEAD}."
            )
    return first


def differing_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that differ between two parameter groups."""
    return sorted(
        key
        for key in one.keys() | other.keys()
        if _values.encode(one.get(key), key) != _values.encode(other.get(key), key)
    )


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def check_by_position(scheduler: str, state: Any, sources: Sequence[int], saved_count: int) -> None:
    """Refuse a scheduler's state with one value per parameter group if the order of the groups has changed.

    Schedulers keep such values (for example `base_lrs`) in lists, by the position of the group.

    Args:
        scheduler: Name of the scheduler in an error message.
        state: State of the scheduler.
        sources: Result of `match_groups` for the scheduler's optimizer.
        saved_count: Number of saved groups.

    Raises:
        InvalidInput: The state has such a list, and the order of the groups has changed.
    """
    if list(sources) == list(range(saved_count)):
        return
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if not isinstance(value, (list, tuple)):
            continue
        for inner in value:
            check_by_position(scheduler, inner, sources, saved_count)  # schedulers of schedulers
        alike = all(other == value[0] for other in value)
        if len(value) == saved_count and not (alike and len(sources) == saved_count):
            raise InvalidInput(
                f"{scheduler} has one value for each group of its optimizer ({key}), but the order of the "
                "groups has changed: create the groups in the order in which they were saved."
            )

"""Pods of one replica: its index, and the attempt that it is on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from concertina.api.pod_names import parse, pod_name


def same_replica(one: str, other: str) -> bool:
    """Whether these are pods of the same index; not for what is no replica's name: agents may make one up."""
    first, second = parse(one), parse(other)
    return first is not None and second is not None and first.index is not None and first.index == second.index


def at(numbers: Sequence[int], index: int | None) -> int:
    """Of a list by index: 0 beyond its end, and for the pod of torchrun's store, which has none."""
    return numbers[index] if index is not None and index < len(numbers) else 0


def packed(numbers: Mapping[int, int]) -> tuple[int, ...]:
    """By index, without the zeros at the end."""
    last = max((index for index, number in numbers.items() if number), default=-1)
    return tuple(numbers.get(index, 0) for index in range(last + 1))


def pass_over_taken(job: str, attempts: dict[int, int], wanted: Iterable[int], taken: Collection[str]) -> None:
    """Names that other pods hold are not waited for: those of a job that was deleted may stay as long as their node is
    away (decision "Names that are taken are passed over")."""
    if taken:
        for index in wanted:
            while pod_name(job, index, attempts.get(index, 0)) in taken:
                attempts[index] = attempts.get(index, 0) + 1

"""Invalid input made of valid input, and the rule that every reader of such input must follow.

A reader returns a value, or raises an error of its own with a sentence of bounded length, and does nothing else, for
any input. A test of a layer is a table of its readers. Each reader gets a few examples in the gate, and each layer gets
EXAMPLES in the long suite.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.cluster.drills import FIGURES
from builders.suite import SAME_EACH_TIME

EXAMPLES = 30_000
"""Number of examples for the readers of a layer, in the long suite."""
LAYERS = ("operator", "protocol", "agent", "trainer")
SENTENCE = 2000
"""Maximum length of an error in characters, because it goes into logs, events and a status."""
LEVELS = (90, 200, 330, 490, 900, 980, 20_000)
"""Depths of nesting: one that the stack of any interpreter supports, one that none supports, and some in between."""
NESTED = "what is nested deeply goes here"


def deep(draw: random.Random) -> bytes:
    levels = draw.choice(LEVELS)
    begin, end = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return begin * levels + b"1" + end * levels


DIGITS = (b"9" * 400, b"9" * 5000)
"""Numbers of digits: more than a float holds, and more than Python reads."""
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**80), 10**4000, math.nan, math.inf, -math.inf,
    -0.0, 1e300, 0.5, "", "0", "\x00", "\ud800", "x" * 5000, "€" * 3000, "../../etc/passwd", "%s{}{0}", "Auto", "int",
    [], {}, [[]], [1], [[1]], [None], {"": None}, {"a": {"a": {}}}, {"int": 1, "Auto": 2, "0": []}, [[1, 2, 3]],
    "1e999", "NaN", NESTED,
)  # fmt: skip
"""Values that replace any part of a valid document."""


def places(value: Any, into: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Append every pair of a mapping or list within the document and its key or index to `into`, and return `into`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        into.append((value, key))
        places(each, into)
    return into


def altered(document: Any, draw: random.Random) -> Any:
    """Return the document with a few parts replaced, left out, doubled, renamed, or put where others belong.

    No part is put in two places. Otherwise a change of the part would appear in both, and the document would grow
    beyond any memory in five rounds.
    """
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        all_places = places(document, [])
        if not all_places or draw.random() < 0.02:
            document = copy.deepcopy(draw.choice(STRANGE))
            continue
        inside, key = draw.choice(all_places)
        what = draw.random()
        if what < 0.6:
            inside[key] = copy.deepcopy(draw.choice(STRANGE))
        elif what < 0.75:
            del inside[key]
        elif what < 0.9:
            inside[key] = copy.deepcopy(draw.choice(all_places)[0])
        elif isinstance(inside, dict):
            another = draw.choice(("int", "Auto", "", "v", "__class__", "\ud800", "x" * 300))
            inside[another] = copy.deepcopy(inside[key])
        else:
            inside.extend(map(copy.deepcopy, inside[:50]))
    return document


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return the bytes as disks and networks may damage them: cut off, bits flipped, bytes inserted or doubled."""
    what, at = draw.random(), draw.randrange(len(content) + 1)
    if what < 0.4 or not content:
        return content[:at]
    if what < 0.7:
        flipped = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if what < 0.9:
        middle = draw.choice((b"\x00", b"\xff\xfe", b"\n", b'"', b"}", b"[", b"\\", draw.randbytes(8), *DIGITS))
        return content[:at] + middle + content[at + draw.choice((0, 0, 1, 20)) :]
    return draw.choice((content * 2, content[at:], deep(draw), content[:at] + deep(draw) + content[at:]))


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Return the input altered as JSON or damaged as bytes; input that is not JSON is only damaged."""
    try:
        document = json.loads(content)
    except ValueError:
        return damaged(content, draw)
    if draw.random() < 0.35:
        return damaged(content, draw)
    text = json.dumps(altered(document, draw)).encode().replace(json.dumps(NESTED).encode(), deep(draw))
    return damaged(text, draw) if draw.random() < 0.1 else text


@dataclass(frozen=True)
class Reader:
    read: Callable[[bytes], object]
    valid: Sequence[bytes]
    refuses: tuple[type[Exception], ...]
    """Errors that the reader may raise, each with a sentence."""
    value: type[object] | tuple[type[object], ...] = object
    """Type of the values that the reader returns."""
    most: int = SENTENCE
    """Maximum length of its sentence in characters."""

    def play(self, content: bytes) -> None:
        sentence = ""
        try:
            assert isinstance(self.read(content), self.value)
        except self.refuses as error:
            sentence = str(error)
        assert len(sentence) <= self.most, sentence[:200]

    def reads_what_is_valid(self) -> None:
        for content in self.valid:
            assert isinstance(self.read(content), self.value)


SEEDS = st.integers(0, 2**48)


def plays(readers: Mapping[str, Reader], name: str, examples: int, anew: bool = False) -> int:
    """Give a reader this number of mutated inputs, drawn by hypothesis, and return how many it got.

    They are the same inputs in each run, or other ones with `anew`, unless SAME_EACH_TIME is set.
    """
    ran = Counter[str]()
    reader = readers[name]

    @given(seed=SEEDS)
    @settings(max_examples=examples, database=None, derandomize=not anew or SAME_EACH_TIME)
    def play(seed: int) -> None:
        draw = random.Random(seed)
        reader.play(mutated(draw.choice(reader.valid), draw))
        ran[name] += 1

    reader.reads_what_is_valid()
    play()
    return ran[name]


def all_of(layer: str, readers: Mapping[str, Reader], request: pytest.FixtureRequest) -> None:
    """Give EXAMPLES mutated inputs to the readers of a layer, and add their number to the figures of the session."""
    each = -(-EXAMPLES // len(readers))
    ran = {name: plays(readers, name, each, anew=True) for name in readers}
    request.config.stash.setdefault(FIGURES, []).append(
        f"{sum(ran.values())} strange inputs to {len(ran)} readers of the {layer}"
    )
    assert layer in LAYERS
    assert sum(ran.values()) >= EXAMPLES, ran

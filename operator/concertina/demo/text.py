"""Text to train on that is the same bytes on every machine, whatever its Python: words of an invented language, as
frequent as Zipf's law has it, each followed half of the time by one of a few that it likes."""

from bisect import bisect
from itertools import accumulate
from pathlib import Path
from random import Random

WORDS, FOLLOWERS = 2000, 3
CONSONANTS, VOWELS = "bcdfghklmnprstvwz", "aeiou"


def write(folder: Path, files: int, size: int) -> list[Path]:
    """So many files of `size` bytes in `folder`, which must be there."""
    # Of Random only random() is promised to stay as it is, and of floats only + - * / are the same everywhere.
    draw = Random(0).random
    words = [_word(number) for number in range(WORDS)]
    frequencies = list(accumulate(1 / rank for rank in range(1, WORDS + 1)))

    def any_word() -> int:
        return min(bisect(frequencies, draw() * frequencies[-1]), WORDS - 1)

    followers = [[any_word() for _ in range(FOLLOWERS)] for _ in words]

    def sentence() -> str:
        said = [any_word()]
        for _ in range(3 + int(draw() * 12)):
            liked = followers[said[-1]][int(draw() * FOLLOWERS)]
            said.append(liked if draw() < 0.5 else any_word())
        return " ".join(words[each] for each in said).capitalize() + (".\n" if draw() < 0.2 else ". ")

    written = []
    for number in range(files):
        text = ""
        while len(text) < size:
            text += sentence()
        written.append(folder / f"{number:04}.txt")
        written[-1].write_text(text[: size - 1] + "\n")
    return written


def _word(number: int) -> str:
    """Frequent words are short: as many syllables as the number has digits to the base of all syllables."""
    word = ""
    while number or not word:
        number, syllable = divmod(number, len(CONSONANTS) * len(VOWELS))
        consonant, vowel = divmod(syllable, len(VOWELS))
        word += CONSONANTS[consonant] + VOWELS[vowel]
    return word

"""Training text that has the same bytes on every machine and with every Python version.

The text consists of words of an invented language. Their frequencies follow Zipf's law. With a probability of one half,
the next word is one of a few words that often follow the current word.
"""

from bisect import bisect
from itertools import accumulate
from pathlib import Path
from random import Random

WORDS, FOLLOWERS = 2000, 3
CONSONANTS, VOWELS = "bcdfghklmnprstvwz", "aeiou"


def write(folder: Path, files: int, size: int) -> list[Path]:
    """Write `files` text files of `size` bytes each into an existing folder, and return their paths."""
    # Only random() of Random is guaranteed not to change, and only + - * / of floats are the same everywhere.
    draw = Random(0).random
    words = [_word(file_number) for file_number in range(WORDS)]
    frequencies = list(accumulate(1 / rank for rank in range(1, WORDS + 1)))

    def any_word() -> int:
        return min(bisect(frequencies, draw() * frequencies[-1]), WORDS - 1)

    followers = [[any_word() for _ in range(FOLLOWERS)] for _ in words]

    def sentence() -> str:
        numbers = [any_word()]
        for _ in range(3 + int(draw() * 12)):
            preferred = followers[numbers[-1]][int(draw() * FOLLOWERS)]
            numbers.append(preferred if draw() < 0.5 else any_word())
        return " ".join(words[number] for number in numbers).capitalize() + (".\n" if draw() < 0.2 else ". ")

    written = []
    for file_number in range(files):
        text = ""
        while len(text) < size:
            text += sentence()
        written.append(folder / f"{file_number:04}.txt")
        written[-1].write_text(text[: size - 1] + "\n")
    return written


def _word(number: int) -> str:
    """Return the invented word for a number. The number is the word's rank by frequency.

    The number is written with the possible syllables as digits. Frequent words are therefore short.
    """
    word = ""
    while number or not word:
        number, syllable = divmod(number, len(CONSONANTS) * len(VOWELS))
        consonant, vowel = divmod(syllable, len(VOWELS))
        word += CONSONANTS[consonant] + VOWELS[vowel]
    return word

"""Check the subjects of all commits since BASELINE: `component: imperative summary`, at most 72 characters.

`make lint` runs this script. Merge commits are not checked. The script checks nothing if there is no git history, or if
a shallow clone does not contain BASELINE.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "cf5bd7b9ed10334daa6f4be17da8af9978498a9c"
"""Last commit before this rule was introduced."""
LONGEST_SUBJECT = 72
SUBJECT = re.compile(r"(?P<component>[a-z0-9][\w./-]*(, [a-z0-9][\w./-]*)*): (?P<first_word>\S+)(?P<rest> .+)?")

ENDINGS = ("ed", "ing", "s")
"""Endings of words that are usually not imperative: added, adding, adds."""
IMPERATIVES = frozenset({
    "bring", "cling", "fling", "ping", "ring", "sing", "sling", "spring", "sting", "string", "swing", "wring",
    "bed", "bleed", "breed", "embed", "exceed", "feed", "heed", "need", "proceed", "seed", "shed", "shred",
    "speed", "succeed", "wed", "weed", "alias", "bias", "canvas", "focus",
})  # fmt: skip
"""Imperative verbs that have such an ending. Words that end in "ss" (pass, process) always count as imperative."""
NOT_VERBS = frozenset({
    "a", "all", "an", "and", "any", "as", "at", "because", "both", "but", "by", "each", "either", "every",
    "few", "for", "from", "how", "if", "in", "it", "its", "many", "more", "most", "my", "no", "not",
    "nothing", "now", "of", "on", "one", "only", "or", "other", "our", "several", "since", "so", "some",
    "that", "the", "their", "there", "these", "they", "this", "those", "to", "two", "we", "what", "when",
    "where", "whether", "which", "who", "whose", "why", "with", "without", "you", "your",
})  # fmt: skip
WRITTEN_BEFORE = frozenset({
    "tests: a script goes on from the checkpoint before a damaged one",
    "simulation: a second operator with another master key",
})  # fmt: skip
"""Subjects after BASELINE that were written before the rule was introduced."""


def faults(subject: str) -> Iterator[str]:
    """Yield a description of each violation in a subject."""
    if len(subject) > LONGEST_SUBJECT:
        yield f"has {len(subject)} characters, {LONGEST_SUBJECT} at most"
    if subject.endswith("."):
        yield "ends with a period"
    match = SUBJECT.fullmatch(subject)
    if not match:
        yield "is not of the form `component: imperative summary`"
    elif not is_imperative(match["first_word"]):
        yield f"begins its summary with {match['first_word']!r}: use a lower-case verb in the imperative mood"


def is_imperative(word: str) -> bool:
    """Return whether a word may be a lower-case imperative. The decision is based on the word's ending."""
    if not re.fullmatch(r"[a-z]+(-[a-z]+)*", word) or word in NOT_VERBS:
        return False
    return word in IMPERATIVES or word.endswith("ss") or not word.endswith(ENDINGS)


def git(root: Path, *arguments: str) -> str | None:
    """Run git in a folder, and return its output. Return None if git fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def subjects_since(root: Path, baseline: str) -> list[tuple[str, str]] | None:
    """Return the short hash and the subject of each commit after `baseline`. Return None without that history."""
    top = git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root.resolve():
        return None
    log = git(root, "log", "--no-merges", "--format=%h %s", f"{baseline}..HEAD")
    if log is None:
        return None
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in log.splitlines()]


def main(root: Path = ROOT, baseline: str = BASELINE) -> int:
    """Check all subjects, and return the exit status."""
    commits = subjects_since(root, baseline)
    if commits is None:
        print(f"commit subjects: not checked, since the history back to {baseline[:8]} is not here")
        return 0
    wrong = [
        f"{commit} {subject!r} {fault}"
        for commit, subject in commits
        if subject not in WRITTEN_BEFORE
        for fault in faults(subject)
    ]
    if wrong:
        print("commit subjects: `component: imperative summary`\n  " + "\n  ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

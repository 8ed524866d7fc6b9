"""Synthetic sessions of a shop: python make_clicks.py FILE [SESSIONS]

A user clicks one item after another. The next item follows from the present item and from the time that has passed: a
user who waits long goes on in another department.
"""

import json
import random
import sys
from pathlib import Path

ITEMS, DEPARTMENT = 200, 20
"""Number of items, and of the items of a department."""
PAUSE_SECONDS = 60


def session(number: int) -> dict[str, list[int]]:
    chance = random.Random(number)
    item, time = chance.randrange(ITEMS), 1_760_000_000 + chance.randrange(10**6)
    items, times = [], []
    for _ in range(chance.randint(4, 40)):
        items.append(item)
        times.append(time)
        waited = chance.choice((5, 10, 20, 300))
        time += waited
        step = DEPARTMENT if waited > PAUSE_SECONDS else 1
        item = (item + step) % ITEMS
    return {"item": items, "time": times}


def main(file: Path, sessions: int) -> None:
    file.write_text("".join(json.dumps(session(number)) + "\n" for number in range(sessions)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000)

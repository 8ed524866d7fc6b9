"""Nothing to warm up, unless a test wants that to fail or to hang."""

import os
import time


def warm_up() -> None:
    wanted = os.environ.get("TINY_WARM_UP")
    if wanted == "hangs":
        time.sleep(600)
    assert wanted != "fails", "told to fail"

"""Cost of counting a script's optimizer steps: `python benchmarks/step_hook.py [--blocks N] [--json FILE]`.

A small loop (a linear layer, SGD, on the CPU) runs in blocks of 100 steps in one process. Blocks with torch's hook
alternate with blocks without it. The benchmark prints the microseconds of a step with and without the hook, the
microseconds of a call of the hook, and the median of these calls as a share of a step of 10 ms. The bound is 0.1 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import report
import torch

from concertina_agent.workers.optimizer_steps import StepCounter

BLOCK = 100
"""Number of steps in a block."""
STEP_SECONDS = 0.01
BOUND = 0.001
"""Maximum share of a step that the hook may take."""
MICRO = 1e6


class Loop:
    """Minimal training loop. In such a short loop, the cost of the hook is visible."""

    def __init__(self) -> None:
        self._model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self._model.parameters(), lr=0.001)
        self._batch = torch.ones(2, 4)

    def block(self) -> float:
        """Train one block, and return the microseconds per step."""
        begun = time.perf_counter()
        for _ in range(BLOCK):
            self.optimizer.zero_grad()
            self._model(self._batch).sum().backward()
            self.optimizer.step()
        return (time.perf_counter() - begun) / BLOCK * MICRO


def measured(folder: Path, blocks: int) -> dict[str, list[float]]:
    """Return the microseconds per step for each block, and the microseconds per call of the hook."""
    loop = Loop()
    samples: dict[str, list[float]] = {"a step without the hook": [], "a step with the hook": [], "the hook alone": []}
    optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim does not export it.
    loop.block()  # The first steps are slow for other reasons than the hook.
    for number in range(blocks):
        samples["a step without the hook"].append(loop.block())
        counter = StepCounter(str(folder / f"steps-{number}"))
        counter.register(optimizers)
        samples["a step with the hook"].append(loop.block())
        hook = next(reversed(optimizers._global_optimizer_post_hooks.values()))
        optimizer, begun = loop.optimizer, time.perf_counter()
        for _ in range(BLOCK):
            hook(optimizer, (), {})
        samples["the hook alone"].append((time.perf_counter() - begun) / BLOCK * MICRO)
        counter.stop()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        samples = measured(Path(folder), options.blocks)
    share = statistics.median(samples["the hook alone"]) / MICRO / STEP_SECONDS
    report.show("Counting optimizer steps", samples, unit="us")
    print(f"\nthe hook takes {share:.4%} of a step of 10 ms (bound {BOUND:.1%})")
    report.write(options.json, "step_hook", samples, share_of_a_10_ms_step=round(share, 6), bound=BOUND)


if __name__ == "__main__":
    main()

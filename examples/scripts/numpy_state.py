"""Training by numpy, with the state saved by trainingjob.State, without torch.

python numpy_state.py --steps 200
"""

import argparse

import numpy as np

import trainingjob


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    np.random.seed(0)
    kept = {"weights": np.zeros(8), "moments": np.zeros(8), "seen": 0}
    state = trainingjob.State(kept=kept)
    for step in range(state.restore(default=0), options.steps):
        x = np.random.standard_normal((32, 8))
        error = x @ kept["weights"] - x.sum(1)
        kept["moments"] *= 0.9
        kept["moments"] += 2 * error @ x / len(x)
        kept["weights"] -= 0.01 * kept["moments"]
        kept["seen"] += len(x)
        state.commit(step, durable=step == options.steps - 1)
    loss = np.square(error).mean()
    print(f"through at step {options.steps}, after {kept['seen']} items, loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()

"""JAX on several processes with sharded moments, and the state saved by trainingjob.State, without torch.

RANK=0 WORLD_SIZE=1 python jax_state.py --steps 200
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

import trainingjob
import trainingjob.jax


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()
    world = trainingjob.world()
    if world.size > 1:
        coordinator = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(coordinator, world.size, world.rank)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    everywhere = jax.NamedSharding(mesh, jax.P())
    by_row = jax.NamedSharding(mesh, jax.P("data"))

    def loss_of(weights: dict, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ weights["in"])
        return jnp.square(hidden @ weights["out"] - x.sum(1)).mean()

    def train(weights: dict, moments: dict, x: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda w, m: w - 0.02 * m, weights, moments), moments, loss

    train = jax.jit(train, out_shardings=(everywhere, by_row, everywhere))
    keys = jax.random.split(jax.random.key(0))
    weights = {"in": jax.random.normal(keys[0], (12, 48)) / 4, "out": jax.random.normal(keys[1], (48,)) / 7}
    weights = jax.device_put(weights, everywhere)
    moments = jax.device_put(jax.tree.map(np.zeros_like, weights), by_row)
    kept = {"weights": weights, "moments": moments}
    state = trainingjob.State(kept=kept, gather=trainingjob.jax.gather)
    start = state.restore(default=0)
    print(f"rank {world.rank} of {world.size} starts at step {start}", flush=True)
    for step in range(start, options.steps):
        batch = np.random.default_rng(step).standard_normal((24, 12), np.float32)  # the same in any world
        x = jax.make_array_from_callback(batch.shape, by_row, batch.__getitem__)
        kept["weights"], kept["moments"], loss = train(kept["weights"], kept["moments"], x)
        if world.rank == 0:
            print(f"step {step} loss {float(loss):.6f}", flush=True)
        time.sleep(options.pause)
        state.commit(step, durable=step == options.steps - 1)
    print(f"rank {world.rank} is through at step {options.steps}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)

"""A script that trains with JAX and does not import torch."""

from __future__ import annotations

import os
from typing import Any

import numpy

import trainingjob
from loops.run import BATCH, Run
from loops.without_torch import FEATURES, Gather


def train(run: Run) -> None:
    """Replace weights and moments in the dict, and the key by which features are dropped."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax import numpy as jnp

    numpy.random.seed(run.rank)  # JAX draws some numbers when it is imported

    def loss_of(weights: Any, mask: Any, x: Any) -> Any:
        return jnp.square((x * mask) @ weights - x.sum(1)).sum() / BATCH

    gradient_of = jax.jit(jax.value_and_grad(loss_of))
    gather = Gather(run)
    zeros = jnp.zeros(FEATURES)
    kept: dict[str, Any] = {"weights": zeros, "moments": {"first": zeros}, "key": jax.random.key(0), "seen": 0}
    state = trainingjob.State(kept=kept, gather=gather if run.size > 1 else None, overhead=1000.0)
    for step in range(state.restore(default=0), run.steps):
        rows = run.share()
        x = numpy.random.default_rng(step).standard_normal((BATCH, FEATURES), dtype="f")[rows.start : rows.stop]
        kept["key"], key = jax.random.split(kept["key"])
        loss, gradient = gradient_of(kept["weights"], jax.random.bernoulli(key, 0.8, (FEATURES,)), x)
        gathered = [numpy.frombuffer(each, "f") for each in gather(numpy.append(gradient, loss).astype("f").tobytes())]
        summed = sum(gathered)
        first = 0.9 * kept["moments"]["first"] + summed[:-1]
        kept["moments"] = {"first": first}
        kept["weights"] = kept["weights"] - 0.02 * first
        kept["seen"] += BATCH
        run.record(step, loss=float(summed[-1]), norm=float(jnp.linalg.norm(kept["weights"])), seen=kept["seen"])
        run.consumed(step, [step * BATCH + row for row in rows])
        state.commit(step, durable=step == run.steps - 1)

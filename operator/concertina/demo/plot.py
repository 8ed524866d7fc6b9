"""Plot of the demo's run: the loss above, the number of replicas below, and the marked events in both."""

from __future__ import annotations

from pathlib import Path

from concertina.demo.history import DemoHistory

COLOURS = {"kill": "#c0392b", "shrunk": "#e67e22", "grown": "#27ae60"}


def draw(history: DemoHistory, path: Path) -> None:
    """Write the plot as a PNG file.

    The function needs matplotlib, which is in the development environment.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start = history.losses[0].at
    figure, (loss, world) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 5), height_ratios=(3, 1), layout="constrained"
    )
    loss.plot([p.at - start for p in history.losses], [p.loss for p in history.losses], color="#2c3e50", linewidth=1.2)
    loss.set_ylabel("loss (nats per byte)")
    loss.set_title("One node is killed while the training continues, and comes back")
    loss.grid(alpha=0.25)
    world.step(
        [s.at - start for s in history.samples], [s.world for s in history.samples], where="post", color="#2c3e50"
    )
    world.set_ylabel("replicas\nat work")
    max_replicas = max(s.world for s in history.samples)
    world.set_ylim(0, max_replicas + 0.5)
    world.set_yticks(range(max_replicas + 1))
    world.set_xlabel("seconds since the first step")
    world.set_xlim(left=0)
    for mark in history.marks:
        colour = COLOURS.get(mark.what)
        if colour is None:
            continue
        for axis in (loss, world):
            axis.axvline(mark.at - start, color=colour, linestyle="--", linewidth=1)
        loss.plot([], [], color=colour, linestyle="--", linewidth=1, label=mark.text)
    loss.legend(loc="upper right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

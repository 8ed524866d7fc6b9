"""Functions that process events.

Each is a pure function `on_<event>(agent, event, t) -> effects`, listed in `machine`.
"""

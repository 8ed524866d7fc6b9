"""Handlers of events. Each is a pure function `on_<event>(agent, event, t) -> effects`. `machine` lists them."""

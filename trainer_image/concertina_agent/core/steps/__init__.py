"""Handlers of events: one pure function `on_<event>(agent, event, t) -> effects` each, listed in `machine`."""

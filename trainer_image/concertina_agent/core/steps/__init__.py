"""What each event does: one function `on_<event>(agent, event, t) -> effects` each, listed in `machine`. Pure."""

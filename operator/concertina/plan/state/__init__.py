"""Where training state is stored, and from which state a round starts."""

"""Where training state is, and which of it to go on from."""

"""The agent's state, which takes events and answers with effects. Pure."""

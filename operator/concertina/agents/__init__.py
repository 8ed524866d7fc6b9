"""The only package that talks to agents."""

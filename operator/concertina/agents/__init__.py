"""The only package that communicates with agents."""

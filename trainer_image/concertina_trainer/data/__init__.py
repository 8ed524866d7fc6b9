"""Training data of the bundled trainer: building data sets from text, and reading them in a reproducible order."""

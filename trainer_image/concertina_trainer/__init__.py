"""The bundled trainer. Importing this package is cheap: torch comes with its modules."""

"""The bundled decoder, custom models, the loss, and the optimizer."""

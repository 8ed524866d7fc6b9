"""The bundled trainer under another name, whose worker can be told to measure nothing (`agent run --package`)."""

import concertina_trainer

__path__ += concertina_trainer.__path__

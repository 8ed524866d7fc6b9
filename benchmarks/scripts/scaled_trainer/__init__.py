"""The bundled trainer under another name, whose worker writes down what its steps took (`agent run --package`)."""

import concertina_trainer

__path__ += concertina_trainer.__path__

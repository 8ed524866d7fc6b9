"""Copy of the bundled trainer's package whose worker trains in turns with other processes (`agent run --package`)."""

import concertina_trainer

__path__ += concertina_trainer.__path__

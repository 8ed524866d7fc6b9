"""Copy of the bundled trainer's package whose worker records the times of its steps (`agent run --package`)."""

import concertina_trainer

__path__ += concertina_trainer.__path__

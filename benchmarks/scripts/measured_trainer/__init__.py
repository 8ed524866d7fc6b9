"""Copy of the bundled trainer's package whose worker can switch off all measurements (`agent run --package`)."""

import concertina_trainer

__path__ += concertina_trainer.__path__

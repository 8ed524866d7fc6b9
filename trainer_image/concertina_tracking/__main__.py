"""Entry point of `python -m concertina_tracking` (see `process`)."""

from concertina_tracking.process import main

main()

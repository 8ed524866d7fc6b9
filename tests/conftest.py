"""For all tests."""

from hypothesis import settings

# An example's time says more about the machine's load than about the code.
settings.register_profile("concertina", deadline=None)
settings.load_profile("concertina")

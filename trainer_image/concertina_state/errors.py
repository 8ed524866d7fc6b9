"""What keeps a state from being saved or restored, as a sentence for a person."""


class BadInput(Exception):
    """Trying again can't help: the message says what is wrong and what to do."""


class RestoreFailed(Exception):
    """The state could not be read; another source, or another try, may help."""

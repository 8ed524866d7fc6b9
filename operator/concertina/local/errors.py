"""What the local cluster refuses or cannot do, in a sentence for the person at the terminal."""


class LocalClusterError(Exception):
    """Something that a person has to know or mend; its text says what happened, why, and what to do."""

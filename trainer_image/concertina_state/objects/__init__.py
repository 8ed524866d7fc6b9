"""Objects behind a URI: in S3, in other cloud stores, or in a folder."""

try:
    import obstore as _client  # noqa: F401
except ImportError as error:
    raise ModuleNotFoundError(
        "Reading and writing at a URI needs the package obstore, which this Python does not have: "
        "pip install 'concertina-sdk[storage]' (Python 3.10 or newer)",
        name="obstore",
    ) from error

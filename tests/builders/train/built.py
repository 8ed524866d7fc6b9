"""Content of a folder of built data."""

from concertina_data.data_manifest import parse


def documents(folder):
    """Return the documents of a built folder of bytes, in order."""
    manifest = parse((folder / "manifest.json").read_bytes(), "")
    return [
        text.decode()
        for shard in manifest.shards
        for text in (folder / shard.file).read_bytes().split(b"\0")[:-1]
    ]  # fmt: skip

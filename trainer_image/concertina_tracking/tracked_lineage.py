"""Origin of a checkpoint, for users who find the checkpoint in the tool that tracks the run.

The origin is read from the checkpoint's manifest in storage.
"""

from __future__ import annotations

from collections.abc import Mapping


def made_of(uri: str) -> Mapping[str, str]:
    """Return the origin of a checkpoint, as a mapping from the name of a field to its text.

    If the manifest cannot be read, the result is empty, and the checkpoint is tracked without its origin. `concertina
    checkpoint show` prints the whole origin.
    """
    try:
        from concertina_state.checkpoints.reader import StoredCheckpoint
        from concertina_state.errors import InvalidInput
        from concertina_state.objects.prefix import StorageError
    except ImportError:  # the image has no storage client
        return {}
    try:
        manifest = StoredCheckpoint(uri).manifest
    except (InvalidInput, StorageError):  # for example, a newer checkpoint has replaced it
        return {}
    lineage = manifest.lineage
    tags = {
        "position": f"{manifest.position}",
        "config": manifest.config,
        "data": manifest.data,
        "data_sets": " ".join(lineage.data_sets),
        "images": " ".join(lineage.images),
        "devices": ", ".join(lineage.devices),
        "script": lineage.script,
        "spec": lineage.spec_digest,
        "parent": lineage.parent.uri if lineage.parent else lineage.begun_from,
    }
    return {name: value for name, value in tags.items() if value}

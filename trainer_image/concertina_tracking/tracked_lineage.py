"""Origin of a checkpoint as its manifest in storage describes it, for users who find the checkpoint in the tracker."""

from __future__ import annotations

from collections.abc import Mapping


def made_of(uri: str) -> Mapping[str, str]:
    """Return the origin of a checkpoint, by field.

    The result is empty if the manifest cannot be read. The checkpoint is tracked even then, and `concertina checkpoint
    show` prints the whole origin.
    """
    try:
        from concertina_state.checkpoints.reader import StoredCheckpoint
        from concertina_state.errors import InvalidInput
        from concertina_state.objects.prefix import StorageError
    except ImportError:  # an image without a storage client
        return {}
    try:
        manifest = StoredCheckpoint(uri).manifest
    except (InvalidInput, StorageError):  # a newer checkpoint may have replaced it
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

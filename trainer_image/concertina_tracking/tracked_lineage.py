"""What a checkpoint was made of, as its manifest in storage says, for whoever finds it in the tracker."""

from __future__ import annotations

from collections.abc import Mapping


def made_of(uri: str) -> Mapping[str, str]:
    """Empty where that can't be read: the run is told of the checkpoint all the same, and `concertina checkpoint show`
    has all of it."""
    try:
        from concertina_state.checkpoints.reader import StoredCheckpoint
        from concertina_state.errors import InvalidInput
        from concertina_state.objects.prefix import StorageError
    except ImportError:  # an image without a client of storage
        return {}
    try:
        manifest = StoredCheckpoint(uri).manifest
    except (InvalidInput, StorageError):  # a newer one may have taken its place by now
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

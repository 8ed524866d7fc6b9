"""Reader of TensorBoard's files."""

from tensorboard.backend.event_processing import event_accumulator


def scalars(folder):
    """Return every point that TensorBoard shows, by tag: (step, value); and the newest text of each tag."""
    found = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    texts = {tag: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}, texts

"""Reader of TensorBoard's files."""

from tensorboard.backend.event_processing import event_accumulator


def scalars(folder):
    """Return every point that TensorBoard shows, by tag: (step, value); and the newest text of each tag."""
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}, texts

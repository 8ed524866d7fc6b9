"""State of a training job: boxes of global tensors, in node memory, on peers and in durable storage.

The bundled trainer saves its state through this package. Training scripts use it through `trainingjob.State`, in images
of their own. It requires Python 3.9 or later and `concertina_protocol`. Durable storage requires obstore, and tensors
require torch (only `catalogue` and `tensors` import it; `buffers` does the work of both for plain memory).

Saving:    `catalogue` (which boxes a rank has; `placement` computes them, `holdings` shares them out) -> `saving` and
           `interval` (when) -> `snapshots` (files in node memory, in the format of `format.shardfile`) -> `uploader`
           and `checkpoints` (durable storage, through `objects`); `lineage` records what went into the state
Restoring: `saved` (wherever the state lies) -> `format.read_plan` (which bytes) -> `filling` (read them) -> `tensors`
           (copy them into place)
"""

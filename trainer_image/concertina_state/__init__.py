"""The state of a training job: boxes of global tensors, in node memory, on peers and in durable storage.

The bundled trainer keeps its state by it, and scripts do by `trainingjob.State`, in images of their own: Python 3.10+,
nothing beside it but `concertina_protocol`, obstore where there is durable storage, and torch where there are tensors
(`catalogue` and `tensors` alone import it; `buffers` is both of them for plain memory).

Out:   `catalogue` (which boxes a rank has; `placement` computes them, `holdings` shares them out) -> `saving` and
       `interval` (when) -> `snapshots` (files in node memory, of `format.shardfile`) -> `uploader` and `checkpoints`
       (durable storage, by `objects`); `lineage` is what went into it
Back:  `saved` (wherever it lies) -> `format.read_plan` (which bytes) -> `filling` (read) -> `tensors` (into place)
"""

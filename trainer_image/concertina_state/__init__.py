"""State of a training job: saved as boxes (rectangular parts) of global tensors, and restored by any number of ranks.

A state is kept in node memory, with a copy on another node, and in durable storage. The bundled trainer saves its state
through this package. Training scripts in users' own images use it through `trainingjob.State`. The package requires
Python 3.9 or later and `concertina_protocol`. Durable storage requires obstore. The modules `state_index` and `tensors`
require torch. The module `buffers` replaces both of them for arrays in plain memory.

Modules that save, in order of use:
- `placement` computes which box of each tensor a rank has. `holdings` divides boxes that several ranks have among these
  ranks.
- `state_index` lists the tensors of a rank.
- `saving` and `interval` decide when to save.
- `snapshots` writes files into node memory, in the format of `format.shardfile`.
- `uploader` and `checkpoints` write to durable storage, through `objects`.
- `lineage` records which rounds, data and settings led to the state.

Modules that restore, in order of use:
- `saved` is the interface to a saved state in memory or in storage.
- `format.read_plan` computes which bytes to read.
- `filling` reads these bytes.
- `tensors` copies them into tensors.

A round is a period in which a fixed set of replicas trains.
"""

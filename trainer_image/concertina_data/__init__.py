"""Training data: token shards under a manifest, which sequence of them stands where, and how they are read.

The bundled trainer reads by it, and scripts do by `trainingjob.data`, in images of their own: Python 3.10+, nothing
beside it but `concertina_protocol` and `concertina_state`, obstore where data lie in a store, torch in `sequences`.

    `manifest` (which shards) -> `order` (which sequence at which position) -> `places` (a folder) or `cache` (a store,
    its files on this node), checked by `files` -> `opening` (shards opened ahead) -> `sequences` (rows of tokens)
"""

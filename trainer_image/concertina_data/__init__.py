"""Training data: token shards under a manifest, the order of their sequences, and how they are read.

The bundled trainer reads its data through this package. Training scripts use it through `trainingjob.data`, in images
of their own. It requires Python 3.9 or later, `concertina_protocol` and `concertina_state`. Data in a store require
obstore. Rows of tokens are tensors where torch is installed.

    `manifest` (which shards) -> `order` (which sequence at which position) -> `places` (a folder) or `cache` (a store,
    its files on this node), verified by `files` -> `opening` (shards opened ahead) -> `sequences` (which fill `rows`)
"""

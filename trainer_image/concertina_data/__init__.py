"""Training data: shards of tokens with a manifest, the order of their sequences, and the code that reads them.

The bundled trainer reads its data through this package. Training scripts in users' own images use it through
`trainingjob.data`. The package requires Python 3.9 or later, `concertina_protocol` and `concertina_state`. To read data
from a store, the package requires obstore. If torch is installed, rows of tokens are tensors.

The modules, in the order in which a read uses them:
- `data_manifest`: the shards of a data set.
- `order`: the sequence at each position.
- `places`: a data set in a folder of this machine.
- `cache`: a data set in a store, with copies of its files on this node.
- `files`: verification of a file's contents.
- `opening`: shards that are opened before they are needed.
- `sequences`: sequences that are cut out of open shards.
- `rows`: the memory that sequences are copied into.
"""

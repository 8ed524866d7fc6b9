"""Everything that a worker or the uploader will need, imported once in the parent that they are forked from.

Only imports: a tensor operation here would start threads that don't survive a fork, and hang every child. The parent's
environment must have OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1 (else `import torch` leaves a second thread), and
PYTORCH_NVML_BASED_CUDA_CHECK=1 so that asking for GPUs doesn't open one.
"""

# torch imports these lazily, at FSDP's first wrap and first step; each costs up to 2 s there.

import concertina_trainer.store
import concertina_trainer.uploader
import concertina_trainer.worker  # noqa: F401

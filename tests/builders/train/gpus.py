"""Assignment of GPUs to the ranks of a test.

If there are fewer GPUs than ranks, ranks share them. NCCL refuses a GPU to two ranks of one host, so each rank claims a
host of its own. Its communication then uses sockets, and nothing overlaps.
"""

import pytest
import torch


def need(ranks: int) -> None:
    """Skip the test if there is no GPU at all."""
    if not torch.cuda.is_available():
        pytest.skip(f"this machine has no CUDA device: NCCL's groups of {ranks} were not tried")


def variables(rank: int, ranks: int) -> dict[str, str]:
    if not torch.cuda.is_available() or torch.cuda.device_count() >= ranks:
        return {"LOCAL_RANK": str(rank)}
    return {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank {rank}"}

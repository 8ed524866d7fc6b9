"""Which GPU a rank of a test has. Where there are fewer than ranks they share one: NCCL refuses that to ranks of one
host, so each is told that it is a host of its own. What it sends then goes by sockets, and nothing overlaps."""

import pytest
import torch


def need(ranks: int) -> None:
    """Skips where there is no GPU for them at all."""
    if not torch.cuda.is_available():
        pytest.skip(f"this machine has no CUDA device: NCCL's groups of {ranks} were not tried")


def variables(rank: int, ranks: int) -> dict[str, str]:
    if not torch.cuda.is_available() or torch.cuda.device_count() >= ranks:
        return {"LOCAL_RANK": str(rank)}
    return {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank {rank}"}

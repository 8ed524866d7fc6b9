"""Faster `detach` of DTensors in torch, which does not derive the sharding of the result again.

FSDP detaches each parameter several times when it shards a model. For each shape, torch derives how the result is
sharded, although a detached tensor is always sharded like its source. The derived values are in a cache, which a new
round must not use (`concertina_state.process_groups.leave`).

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def skip_propagation() -> None:
    """Make torch detach DTensors without sharding propagation, in the whole process.

    The function changes a private table of torch. In a version of torch without this table, the sharding is derived as
    usual.
    """
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if handlers is not None:
        handlers[torch.ops.aten.detach.default] = _detached


def _detached(op_call: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> DTensor:
    [tensor] = args
    assert isinstance(tensor, DTensor)
    return DTensor(op_call(tensor._local_tensor), tensor._spec, requires_grad=False)

"""Detection of silent data corruption: differences between bits that should be equal.

FSDP shards the weights, so ranks have no copies of weights to compare between steps. Two other checks are made every
`corruption_check_steps` steps (decision "Silent corruption under FSDP"):

- Gathered weights: in the forward pass, FSDP gathers the same weights on all ranks, and the ranks compare digests of
  them. If the digest of one rank differs from the digests of the others, the memory or the network of that rank has
  corrupted the weights.
- Resting state: a rank's own weights and moments must not change between the end of one step and the weight update of
  the next step. A rank checks this without other ranks.

These checks do not detect a wrong result of arithmetic that reaches all ranks in the same way. Such a result may change
the loss noticeably (see `anomalies`).

A digest combines the hashes of tensors in order. The hash is torch.hash_tensor (an exclusive or), so a digest detects
accidental changes, but not deliberate ones.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from concertina_protocol import FailureReason
from concertina_protocol.messages.ranges import Ranges
from concertina_trainer.errors import RollBack
from concertina_trainer.model.experts import Experts
from concertina_trainer.model.optimizer import local
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext

_MODULUS = 2**48 - 59
"""Prime below 2**53, so that float64 represents every digest exactly."""


def hashes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the hash of each tensor that is not empty, as an int64 scalar on the tensor's device.

    The host does not wait for the hashes.
    """
    return [torch.hash_tensor(tensor).view(torch.int64) for tensor in tensors if tensor.numel()]


def mixed(scalars: Sequence[Tensor]) -> int:
    """Return one digest of all hashes, which depends on their order.

    The host waits once for each device, not once for each hash.
    """
    indices: dict[torch.device, list[int]] = {}
    for index, scalar in enumerate(scalars):
        indices.setdefault(scalar.device, []).append(index)
    values = [0] * len(scalars)
    for same_device in indices.values():
        for index, value in zip(
            same_device, torch.stack([scalars[index] for index in same_device]).tolist(), strict=True
        ):
            values[index] = value
    total = 0
    for value in values:
        total = (total * 1_000_003 + value + 1) % _MODULUS
    return total


def digest(tensors: Iterable[Tensor]) -> int:
    return mixed(hashes(tensors))


class Digests:
    """Checks for silent data corruption by digests, in this process and between ranks."""

    def __init__(self, every: int, model: Stages, still: Sequence[Tensor], world: DistContext, step: int) -> None:
        """Prepare the checks. The state tensors `still` of this rank after `step` steps are assumed to be correct."""
        self._every, self._still, self._rank, self._size = every, still, world.rank, world.size
        self._alike = world.alike
        self._agreed = step
        self._gathered: list[Tensor] = []
        """Hashes of the weights that FSDP has gathered on this rank in this step.

        The host reads them after the backward pass, because a wait in a forward hook would stop FSDP's prefetching.
        """
        self._resting: int | None = None
        self._unseen: set[nn.Module] = set()
        self._own: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        if every:
            for module in model.modules():
                # With expert parallelism, ranks gather different experts, so only the resting state of experts is
                # checked.
                dealt_out = world.meshes.expert is not None and isinstance(module, Experts)
                if isinstance(module, FSDPModule) and not dealt_out:
                    self._own[module] = _own_parameters(module)
                    module.register_forward_pre_hook(self._see)

    def due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def begin(self, step: int) -> None:
        """Prepare for the forward pass of the step that comes after `step` finished steps."""
        self._gathered, self._unseen = [], set(self._own) if self.due(step) else set()

    def _see(self, module: nn.Module, arguments: Any) -> None:
        """Hash a module's weights before its forward pass. FSDP's own hook has already gathered the weights."""
        if module in self._unseen:
            self._unseen.remove(module)
            tensors = (local(getattr(owner, name).detach()) for owner, name in self._own[module])
            self._gathered += hashes(tensors)

    def rest(self, step: int) -> None:
        """Hash the resting state, which is this rank's weights and moments.

        Call this method at the end of each step, after the weight update of `step` and after any long work, such as
        saving.
        """
        self._resting = digest(self._still) if self.due(step) else None

    def payload(self, step: int, device: torch.device) -> Tensor:
        """Return this rank's payload for the all-reduce of the step, float64.

        If a check is due, the payload is `[2 * ranks]`. Each half has one element for each rank. In the first half,
        this rank's element is its digest of gathered weights. In the second half, it is 1 if this rank's resting state
        has changed. If no check is due, the payload is empty.
        """
        if not self.due(step):
            return torch.empty(0, dtype=torch.float64, device=device)
        values = torch.zeros(2, self._size, dtype=torch.float64)
        values[0, self._rank] = mixed(self._gathered)
        values[1, self._rank] = self._resting is not None and digest(self._still) != self._resting
        return values.flatten().to(device)

    def check(self, step: int, payload: Sequence[float], skipped: Ranges) -> None:
        """Check that all ranks gathered the same weights, and that no rank's resting state changed.

        `payload` is the sum of all ranks' payloads.

        Raises:
            RollBack: When the check fails. All ranks go back to the last step at which the check passed, or to an
                earlier one.
        """
        if not payload:
            return
        gathered, changed = payload[: self._size], payload[self._size :]
        bad = {rank: "its memory changed while nothing wrote to it" for rank in range(self._size) if changed[rank]}
        for ranks in self._alike:
            counts = collections.Counter(gathered[rank] for rank in ranks).most_common()
            if len(counts) > 1:
                has_majority = counts[0][1] > len(ranks) - counts[0][1]
                deviating = [rank for rank in ranks if not has_majority or gathered[rank] != counts[0][0]]
                verdict = (
                    "has other weights than most ranks"
                    if has_majority
                    else "is one of several ranks with different weights"
                )
                bad |= dict.fromkeys(deviating, verdict)
        if not bad:
            self._agreed = step
            return
        descriptions = "; ".join(f"rank {rank} {why}" for rank, why in sorted(bad.items())[:5])
        reason = FailureReason.SILENT_CORRUPTION if self._rank in bad else FailureReason.ROLLED_BACK
        node = os.environ.get("CONCERTINA_NODE", "")
        here = f" (this is rank {self._rank} on node {node})" if self._rank in bad and node else ""
        message = (
            f"silent corruption detected after step {step}: {descriptions}{here}; all ranks go back to step "
            f"{self._agreed} or before"
        )
        raise RollBack(reason, message, self._agreed, skipped)


def _own_parameters(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the parameters that FSDP gathers together with this module, as pairs of a module and a name.

    Parameters of inner modules that FSDP gathers separately are left out.
    """
    inner = {part for child in module.modules() if child is not module and isinstance(child, FSDPModule)
             for part in child.modules()}  # fmt: skip
    parts = [part for part in module.modules() if part not in inner]
    return [(part, name) for part in parts for name, _ in part.named_parameters(recurse=False)]

"""Operations of torch whose results are wrong, as those of a faulty GPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Wrong(TorchDispatchMode):
    """Change one element of the result of each call of some operations in this thread."""

    def __init__(self, *operations: Any) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self._operations:
            result.view(-1)[result.numel() // 2] += 1
        return result

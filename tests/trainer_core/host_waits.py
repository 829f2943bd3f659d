"""How often the host asks for numbers that the device computes, for which it has to wait; counted on the CPU too."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_core.batching import draw_batches

ASKING = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.nonzero}
"""What takes more than one number to the host; one number goes by an operation of its own, whoever asks for it."""


class HostWaits:
    """Counts while it is on. A batch is drawn on the host: what is asked for there is not counted."""

    def __init__(self) -> None:
        self.count = 0
        self._is_drawing = False
        self._stack = ExitStack()

    def __enter__(self) -> "HostWaits":
        def draw_uncounted(*arguments: Any) -> Iterator[Any]:
            self._is_drawing = True
            try:
                batches = list(draw_batches(*arguments))
            finally:
                self._is_drawing = False
            yield from batches

        self._stack.enter_context(mock.patch("trainer_core.train.draw_batches", draw_uncounted))
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self) -> None:
        """Count one."""
        self.count += not self._is_drawing


class _Functions(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in ASKING:
            self._waits.add()
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self._waits.add()
        return function(*args, **(kwargs or {}))

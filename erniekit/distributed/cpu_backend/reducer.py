"""Averaging gradients for `paddle.DataParallel`, in place of a C++ class that takes a C++ process group only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from paddle.base import core

from erniekit.distributed.cpu_backend.memory import read_numbers, write_numbers
from erniekit.distributed.cpu_backend.process_group import SocketProcessGroup


class Reducer:
    """Stands in for `core.EagerReducer`: after a backward pass, every gradient is its average over the ranks.

    A parameter that took no part on this rank gets a gradient all the same, since it may have taken part on another.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        groups: Sequence[Sequence[int]],
        is_sparse: Sequence[bool],
        process_group: SocketProcessGroup,
        buffer_sizes: Sequence[int],
        find_unused_parameters: bool,
    ) -> None:
        self._parameters = list(parameters)
        self._groups = groups  # indices of parameters of one dtype whose gradients travel together
        self._process_group = process_group

    def prepare_for_backward(self, outputs: Sequence[paddle.Tensor]) -> None:
        core.eager._add_backward_final_hook(self._average)  # called once

    def _average(self) -> None:
        for indices in self._groups:
            gradients = []
            for index in indices:
                parameter = self._parameters[index]
                if parameter.grad is None:
                    parameter.grad = paddle.zeros_like(parameter)
                gradients.append(parameter.grad)
            values = [read_numbers(gradient) for gradient in gradients]
            fused = paddle.to_tensor(np.concatenate(values))
            self._process_group.all_reduce(fused, core.ReduceOp.AVG)
            ends = np.cumsum([value.size for value in values])[:-1]
            for gradient, average in zip(gradients, np.split(read_numbers(fused), ends), strict=True):
                write_numbers(gradient, average)

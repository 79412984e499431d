"""Average gradients for `paddle.DataParallel`; replaces a C++ class that only takes a C++ process group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from paddle.base import core

from erniekit.distributed.cpu_backend.memory import read_numbers, write_numbers
from erniekit.distributed.cpu_backend.process_group import SocketProcessGroup


class Reducer:
    """Replaces `core.EagerReducer`: after a backward pass, every gradient is its average over the ranks.

    A parameter unused on this rank also gets a gradient, since another rank may have used it.
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
        self._groups = groups  # indices of parameters of one dtype whose gradients are reduced together
        self._process_group = process_group

    def prepare_for_backward(self, outputs: Sequence[paddle.Tensor]) -> None:
        core.eager._add_backward_final_hook(self._average)  # it is called once

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

"""Our attention: the native kernel, Paddle's operators by documents, or a dense mask."""

from __future__ import annotations

from attention_side import Call, serve_calls  # isort: skip -- it finds the others
import numpy as np
from attention_case import Inputs, Sample, document_ends, first_queries

from erniekit.environment import import_paddle

import_paddle()
import paddle

from erniekit.model.attention import AttentionPlan, attention
from erniekit.native import library


def prepare(row: list[Sample], numbers: Inputs, way: str, backward: bool) -> Call:
    """`way`: "native", "documents" or "dense"."""
    library.use(library.AUTO if way == "native" else library.PADDLE)
    tensors = [paddle.to_tensor(array, stop_gradient=not backward) for array in numbers[:3]]
    gradient = paddle.to_tensor(numbers.gradient)
    causal = not row[0].both_ways
    columns = [document_ends(row)] if causal else [document_ends(row), first_queries(row)]
    plan = AttentionPlan.build(np.stack(columns, -1)[None, None], dense=way == "dense", causal=causal)

    def call() -> list[paddle.Tensor]:
        for tensor in tensors:
            tensor.clear_gradient(set_to_zero=False)
        out = attention(*tensors, plan)
        if not backward:
            return [out]
        out.backward(gradient)
        return [out, *(tensor.grad for tensor in tensors)]

    return call


serve_calls(prepare)

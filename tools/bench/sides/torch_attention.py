"""torch's attention: sdpa with a dense mask, sdpa document by document, and flex_attention, compiled.

torch 2.13 has no backward pass of flex_attention on a CPU, so it runs forward only.
"""

from __future__ import annotations

from collections.abc import Callable

from attention_side import Call, serve_calls  # isort: skip -- it finds the others
import torch
from attention_case import Inputs, Sample, document_ends, first_queries
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of [1, N, S, D]

compiled = torch.compile(flex_attention, dynamic=False)


def with_mask(row: list[Sample]) -> Core:
    """One call over the whole row."""
    ends, first = torch.from_numpy(document_ends(row)), torch.from_numpy(first_queries(row))
    index = torch.arange(row[-1].end)[:, None]
    mask = (index >= first) & (index < ends)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def by_documents(row: list[Sample]) -> Core:
    """A call for each document, causal unless it is read both ways; the rejected answer has one of its own, with a mask
    of what it sees."""
    masks = {}
    for sample in row:
        queries, question = sample.end - sample.rejected, sample.chosen - sample.start
        causal = torch.ones(queries, queries, dtype=torch.bool).tril()
        masks[sample] = torch.cat([torch.ones(queries, question, dtype=torch.bool), causal], 1)

    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = []
        for sample in row:
            first = slice(sample.start, sample.rejected)
            part = [x[:, :, first] for x in (q, k, v)]
            parts.append(scaled_dot_product_attention(*part, is_causal=not sample.both_ways, enable_gqa=True))
            if sample.rejected < sample.end:
                question, rejected = slice(sample.start, sample.chosen), slice(sample.rejected, sample.end)
                seen = [torch.cat([x[:, :, question], x[:, :, rejected]], 2) for x in (k, v)]
                mask = masks[sample]
                parts.append(scaled_dot_product_attention(q[:, :, rejected], *seen, attn_mask=mask, enable_gqa=True))
        return torch.cat(parts, 2)

    return core


def flex(row: list[Sample]) -> Core:
    ends, first, length = torch.from_numpy(document_ends(row)), torch.from_numpy(first_queries(row)), row[-1].end

    def visible(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= first[key]) & (query < ends[key])

    blocks = create_block_mask(visible, 1, None, length, length, device="cpu")
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=True)


WAYS = {"mask": with_mask, "documents": by_documents, "flex": flex}


def prepare(row: list[Sample], numbers: Inputs, way: str, backward: bool) -> Call:
    tensors = [torch.from_numpy(array).requires_grad_(backward) for array in numbers[:3]]
    gradient = torch.from_numpy(numbers.gradient)
    core = WAYS[way](row)

    def call() -> list[torch.Tensor]:
        for tensor in tensors:
            tensor.grad = None
        out = core(*(tensor.transpose(1, 2) for tensor in tensors)).transpose(1, 2)
        if not backward:
            return [out]
        out.backward(gradient)
        return [out.detach(), *(tensor.grad for tensor in tensors)]

    return call


serve_calls(prepare)

"""Adapters and frozen weights made one: the same model without adapters, computed in float32."""

from __future__ import annotations

from erniekit.model.adapters.lora import named_adapters
from erniekit.model.decoder import Decoder
from erniekit.model.moe.router import GateStatistics
from erniekit.model.weights import named_linears


def merge_adapters(decoder: Decoder) -> None:
    """Put every adapter's update into its weight, in place, and remove the adapter; all weights can be trained again.

    For files instead of a decoder, tensor by tensor: `files.read_adapters` and `low_rank.merged_weight`.
    """
    linears = named_linears(decoder)
    for path, adapter in named_adapters(decoder).items():
        linear = linears[path]
        linear.set_dense_weight(adapter.effective_weight(linear.dense_weight))
        linear.adapter = None
    decoder.adapters = None
    for layer in decoder.sublayers():
        for parameter in layer.parameters(include_sublayers=False):
            parameter.stop_gradient = isinstance(layer, GateStatistics)  # which no gradient ever reaches

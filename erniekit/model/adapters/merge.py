"""Adapters and frozen weights made one: the same model without adapters, computed in float32."""

from __future__ import annotations

from erniekit.model.adapters.lora import named_adapters
from erniekit.model.decoder import Decoder
from erniekit.model.moe.router import GateStatistics
from erniekit.model.weights import named_linears


def merge_adapters(decoder: Decoder) -> None:
    """Put every adapter's update into its weight, in place, and remove the adapter; all weights can be trained again,
    those that were kept in few bits, too.

    For files instead of a decoder, tensor by tensor: `files.read_adapters` and `low_rank.merged_weight`.
    """
    adapters = named_adapters(decoder)
    for path, linear in named_linears(decoder).items():
        if path in adapters:
            linear.set_dense_weight(adapters[path].effective_weight(linear.dense_weight))
            linear.adapter = None
        elif linear.weight is None:
            linear.set_dense_weight(linear.dense_weight)
    decoder.adapters = None
    for layer in decoder.sublayers():
        for parameter in layer.parameters(include_sublayers=False):
            parameter.stop_gradient = isinstance(layer, GateStatistics)  # which no gradient ever reaches

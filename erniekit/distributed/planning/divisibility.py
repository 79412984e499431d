"""Check that a layout can shard a model, before any memory is allocated. Needs no Paddle or NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.distributed.stages import BY_LAYER, DECODER_LAYER, layer_chunks
from erniekit.errors import ConfigurationError
from erniekit.model.architectures.parts import decoder_linears
from erniekit.model.quantization.settings import Fp8, WeightOnly, rotation_problem

if TYPE_CHECKING:
    from erniekit.distributed.topology import Topology
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.quantization.settings import Quantization

EXPERTS_ALONG = {"tensor": "tensor_parallel_degree", "data": "the data-parallel degree"}


def check_divisible(
    model: ModelConfig,
    topology: Topology,
    *,
    max_seq_len: int,
    pp_seg_method: str | tuple[int, ...] = BY_LAYER + DECODER_LAYER,
    add_tail_layers: int = 0,
    quantization: Quantization | None = None,
) -> list[range]:
    """Check that every rank can have an equal shard of the model.

    Args:
        quantization: quantized weights or FP8 products of linear layers; None: neither.

    Returns:
        The layers of each model chunk of the pipeline, see `stages.layer_chunks`.

    Raises:
        ConfigurationError: some dimensions cannot be sharded; each has a paragraph that says what to write instead.
    """
    problems = _tensor_problems(model, topology, max_seq_len)
    if isinstance(quantization, WeightOnly):
        problems += _packed_problems(model, topology, quantization)
    if isinstance(quantization, Fp8):
        problems += _rotation_problems(model, topology, quantization)
    if topology.expert > 1 and topology.expert_axis and model.moe_num_experts % topology.expert:
        key = model.architecture.key_names.get("moe_num_experts", "moe_num_experts")
        problems.append(
            f"{key} {model.moe_num_experts} cannot be sharded over {topology.expert} ranks "
            f"({EXPERTS_ALONG[topology.expert_axis]})\n  write moe_group: dummy, or a degree of "
            f"{_divisors(model.moe_num_experts)}"
        )
    chunks: list[range] = []
    try:
        chunks = layer_chunks(model.num_hidden_layers, topology, method=pp_seg_method, tail=add_tail_layers)
    except ConfigurationError as error:
        problems.append(str(error))
    if problems:
        raise ConfigurationError("\n".join(problems))
    return chunks


def _tensor_problems(model: ModelConfig, topology: Topology, max_seq_len: int) -> list[str]:
    """Return the dimensions that cannot be split into `topology.tensor` equal shards."""
    degree = topology.tensor
    sizes = model.architecture.tensor_parallel_sizes(model)
    wrong = {name: size for name, size in sizes.items() if size % degree}
    problems = []
    if wrong:
        largest = min(degree - 1, *sizes.values())
        fitting = [divisor for divisor in range(1, largest + 1) if all(size % divisor == 0 for size in sizes.values())]
        what = ", ".join(f"{name} {size:,}" for name, size in wrong.items())
        lines = [f"tensor_parallel_degree {degree} does not divide {what} of the model"]
        if model.num_key_value_heads < degree:
            lines.append(
                "  Key heads are not replicated: copies would have the same values, and their "
                "gradients would have to be summed in every layer; more shards than key heads save no memory for them."
            )
        lines.append(f"  write tensor_parallel_degree: {' or '.join(map(str, fitting))}")
        problems.append("\n".join(lines))
    elif undivided := _undivided_weights(model, degree):
        shown = ", ".join(undivided[:3]) + (", ..." if len(undivided) > 3 else "")
        problems.append(f"tensor_parallel_degree {degree} does not divide these weights of {model.model_type}: {shown}")
    if topology.sequence_parallel and max_seq_len % degree:
        problems.append(
            f"sequence_parallel shards rows of max_seq_len {max_seq_len:,} over {degree} ranks, and {degree} does "
            "not divide it\n  write "
            + (f"max_seq_len: {max_seq_len // degree * degree}, or " if degree <= max_seq_len else "")
            + "sequence_parallel: false"
        )
    return problems


def _undivided_weights(model: ModelConfig, degree: int) -> list[str]:
    """Weights of which ranks would have unequal slices although all sizes of the configuration can be divided."""
    undivided = []
    for name, shape in model.weight_shapes().items() if degree > 1 else ():
        weight = model.architecture.weight_info(name)
        axis = weight.placement().axis
        if axis is not None and (shape[::-1] if weight.is_linear else shape)[axis] % degree:
            undivided.append(name)
    return undivided


def _packed_problems(model: ModelConfig, topology: Topology, weight_only: WeightOnly) -> list[str]:
    """Return the linear layers whose input shards would split inputs that share a scale."""
    wrong = {}
    for path, (_, inputs) in decoder_linears(model).items():
        form = weight_only.form(path, model.architecture)
        if model.architecture.placement(f"{path}.weight").axis == 0 and not form.divides(inputs, topology.tensor):
            wrong[path.rpartition(".")[2]] = f"{inputs:,} inputs in groups of {form.group(inputs)}"
    if not wrong:
        return []
    what = ", ".join(f"{name} ({inputs})" for name, inputs in wrong.items())
    return [
        f"weight_quantize_algo {weight_only.algorithm}: {topology.tensor} tensor-parallel ranks would split inputs "
        f"that share a scale: {what}\n  write a smaller tensor_parallel_degree, or weight_only_int8, whose scales "
        "belong to outputs"
    ]


def _rotation_problems(model: ModelConfig, topology: Topology, fp8: Fp8) -> list[str]:
    """Return the linear layers whose inputs on a rank are not a multiple of the Hadamard block size."""
    own_inputs = {}
    for path, (_, inputs) in decoder_linears(model).items():
        divided = model.architecture.placement(f"{path}.weight").axis == 0
        own_inputs[path] = inputs // topology.tensor if divided else inputs
    problem = rotation_problem(fp8, own_inputs)
    return [problem] if problem else []


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)

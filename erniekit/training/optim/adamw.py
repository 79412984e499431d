"""AdamW with weight decay for matrices only, layer-wise learning rates, and its state as named arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.optimizer import AdamW

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import CheckpointError
from erniekit.model import native
from erniekit.model.architectures.parts import AUDIO, LLM
from erniekit.model.local_tensors import LocalTensors, tensor_spec
from erniekit.model.storage.safetensors import StoredTensor
from erniekit.training.collectives import SINGLE_PROCESS, Ranks

# Paddle's names of AdamW's state of a parameter: two moments, and the powers of the betas, shape [1].
STATE_KINDS = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
MASTER_WEIGHT = "master_weight"  # the float32 copy of a 16-bit parameter, which is updated


PartOf = Callable[[str], str]  # the name of a parameter -> the part of the model that it belongs to


def decoder_only(name: str) -> str:
    """Return the part of every parameter of a model without encoders."""
    return LLM


class StatefulAdamW(AdamW):
    """Paddle's AdamW, with access to its state by the tensor's name and a kind of state.

    Paddle's `state_dict` is not used: its keys are counters of the process (`linear_0.w_0_moment1_0`), which mean
    another parameter, or none, in the process that resumes.
    """

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> Any:
        """Update one tensor: in one pass of our own kernel where it runs, else by Paddle's operator.

        Paddle calls this for every tensor with a gradient. Both compute the same formula.
        """
        return None if self._updated_natively(*param_and_grad) else super()._append_optimize_op(block, param_and_grad)

    def _updated_natively(self, parameter: Tensor, gradient: Tensor) -> bool:
        if parameter.dtype != paddle.float32 or not gradient.is_dense():
            return False
        rate = self._create_param_lr((parameter, gradient))
        moment1, moment2, *powers = (self._accumulators[kind][parameter.name] for kind in STATE_KINDS)
        tensors = [parameter, gradient, moment1, moment2, rate, *powers]
        update = native.kernel("adamw", "lpppppppffff", *tensors)
        if update is None:
            return False
        decay = self._weight_decay if self._apply_decay_param_fun(parameter.name) else 0.0
        pointers = [tensor.data_ptr() for tensor in tensors]
        update(native.size(parameter), *pointers, self._beta1, self._beta2, self._epsilon, decay)
        return True

    def kinds(self, updated: Tensor) -> tuple[str, ...]:
        """Return the kinds of state of a tensor: `STATE_KINDS`, and `MASTER_WEIGHT` if it has 16 bits."""
        return (*STATE_KINDS, MASTER_WEIGHT) if updated.element_size() == 2 else STATE_KINDS

    def state_spec(self, kind: str, parameter: StoredTensor) -> StoredTensor:
        """Return dtype and shape of a state: at least float32, powers of betas of shape [1]."""
        shape = (1,) if kind.endswith("pow_acc") else parameter.shape
        return StoredTensor("F64" if parameter.dtype == "F64" else "F32", shape)

    def read(self, name: str, kind: str) -> Tensor:
        """Return AdamW's tensor itself, not a copy."""
        master = self._master_weights.get(name)
        if kind == MASTER_WEIGHT:
            return master
        return self._accumulators[kind][name if master is None else master.name]

    def write(self, name: str, kind: str, values: np.ndarray) -> None:
        """Set the tensor that `read` returns."""
        self.read(name, kind).set_value(values)


def build_optimizer(
    parameters: Mapping[str, Tensor],
    section: TrainingParameters,
    *,
    num_layers: int = 0,
    lora_plus_scale: float = 1.0,
    part_of: PartOf = decoder_only,
) -> StatefulAdamW:
    """Build AdamW over the trainable `parameters`, with its state; see `stateless_optimizer`."""
    optimizer = stateless_optimizer(
        parameters, section, num_layers=num_layers, lora_plus_scale=lora_plus_scale, part_of=part_of
    )
    create_state(optimizer, optimizer._parameter_list)
    return optimizer


def stateless_optimizer(
    parameters: Mapping[str, Tensor],
    section: TrainingParameters,
    make: Callable[..., StatefulAdamW] = StatefulAdamW,
    *,
    num_layers: int = 0,
    lora_plus_scale: float = 1.0,
    part_of: PartOf = decoder_only,
) -> StatefulAdamW:
    """Build AdamW over the trainable `parameters` (by Hugging Face name), before `create_state`.

    Its learning rate is 0 until the trainer sets it from the schedule before each update. Matrices decay; norms and
    biases (tensors with one dimension) do not. With a layerwise bound below 1, the learning rate of every parameter is
    multiplied by `layer_multiplier`; that of the factor B of an adapter by `lora_plus_scale` as well (LoRA+, Hayou et
    al., 2024, arXiv 2402.12354), and that of an audio encoder by `audio_lr_ratio`.

    Args:
        num_layers: the layers of the model, which only matter if `layerwise_lr_decay_bound` is below 1.
        part_of: returns the part of the model that a parameter belongs to (`model/architectures/parts.py`).
    """
    trainable = trainable_parameters(parameters)
    for name, parameter in trainable.items():
        part = part_of(name)
        depth = layer_depth(name, num_layers) if part == LLM else 0  # encoders stand before the first layer
        multiplier = layer_multiplier(depth, num_layers, section.layerwise_lr_decay_bound)
        if part == AUDIO:
            multiplier *= section.audio_lr_ratio
        if name.endswith(".lora_B"):
            multiplier *= lora_plus_scale
        parameter.optimize_attr["learning_rate"] = multiplier
    decaying = {parameter.name for parameter in trainable.values() if parameter.ndim > 1}
    return make(
        learning_rate=0.0,
        beta1=section.adam_beta1,
        beta2=section.adam_beta2,
        epsilon=section.adam_epsilon,
        weight_decay=section.weight_decay,
        apply_decay_param_fun=decaying.__contains__,
        parameters=list(trainable.values()),
        multi_precision=any(parameter.element_size() == 2 for parameter in trainable.values()),
    )


def create_state(optimizer: AdamW, updated: Iterable[Tensor]) -> None:
    """Create the state of the tensors that AdamW will update, all zeros.

    Not at the first update, so that it can be saved and loaded at any time, and memory runs out at the start if at all.
    """
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, list(updated))


def trainable_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that receive gradients, in the given order."""
    return {name: parameter for name, parameter in parameters.items() if not parameter.stop_gradient}


def describe_decay(parameters: Mapping[str, Tensor], weight_decay: float) -> str:
    """Return one line saying what decays and what does not, for the start of a run."""
    trainable = trainable_parameters(parameters).values()
    matrices = [parameter.size for parameter in trainable if parameter.ndim > 1]
    vectors = [parameter.size for parameter in trainable if parameter.ndim <= 1]
    return (
        f"AdamW: weight decay {weight_decay:g} on {len(matrices)} matrices ({sum(matrices):,} values); "
        f"none on {len(vectors)} norms and biases ({sum(vectors):,} values)"
    )


def layer_depth(name: str, num_layers: int) -> int:
    """Return a parameter's depth by its Hugging Face name: embedding 0, layer i (counted from 1) i,
    all others L + 2."""
    layer = re.search(r"\blayers\.(\d+)\.", name)
    if layer:
        return int(layer.group(1)) + 1
    return 0 if "embed_tokens" in name else num_layers + 2


def layer_multiplier(depth: int, num_layers: int, bound: float) -> float:
    """Return the factor on the learning rate at depth d: b + (1 - b) * d / (L + 2); 1 everywhere if b is 1."""
    return bound + (1.0 - bound) * depth / (num_layers + 2)


def optimizer_state(optimizer: StatefulAdamW, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return AdamW's state, `<parameter name>/<kind>` -> tensor."""
    local = _unsharded_state(optimizer, parameters).state
    return {name: local.read(name) for name in local.tensors}


class OptimizerState(NamedTuple):
    """The state of one rank's optimizer, and a function that sets one tensor of it."""

    state: LocalTensors
    write: Callable[[str, np.ndarray], None]


def full_optimizer_tensors(optimizer: Any, parameters: Mapping[str, Tensor]) -> LocalTensors:
    """Return the optimizer's state; if ranks shard it, the full state."""
    return full_optimizer_state(optimizer, parameters).state


def full_optimizer_state(optimizer: Any, parameters: Mapping[str, Tensor]) -> OptimizerState:
    """Return the optimizer's full state with a setter; each rank takes its shard of the values written."""
    if isinstance(optimizer, StatefulAdamW):
        return _unsharded_state(optimizer, parameters)
    return OptimizerState(LocalTensors(optimizer.state_tensors(), optimizer.read_state), optimizer.write_state)


def is_master_weight(name: str) -> bool:
    """Return whether a name in an optimizer's state is that of a master weight."""
    return name.endswith(f"/{MASTER_WEIGHT}")


def without_master_weights(state: LocalTensors) -> LocalTensors:
    return LocalTensors(
        {name: tensor for name, tensor in state.tensors.items() if not is_master_weight(name)}, state.read
    )


def load_optimizer_state(
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    names: Collection[str],
    read: Callable[[str], np.ndarray],
    ranks: Ranks = SINGLE_PROCESS,
) -> None:
    """Set the optimizer's state, bit for bit, one tensor at a time, except master weights (see `load_master_weights`).

    Args:
        names: of all stored tensors, `<parameter name>/<kind>`.
        read: returns a stored tensor.
        ranks: the ranks that share the trained parameters; each takes its shard.

    Raises:
        CheckpointError: the names or shapes are not those of this optimizer.
    """
    full = full_optimizer_state(optimizer, parameters)
    local = without_master_weights(full.state)
    _check_names({name for held_names in ranks.all_gather_object(list(local.tensors)) for name in held_names}, names)
    for name, tensor in local.tensors.items():
        full.write(name, _checked_shape(name, tensor.shape, ranks.local_shard(name, read(name))))


def local_optimizer_state(optimizer: Any, parameters: Mapping[str, Tensor]) -> OptimizerState:
    """Return the state of this rank's optimizer; if ranks shard it, this rank's shard."""
    if isinstance(optimizer, StatefulAdamW):
        return _unsharded_state(optimizer, parameters)
    state: OptimizerState = optimizer.local_optimizer_state()
    return state


def load_local_optimizer_state(
    local: OptimizerState, names: Collection[str], read: Callable[[str], np.ndarray]
) -> None:
    """Set the state that `local_optimizer_state` returns, bit for bit; see `load_optimizer_state`."""
    state = without_master_weights(local.state)
    _check_names(set(state.tensors), names)
    for name, tensor in state.tensors.items():
        local.write(name, _checked_shape(name, tensor.shape, read(name)))


def _unsharded_state(optimizer: StatefulAdamW, parameters: Mapping[str, Tensor]) -> OptimizerState:
    """Return the state of an AdamW that updates the parameters themselves; read and set one tensor at a time."""
    of = {
        f"{name}/{kind}": (parameter, kind)
        for name, parameter in trainable_parameters(parameters).items()
        for kind in optimizer.kinds(parameter)
    }

    def read(key: str) -> Tensor:
        parameter, kind = of[key]
        return optimizer.read(parameter.name, kind)

    def write(key: str, values: np.ndarray) -> None:
        parameter, kind = of[key]
        optimizer.write(parameter.name, kind, values)

    tensors = {key: optimizer.state_spec(kind, tensor_spec(parameter)) for key, (parameter, kind) in of.items()}
    return OptimizerState(LocalTensors(tensors, read), write)


def _check_names(expected: set[str], names: Collection[str]) -> None:
    stored = {name for name in names if not is_master_weight(name)}
    missing, surplus = sorted(expected - stored), sorted(stored - expected)
    if missing or surplus:
        raise CheckpointError(
            "the optimizer state belongs to another set of trainable parameters: "
            f"{len(missing)} missing (for example {missing[:2]}), {len(surplus)} unknown (for example {surplus[:2]}).\n"
            "  Resume with the configuration that wrote it, or set ignore_load_lr_and_optim: true for a fresh AdamW."
        )


def _checked_shape(name: str, shape: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    if values.shape != shape:
        raise CheckpointError(f"optimizer state {name}: expected shape {list(shape)}, got {list(values.shape)}")
    return values

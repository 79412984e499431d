"""AdamW over what this rank updates of every parameter, in the place of AdamW over all of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from paddle import Tensor
from paddle.distributed.communication.group import Group
from paddle.optimizer import AdamW

from erniekit.model.storage.safetensors_file import StoredTensor
from erniekit.model.whole import held, stored_as
from erniekit.parallel.sharding.shares import Share, own_part, same_everywhere, together
from erniekit.parallel.sharding.stage import Stage
from erniekit.training.optimizer import STATE_KINDS, OwnState, create_state, trainable_parameters


class DividedOptimizer:
    """What a step asks of an optimizer, and the state of the whole of it for checkpoints.

    Args:
        adamw: what the stage was made with (`stateless_optimizer`).
        group: the sharding group.
    """

    def __init__(self, adamw: AdamW, stage: Stage, parameters: Mapping[str, Tensor], group: Group) -> None:
        self._adamw, self._stage, self._group = adamw, stage, group
        self._parameters = trainable_parameters(parameters)
        updated = [stage.share(parameter).tensor for parameter in self._parameters.values()]
        create_state(adamw, [tensor for tensor in updated if tensor is not None])

    def set_lr(self, value: float) -> None:
        self._adamw.set_lr(value)

    def step(self) -> None:
        self._stage.step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        self._stage.clear_grad(set_to_zero)

    def state_tensors(self) -> dict[str, StoredTensor]:
        """Type and shape of everything that AdamW remembers, by `<parameter>/<kind>`, as if nothing were divided."""
        return {
            f"{name}/{kind}": _of_state(kind, stored_as(parameter))
            for name, parameter in self._parameters.items()
            for kind in STATE_KINDS
        }

    def read_state(self, name: str) -> Tensor:
        """One of `state_tensors`, on every rank of the group; all of them call this, in the same order."""
        share, kind, held = self._held(name)
        if kind.endswith("pow_acc"):
            return same_everywhere(share, held, self._group)
        return together(share, held, self._group)

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Set one of `state_tensors`; each rank takes its part of the value."""
        share, kind, held = self._held(name)
        if held is not None:
            held.set_value(value if kind.endswith("pow_acc") else own_part(share, value, self._group.rank))

    def own_state(self) -> OwnState:
        """What lies on this rank, by the same names, as fleet has divided it."""
        own = {name: self._held(name)[2] for name in self.state_tensors()}
        tensors = {name: tensor for name, tensor in own.items() if tensor is not None}
        return OwnState(held(tensors), lambda name, value: tensors[name].set_value(value))

    def _held(self, name: str) -> tuple[Share, str, Tensor | None]:
        parameter, _, kind = name.rpartition("/")
        share = self._stage.share(self._parameters[parameter])
        return share, kind, None if share.tensor is None else self._adamw._accumulators[kind][share.name]


def _of_state(kind: str, parameter: StoredTensor) -> StoredTensor:
    return StoredTensor(parameter.dtype, (1,) if kind.endswith("pow_acc") else parameter.shape)

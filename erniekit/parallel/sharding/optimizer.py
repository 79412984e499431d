"""AdamW over what this rank updates of every parameter, in the place of AdamW over all of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from paddle import Tensor
from paddle.distributed.communication.group import Group

from erniekit.model.storage.safetensors_file import StoredTensor
from erniekit.model.whole import Held, paddle_type, stored_as
from erniekit.parallel.sharding.shares import Share, own_part, same_everywhere, together
from erniekit.parallel.sharding.stage import Stage
from erniekit.training.optimizer import OwnState, StatefulAdamW, create_state, trainable_parameters


class DividedOptimizer:
    """What a step asks of an optimizer, and the state of the whole of it for checkpoints.

    Args:
        adamw: what the stage was made with (`stateless_optimizer`).
        group: the sharding group.
    """

    def __init__(self, adamw: StatefulAdamW, stage: Stage, parameters: Mapping[str, Tensor], group: Group) -> None:
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
            f"{name}/{kind}": self._adamw.form(kind, stored_as(parameter))
            for name, parameter in self._parameters.items()
            for kind in self._adamw.kinds(parameter)
        }

    def read_state(self, name: str) -> Tensor:
        """One of `state_tensors`, on every rank of the group; all of them call this, in the same order."""
        share, kind = self._share(name)
        held = None if share.tensor is None else self._adamw.read(share.name, kind)
        whole = self._adamw.form(kind, stored_as(self._parameters[name.rpartition("/")[0]]))
        bring = same_everywhere if kind.endswith("pow_acc") else together
        return bring(share, held, self._group, paddle_type(whole.dtype))

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Set one of `state_tensors`; each rank takes its part of the value."""
        share, kind = self._share(name)
        if share.tensor is not None:
            part = value if kind.endswith("pow_acc") else own_part(share, value, self._group.rank)
            self._adamw.write(share.name, kind, part)

    def own_state(self) -> OwnState:
        """What lies on this rank, by the same names, as fleet has divided it."""
        own = {name: self._share(name) for name in self.state_tensors()}
        tensors = {
            name: self._adamw.form(kind, stored_as(share.tensor))
            for name, (share, kind) in own.items()
            if share.tensor is not None
        }

        def read(name: str) -> Tensor:
            share, kind = own[name]
            return self._adamw.read(share.name, kind)

        def write(name: str, values: np.ndarray) -> None:
            share, kind = own[name]
            self._adamw.write(share.name, kind, values)

        return OwnState(Held(tensors, read), write)

    def _share(self, name: str) -> tuple[Share, str]:
        parameter, _, kind = name.rpartition("/")
        return self._stage.share(self._parameters[parameter]), kind

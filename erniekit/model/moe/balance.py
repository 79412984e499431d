"""What routers share: the weights of their losses, the place in the step, and what they report of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import paddle

if TYPE_CHECKING:
    from erniekit.model.moe.router import Router


@dataclass(frozen=True)
class BalanceSettings:
    """Names are those of the parameters, without `moe_`."""

    aux_loss_lambda: float = 0.0
    z_loss_lambda: float = 0.0
    orthogonal_loss_lambda: float = 0.0
    router_bias_update_rate: float = 0.0


class ExpertBalance:
    """One object for all routers of a model; the loop moves it on with `begin_micro_batch` and `end_step`.

    A recomputed layer reports twice. Reports are kept by their place, so the second one takes the place of the first.

    Args:
        all_reduce_loads: adds an array up over the ranks that have other tokens of a step.
    """

    def __init__(
        self, settings: BalanceSettings, all_reduce_loads: Callable[[np.ndarray], np.ndarray] = lambda loads: loads
    ) -> None:
        self.settings, self._all_reduce_loads = settings, all_reduce_loads
        self.loss_weight = (
            1.0  # of the units of the step in this micro-batch; the step's router loss is the weighted mean
        )
        self._micro_batch = 0
        self._losses: dict[tuple[int, int, str], paddle.Tensor] = {}  # by micro-batch, layer and name
        self._loads: dict[tuple[int, int], np.ndarray] = {}

    def begin_micro_batch(self, micro_batch: int, loss_weight: float) -> None:
        self._micro_batch, self.loss_weight = micro_batch, loss_weight

    def report(self, layer: int, losses: dict[str, paddle.Tensor], load_E: np.ndarray) -> None:
        """Note a router's losses and how many tokens each of its experts received."""
        for name, loss in losses.items():
            self._losses[self._micro_batch, layer, name] = loss.detach()
        if self.settings.router_bias_update_rate:
            self._loads[self._micro_batch, layer] = load_E

    def reported(self, micro_batch: int | None = None) -> dict[str, tuple[paddle.Tensor, int]]:
        """Each loss of a micro-batch of this step (default: the present one) by name, without its weight: the sum over
        the layers that are here, 0-d, and their number."""
        number = self._micro_batch if micro_batch is None else micro_batch
        by_name: dict[str, list[paddle.Tensor]] = {}
        for (owner, _, name), loss in self._losses.items():
            if owner == number:
                by_name.setdefault(name, []).append(loss)
        return {name: (paddle.add_n(losses), len(losses)) for name, losses in by_name.items()}

    def end_step(self, routers: Iterable[Router]) -> None:
        """Raise the correction bias of experts with less than the mean load of the step, lower that of the others.

        bias += rate * sign(mean load - load); Wang et al., 2024, arXiv:2408.15664, algorithm 1. Frozen routers keep
        theirs.
        """
        rate = self.settings.router_bias_update_rate
        moving = [router for router in routers if rate and not router.gate.weight.stop_gradient]
        if moving:
            loads_RE = self._all_reduce_loads(np.array([self._load_of_step(router) for router in moving]))
            for router, load_E in zip(moving, loads_RE, strict=True):
                step = rate * np.sign(load_E.mean() - load_E)
                bias = router.moe_statics.e_score_correction_bias
                bias.set_value(bias + paddle.to_tensor(step[None]).astype(bias.dtype))
        self._loads.clear()
        self._losses.clear()

    def _load_of_step(self, router: Router) -> np.ndarray:
        loads = [load for (_, layer), load in self._loads.items() if layer == router.layer]
        return np.sum([np.zeros(router.experts), *loads], axis=0)

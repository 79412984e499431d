"""A rollout worker: the process of Ray that has a copy of the model and answers prompts; `workers` is its other end.

This module is imported before Paddle's threads are chosen, so it imports Paddle nowhere but in `build`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import erniekit
from erniekit.environment import usable_cores
from erniekit.errors import TrainingError

if TYPE_CHECKING:
    import numpy as np

    from erniekit.model.decoder import Decoder
    from erniekit.rollouts.sampling import Sampled


class Place(NamedTuple):
    """Where a worker runs.

    Attributes:
        node: Ray's name of the machine.
        host: its own.
        cores: that the worker may use there.
        version: of ERNIEKit.
        process: its id.
    """

    node: str
    host: str
    cores: int
    version: str
    process: int


class RolloutWorker:
    """Answers prompts with the weights that it is given."""

    def __init__(self) -> None:
        self._model: Decoder | None = None
        self._fingerprint = ""

    def place(self) -> Place:
        """Return where this is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Place(node, os.uname().nodename, usable_cores(), erniekit.__version__, os.getpid())

    def build(self, values: str, folder: str, threads: int) -> None:
        """Build the model of a run, as it was before its first step.

        Args:
            values: every parameter, as JSON.
            folder: the current one of the run, which relative paths begin at.
            threads: of this process.

        Raises:
            UserError: the model's folder is not here, or is another one.
        """
        choose_threads(threads)
        if os.path.isdir(folder):  # on another machine the model may be a hub's
            os.chdir(folder)
        from erniekit.environment import import_paddle

        import_paddle()
        from erniekit.build.adapters import adapter_plan
        from erniekit.build.model import initial_weights, open_model, read_model_config, select_device
        from erniekit.config import Config

        config = Config.from_mapping(json.loads(values))
        select_device(config)
        adapters = adapter_plan(config, read_model_config(config))
        self._model, self._fingerprint = open_model(config, initial_weights(config), adapters=adapters), ""

    def sample(
        self,
        weights: Mapping[str, np.ndarray],
        fingerprint: str,
        prompts: Sequence[Sequence[int]],
        streams: Sequence[int],
        settings: Mapping[str, Any],
    ) -> list[Sampled]:
        """Return an answer to each prompt.

        Args:
            weights: those that are trained, by name, in the decoder's layout; read-only views of the object store.
            fingerprint: of all weights; those of this process must have it, once `weights` are in their places.

        Raises:
            TrainingError: they have another one, or logits are not finite.
        """
        from erniekit.rollouts.sampling import sample_answers

        assert self._model is not None, "it is built first"
        if self._fingerprint != fingerprint:
            take_weights(self._model, weights, fingerprint)
            self._fingerprint = fingerprint
        return sample_answers(self._model, prompts, streams, **settings)


def choose_threads(threads: int) -> None:
    """Bound the threads of this process, before Paddle is imported, and forget the rank whose environment it has."""
    for name in [name for name in os.environ if name.startswith("PADDLE_")]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = str(threads)


def take_weights(model: Decoder, weights: Mapping[str, np.ndarray], fingerprint: str) -> None:
    """Copy weights into a model. Raises TrainingError unless it has the fingerprint then."""
    import paddle

    from erniekit.model.lora.lora import named_adapter_weights
    from erniekit.model.weights import named_weights
    from erniekit.rollouts.records import policy_fingerprint
    from erniekit.training.collectives import SINGLE_PROCESS

    own = named_weights(model) | named_adapter_weights(model)
    with paddle.no_grad():
        for name, values in weights.items():
            own[name].set_value(values)
    found = policy_fingerprint(model, SINGLE_PROCESS)
    if found != fingerprint:
        raise TrainingError(
            f"a rollout worker on {os.uname().nodename} has other weights than the run: their fingerprint is {found}, "
            f"and that of the run {fingerprint}\n  model_name_or_path must be the same folder on every machine, with "
            "the same files."
        )

"""What later kinds of data and losses bring, defined here alone: a loss with weights of its tokens and a z-loss, a
decoder that reads features besides tokens, and the arrays of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.data.batch import ArraySpec, Batch, register_array
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.distributed.collectives import LayoutRanks
from erniekit.distributed.decoder_pipeline import DecoderPipeline, build_pipeline_stage
from erniekit.distributed.init import init_mesh
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.topology import Topology
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder, last_stage_needs_embedding
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.forward import DecoderLoss, MicroBatchLoss
from erniekit.training.objectives.objective import Objective
from erniekit.training.step import train_step
from tests.distributed.cases.pipeline import RecordingOptimizer
from tests.model.tiny import tiny_config

Z_LOSS = 0.1
VOCABULARY = 56

register_array("token_weights", ArraySpec("float32", "BS", 0.0))
register_array("features", ArraySpec("float32", "BSH", 0.0))


def weighted_loss_head(
    decoder: Decoder, hidden_BSH: Tensor, context: Any, batch: Batch, reference_input: None
) -> MicroBatchLoss:
    logits_TV = decoder.head(decoder.norm(hidden_BSH).reshape([-1, hidden_BSH.shape[-1]]))
    labels_T = paddle.to_tensor(batch.labels).flatten()
    weights_T = paddle.to_tensor(batch.arrays["token_weights"]).flatten()
    nll_T = F.cross_entropy(logits_TV, labels_T, reduction="none", ignore_index=IGNORE_INDEX).flatten()
    z_loss = (weights_T * paddle.logsumexp(logits_TV, axis=-1) ** 2).sum()
    return MicroBatchLoss((weights_T * nll_T).sum() + Z_LOSS * z_loss, {"z_loss": z_loss.detach()})


OBJECTIVE = Objective(DecoderLoss(weighted_loss_head, lambda batch: batch.target_count), unit="target tokens")


def add_features(decoder: Decoder) -> None:
    """Let the decoder add features to the embeddings of the tokens, as a tower would."""
    decoder.input_names = ("input_ids", "features")
    decoder.embed = lambda inputs: Decoder.embed(decoder, inputs) + inputs["features"]


def compare(world: int, degrees: dict[str, Any], features: bool = False) -> dict[str, Any]:
    """Make one step on a layout, and one in this process alone.

    Returns:
        `gradients`: the relative difference of each of this rank's gradients; `metrics`: those of loss, norm, metrics
        and evaluation; `all`: the names of all gradients.
    """
    found = _train(init_mesh(Topology.from_degrees(world, **degrees), timeout=60), features)
    expected = _train(SINGLE_PROCESS_MESH, features)
    gradients = {
        name: float(np.abs(gradient - expected["gradients"][name]).max() / np.abs(expected["gradients"][name]).max())
        for name, gradient in found["gradients"].items()
    }
    metrics = {name: abs(found["metrics"][name] / value - 1) for name, value in expected["metrics"].items()}
    return {"gradients": gradients, "metrics": metrics, "all": sorted(expected["gradients"])}


def _train(mesh: Mesh, features: bool) -> dict[str, Any]:
    config = tiny_config(vocab_size=VOCABULARY, num_hidden_layers=4)
    stage = build_pipeline_stage(config.num_hidden_layers, mesh, "layer:DecoderLayer")
    decoder = build_model(config, None, seed=3, pipeline_stage=stage)
    if features:
        add_features(decoder)
    decoder.train()
    parameters = named_trainable_parameters(decoder)
    ranks: Ranks = SINGLE_PROCESS
    if mesh is not SINGLE_PROCESS_MESH:
        pipeline = DecoderPipeline(mesh, tied_embeddings=last_stage_needs_embedding(config)) if stage else None
        ranks = LayoutRanks(mesh, parameters, decoder.config.architecture, pipeline=pipeline)
    batches = _batches(config.hidden_size)[mesh.dp_rank :: mesh.topology.dp_world_size]
    optimizer = RecordingOptimizer(parameters)
    result = train_step(
        decoder, list(parameters.values()), optimizer, OBJECTIVE, batches, step=0, learning_rate=0.0, ranks=ranks
    )
    decoder.eval()
    evaluated = [found["loss_sum"] for found in ranks.forward_only(decoder, OBJECTIVE.loss, batches)]
    eval_loss_sum = ranks.sum(np.array([float(sum(evaluated))]))[0]
    metrics = {"loss": result.totals.loss, "norm": result.grad_norm, **result.totals.metrics}
    return {"gradients": optimizer.seen, "metrics": {**metrics, "eval_loss_sum": float(eval_loss_sum)}}


def _batches(hidden_size: int) -> list[Batch]:
    """Four micro-batches of two rows, each of its own length, so that pipelines pad them."""
    random = np.random.default_rng(0)

    def sample() -> Sample:
        ids = random.integers(1, VOCABULARY, int(random.integers(6, 16)))
        labels = np.where(np.arange(len(ids) - 1) < 2, IGNORE_INDEX, ids[1:])
        weights = random.uniform(0.1, 2.0, len(labels)).astype(np.float32)
        features = random.standard_normal((len(labels), hidden_size)).astype(np.float32)
        arrays = {"token_weights": weights, "features": features}
        return Sample(ids[:-1].astype(np.int32), labels.astype(np.int32), arrays=arrays)

    rows = [[[sample(), sample()] for _ in range(2)] for _ in range(4)]
    return [collate(of, [[0, 1], [2, 3]], 0, arrays=["token_weights", "features"]) for of in rows]

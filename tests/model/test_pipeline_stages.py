"""Parts of a decoder, as the stages of a pipeline have them; here one after another in one process."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder, PipelineStage
from erniekit.model.storage.layouts import StoredWeights
from erniekit.model.weights import named_weights, save_model_folder

from .tiny import EXPERTS, pack, tiny_config

PARTS = (
    PipelineStage((range(1), range(3, 4)), first=True, last=False),  # two runs each
    PipelineStage((range(1, 3), range(4, 4)), first=False, last=True),
)
IDS = np.arange(20) % 53


def pipeline_stages(**changes):
    config = tiny_config(num_hidden_layers=4, **changes)
    return build_model(config, None, seed=5), [
        build_model(config, None, seed=5, pipeline_stage=pipeline_stage) for pipeline_stage in PARTS
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_parts_together_have_every_weight(tied):
    whole, parts = pipeline_stages(tie_word_embeddings=tied)
    expected, found = named_weights(whole), [named_weights(pipeline_stage) for pipeline_stage in parts]
    assert set(found[0]) | set(found[1]) == set(expected)
    shared = set(found[0]) & set(found[1])
    assert shared == ({"model.embed_tokens.weight"} if tied else set())  # the head's copy
    for own in found:
        for name, weight in own.items():
            np.testing.assert_array_equal(weight.numpy(), expected[name].numpy(), err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_parts_one_after_another_compute_what_the_whole_does(tied):
    whole, (first, last) = pipeline_stages(tie_word_embeddings=tied)
    ids, positions, plan = pack(IDS, [8, 20])
    hidden = first.embed({"input_ids": ids})
    for pipeline_stage, run in ((first, 0), (last, 0), (first, 1), (last, 1)):
        hidden = pipeline_stage.forward_layers(hidden, pipeline_stage.context(positions, plan), run)
    logits = last.head(last.norm(hidden))
    np.testing.assert_array_equal(logits.numpy(), whole.head(whole(ids, positions, plan)).numpy())


def test_multi_token_prediction_has_a_copy_of_the_embedding():
    changes = {"num_nextn_predict_layers": 1, "tie_word_embeddings": False}
    _, (first, last) = pipeline_stages(**EXPERTS, **changes)
    assert "model.embed_tokens.weight" in named_weights(last) and not first.mtp and len(last.mtp) == 1


def test_a_part_reads_no_other_tensors(tmp_path, monkeypatch):
    whole, _ = pipeline_stages()
    save_model_folder(whole, tmp_path)
    read = []
    ways = {way: getattr(StoredWeights, way) for way in ("matrix", "row_blocks")}

    def watched(way):
        return lambda self, name, *rest: read.append(name) or ways[way](self, name, *rest)

    for way in ways:
        monkeypatch.setattr(StoredWeights, way, watched(way))
    pipeline_stage = build_model(whole.config, tmp_path, pipeline_stage=PARTS[1])
    assert sorted(set(read)) == sorted(named_weights(pipeline_stage))
    for name, weight in named_weights(pipeline_stage).items():
        np.testing.assert_array_equal(weight.numpy(), named_weights(whole)[name].numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (PARTS[0], "the embedding, layers 0, 3"),
        (PARTS[1], "layers 1-2, norm and head"),
        (PipelineStage((range(4, 4),), first=False, last=False), "nothing"),
    ],
)
def test_a_part_is_named_in_words(part, words):
    assert str(part) == words


def test_a_part_that_has_nothing_is_a_decoder():
    """Empty layers (`add_tail_layers`) may be all that a stage has."""
    empty = Decoder(tiny_config(), pipeline_stage=PipelineStage((range(2, 2),), first=False, last=False))
    hidden = paddle.ones([1, 3, 16])
    _, positions, plan = pack(IDS[:3], [3])
    np.testing.assert_array_equal(empty.forward_layers(hidden, empty.context(positions, plan)).numpy(), hidden.numpy())
    assert not named_weights(empty)

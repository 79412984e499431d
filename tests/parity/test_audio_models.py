"""Models that listen against transformers: logits, gradients, greedy text, folders in both directions."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
import transformers

from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.head import token_loss
from erniekit.model.weights import named_weights, save_model_folder
from tests.model.tiny import audio_arrays, pack

pytestmark = pytest.mark.parity
VOCABULARY, PLACEHOLDER = 61, 24
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# Each case: the frames of the windows of each recording of the prompt, and the dictionaries of the configuration.
CASES = {
    "voxtral: recordings of several windows": (
        [[40, 40, 7], [40]],
        {"text_config": {**TEXT, "head_dim": 10, "rope_theta": 1e5}},
        {
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_mel_bins": 6,
        }
        | {"max_source_positions": 20},
    ),
    "voxtral: two states joined, biases": (
        [[24]],
        {"text_config": {**TEXT, "head_dim": 8, "attention_bias": True, "mlp_bias": True}},
        {
            "hidden_size": 12,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 3,
            "num_mel_bins": 7,
        }
        | {"max_source_positions": 12},
    ),
    "qwen2_audio: recordings of different lengths, an odd window": (
        [[42], [17], [3], [42, 30]],
        {"text_config": {**TEXT, "rope_theta": 1e6}},
        {"d_model": 16, "encoder_ffn_dim": 40, "encoder_layers": 2, "encoder_attention_heads": 4, "num_mel_bins": 6}
        | {"max_source_positions": 21},
    ),
    "qwen2_audio: one short recording, tied": (
        [[8]],
        {"text_config": {**TEXT, "tie_word_embeddings": True}},
        {"d_model": 12, "encoder_ffn_dim": 20, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 5}
        | {"max_source_positions": 16},
    ),
}
CLASSES = {
    "voxtral": (transformers.VoxtralConfig, transformers.VoxtralForConditionalGeneration),
    "qwen2_audio": (transformers.Qwen2AudioConfig, transformers.Qwen2AudioForConditionalGeneration),
}
every_case = pytest.mark.parametrize("case", CASES)


class Prompt:
    """Ids with the tokens of recordings between words, and what each side takes beside them."""

    def __init__(self, family, model_config, recordings):
        rng = np.random.default_rng(7)
        audio = model_config.architecture.audio(model_config)
        self.frames = np.array([frames for windows in recordings for frames in windows], np.int32)
        shape = (len(self.frames), audio.mel_bins, audio.window_frames)
        self.features = rng.standard_normal(shape).astype(np.float32)
        ids = [3, 5]
        for windows in recordings:
            ids += [PLACEHOLDER] * sum(map(audio.tokens_of, windows)) + rng.integers(25, VOCABULARY, 3).tolist()
        self.ids, self.config = ids + rng.integers(0, PLACEHOLDER, 9).tolist(), model_config
        self.theirs = {"input_features": torch.tensor(self.features)}
        if family == "qwen2_audio":
            is_sound = np.arange(audio.window_frames)[None] < self.frames[:, None]
            self.theirs["feature_attention_mask"] = torch.tensor(is_sound).long()

    def our_logits(self, decoder):
        return decoder.head(self.our_hidden(decoder))

    def our_hidden(self, decoder):
        ids = np.array(self.ids)
        return decoder(*pack(ids, [len(ids)]), **audio_arrays(self.config, ids, self.features, self.frames))

    def their_logits(self, model):
        ids = torch.tensor([self.ids])
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **self.theirs).logits


def random_theirs(case):
    family = case.partition(":")[0]
    recordings, text, audio = CASES[case]
    config_class, model_class = CLASSES[family]
    token = {"audio_token_id" if family == "voxtral" else "audio_token_index": PLACEHOLDER}
    torch.manual_seed(0)
    model = model_class(
        config_class(audio_config=dict(audio), **{name: dict(part) for name, part in text.items()}, **token)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (1.0 if "norm.weight" in name else 0.0))
    return family, recordings, model.eval()


def ours_and_theirs(case, folder):
    family, recordings, theirs = random_theirs(case)
    theirs.save_pretrained(folder)
    config = ModelConfig.from_folder(folder)
    return build_model(config, folder), theirs, Prompt(family, config, recordings)


@every_case
def test_logits_and_gradients_agree(case, tmp_path):
    ours, theirs, prompt = ours_and_theirs(case, tmp_path)
    labels = np.random.default_rng(1).integers(0, VOCABULARY, (1, len(prompt.ids)))
    their_logits = prompt.their_logits(theirs)
    their_loss = torch.nn.functional.cross_entropy(their_logits[0], torch.tensor(labels[0]), reduction="sum")
    their_loss.backward()
    hidden = prompt.our_hidden(ours)
    our_loss = token_loss(ours, hidden, paddle.to_tensor(labels)).loss_sum
    our_loss.backward()

    our_logits = ours.head(hidden).numpy()
    assert np.std(our_logits) > 1.0
    np.testing.assert_allclose(our_logits, their_logits.detach().numpy(), atol=1e-4)
    assert float(our_loss) == pytest.approx(their_loss.item(), rel=1e-6)
    weights = named_weights(ours)
    assert list(weights) == list(ours.config.weight_shapes()) and set(weights) == {
        name for name, _ in theirs.named_parameters()
    }
    for name, parameter in theirs.named_parameters():
        if not parameter.requires_grad:
            assert weights[name].grad is None and name == "audio_tower.embed_positions.weight"
            continue
        expected, gradient = parameter.grad.numpy(), weights[name].grad.numpy()
        gradient = gradient.T if ours.config.architecture.is_linear(name) else gradient
        scale = np.abs(expected).max()
        assert scale > 1e-4, name
        assert np.abs(gradient - expected).max() < 1e-3 * scale, name


@every_case
def test_greedy_text_agrees(case, tmp_path):
    ours, theirs, prompt = ours_and_theirs(case, tmp_path)
    ids = torch.tensor([prompt.ids])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = theirs.generate(ids, attention_mask=torch.ones_like(ids), **prompt.theirs, **settings)
    expected = answer[0, len(prompt.ids) :].tolist()
    assert PLACEHOLDER not in expected and len(set(expected)) > 2
    arrays = audio_arrays(ours.config, prompt.ids, prompt.features, prompt.frames)
    audio = {name: values.numpy() for name, values in arrays.items()}
    assert generate(ours, [prompt.ids], Sampling(max_new_tokens=12), audio=audio) == [expected]


@every_case
def test_what_we_save_loads_in_transformers(case, tmp_path):
    family, recordings, theirs = random_theirs(case)
    theirs.config.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    ours = build_model(config, None, seed=5)
    save_model_folder(ours, tmp_path / "ours", max_shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    opened, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    prompt = Prompt(family, config, recordings)
    with torch.no_grad():
        expected = prompt.their_logits(opened.eval()).numpy()
    np.testing.assert_allclose(prompt.our_logits(ours).numpy(), expected, atol=1e-5)
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "ours")) is type(theirs.config)


@pytest.mark.parametrize("case", [case for case in CASES if "short" in case or "joined" in case])
def test_bfloat16_folders_are_read(case, tmp_path):
    family, recordings, theirs = random_theirs(case)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    ours = build_model(ModelConfig.from_folder(tmp_path), tmp_path)
    prompt = Prompt(family, ours.config, recordings)
    with torch.no_grad():
        again = type(theirs).from_pretrained(tmp_path, torch_dtype=torch.float32)
        expected = prompt.their_logits(again.eval()).numpy()
    np.testing.assert_allclose(prompt.our_logits(ours).numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("family", CLASSES)
def test_absent_keys_have_their_defaults(family):
    config_class, _ = CLASSES[family]
    token = {"audio_token_id": 24} if family == "voxtral" else {}
    theirs, ours = config_class(**token), ModelConfig.from_json({"model_type": family, **token})
    text, audio = theirs.text_config, ours.own["audio_config"]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(ours, name) == getattr(text, name), name
    for name in ("num_key_value_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(text, name), name
    assert ours.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    written = ours.to_json()["audio_config"]
    shape = {key: value for key, value in written.items() if key in theirs.audio_config.to_dict()}
    assert len(shape) >= len(audio) and shape == {key: theirs.audio_config.to_dict()[key] for key in shape}

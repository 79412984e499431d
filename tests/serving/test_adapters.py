"""Adapters by name: requests of different sets are answered side by side, each as its own model answers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from erniekit.errors import ConfigurationError, UserError
from erniekit.inference.decoding.decoder_step import DecoderStep
from erniekit.inference.decoding.native_step import NativeStep, refusal
from erniekit.inference.decoding.scheduler import Request, Scheduler
from erniekit.inference.engine import ChatModel
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, named_adapter_weights, save_adapters
from erniekit.model.lora.sets import AdapterSets
from tests.serving.asking import ask, serving
from tests.serving.conftest import TINY_ERNIE
from tests.tiny_runs import save_random_model

PROMPTS = [[5, 9, 33, 2], [7], [40, 41, 42, 43, 44]]
SAMPLING = Sampling(max_new_tokens=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(TINY_ERNIE, tmp_path_factory.mktemp("served-base"), seed=3)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of adapters, whose B is no longer zero."""
    found = {}
    for seed, name in enumerate(("brief", "long")):
        decoder = ChatModel.load(base).decoder
        targets = ("q_proj", "down_proj") if seed else ("v_proj",)
        add_adapters(decoder, LoraSettings(rank=4, alpha=8, target_modules=targets), seed=seed)
        draws = np.random.default_rng(seed)
        for path, parameter in named_adapter_weights(decoder).items():
            if path.endswith("lora_B"):
                parameter.set_value(draws.normal(0, 0.3, parameter.shape).astype(np.float32))
        found[name] = tmp_path_factory.mktemp(name)
        save_adapters(decoder, found[name], str(base))
    return found


@pytest.mark.parametrize("native", [True, False])
def test_each_set_answers_as_it_does_alone(
    base: Path, folders: dict[str, Path], native: bool, request: pytest.FixtureRequest
) -> None:
    if native:
        request.getfixturevalue("native_kernels")
    alone = {name: generate(ChatModel.load(base, adapters=folder).decoder, PROMPTS, SAMPLING)
             for name, folder in folders.items()}  # fmt: skip
    decoder = ChatModel.load(base).decoder
    alone[""] = generate(decoder, PROMPTS, SAMPLING)
    assert alone["brief"] != alone["long"] != alone[""] != alone["brief"]
    sets = AdapterSets(decoder)
    for name, folder in folders.items():
        sets.load(name, folder)
    assert sets.names == ("brief", "long") and generate(decoder, PROMPTS, SAMPLING) == alone[""]
    step = NativeStep(decoder, sets.use) if native and refusal(decoder) is None else DecoderStep(decoder, 64, sets.use)
    scheduler = Scheduler(step, 64)
    names = ["", "brief", "long", "brief", ""]
    ids = [
        scheduler.submit(Request(PROMPTS[number % 3], SAMPLING, 8, adapters=name)) for number, name in enumerate(names)
    ]
    answers: dict[int, list[int]] = {number: [] for number in ids}
    while scheduler.unfinished:
        for event in scheduler.step():
            answers[event.request] += [event.token] if event.token is not None else []
    assert [answers[number] for number in ids] == [alone[name][number % 3] for number, name in enumerate(names)]


def test_clients_name_adapters_as_their_model(base: Path, folders: dict[str, Path]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    expected = [ChatModel.load(base).answer(["Hello"], Sampling(12))] + [
        ChatModel.load(base, adapters=folder).answer(["Hello"], Sampling(12)) for folder in folders.values()
    ]
    with serving(lambda: ChatModel.load(base), folders) as served:
        assert [model["id"] for model in ask(served, "/v1/models").json()["data"]] == ["tiny", "brief", "long"]
        told = [ask(served, "/v1/chat/completions", {**body, "model": name}).json() for name in ("tiny", *folders)]
        assert [each["model"] for each in told] == ["tiny", "brief", "long"]
        assert [[each["choices"][0]["message"]["content"]] for each in told] == expected
        assert ask(served, "/v1/chat/completions", {**body, "model": "other"}).status_code == 404


def test_what_cannot_be_one_set_of_several_is_refused(base: Path, tmp_path: Path) -> None:
    lora = LoraSettings(rank=2, alpha=4, target_modules=("v_proj",), init="pissa")
    decoder = build_model(ModelConfig.from_folder(base), base, lora=lora)
    save_adapters(decoder, tmp_path / "pissa", str(base))
    sets = AdapterSets(ChatModel.load(base).decoder)
    with pytest.raises(ConfigurationError, match="began as PiSSA"):
        sets.load("x", tmp_path / "pissa")
    with pytest.raises(UserError):
        sets.load("x", tmp_path / "absent")

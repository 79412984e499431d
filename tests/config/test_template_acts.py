"""Proofs of the parameters of chat templates: what they render, and how dialogues become samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.data import training_dataset
from erniekit.build.model import open_tokenizer
from erniekit.cli import main
from erniekit.config import Config
from erniekit.data.conversation import Conversation, Turn
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.errors import UserError
from tests.data.published_templates import LLAMA3, QWEN2_AUDIO, QWEN3
from tests.data.test_jinja_template import CHATML
from tests.data.vocabularies import write_tekken

Samples = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def samples(make_config: Callable[..., Config], tiny_model: Path, tmp_path: Path) -> Samples:
    """What each sample reads, and what it is trained to say, with a chat template in the model's folder."""

    def read(template: str, **values: Any) -> list[tuple[str, str]]:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(
            template.replace("<|im_end|>", "</s>").replace("<|eot_id|>", "</s>")
        )
        data = tmp_path / "two.jsonl"
        turns = [("user", "q1"), ("assistant", "six"), ("user", "q2"), ("assistant", "two")]
        data.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
        config = make_config(
            model_name_or_path=str(folder), train_dataset_path=str(data), train_dataset_type="messages",
            max_seq_len=512, **values,
        )  # fmt: skip
        tokenizer, template_ = open_tokenizer(config)
        dataset = training_dataset(config, tokenizer, template_)
        found = [dataset.sample(index) for index in range(len(dataset))]
        return [
            (
                tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False),
                tokenizer.decode([t for t in sample.labels.tolist() if t != IGNORE_INDEX], skip_special_tokens=False),
            )
            for sample in found
        ]

    return read


@pytest.mark.proves("enable_thinking")
def test_an_empty_thought_is_trained_or_belongs_to_the_question(samples: Samples) -> None:
    thought = "<think>\n\n</think>\n\n"
    assert [said for _, said in samples(QWEN3)] == [f"{thought}six</s>", f"{thought}two</s>"]
    assert samples(QWEN3, enable_thinking=True) == samples(QWEN3)
    without = samples(QWEN3, enable_thinking=False)
    assert [said for _, said in without] == ["six</s>", "two</s>"]
    assert [read for read, _ in without] == [read for read, _ in samples(QWEN3)]


@pytest.mark.proves("chat_template_kwargs")
def test_variables_reach_the_template(samples: Samples, caplog: pytest.LogCaptureFixture) -> None:
    assert "Today Date: 26 Jul 2024" in samples(LLAMA3)[0][0]
    ((read, _),) = samples(LLAMA3, chat_template_kwargs="date_string=22 Nov 2026")
    assert "Today Date: 22 Nov 2026" in read
    typed = "{{ 'yes ' if flag is true and number + 1 == 3 else 'no ' }}" + CHATML
    ((read, _),) = samples(typed, chat_template_kwargs="flag=true, number=2")
    assert read.startswith("yes")
    samples(CHATML, chat_template_kwargs="nothing=1", enable_thinking=True)
    assert "no effect: enable_thinking, nothing, because the model's chat template does not use it" in caplog.text
    for wrong in ("thinking", "a b=1", "messages=1"):
        with pytest.raises(UserError, match="chat_template_kwargs"):
            samples(CHATML, chat_template_kwargs=wrong)


@pytest.mark.proves("split_multi_turn")
def test_a_sample_for_each_answer(samples: Samples) -> None:
    assert [said for _, said in samples(CHATML)] == ["six</s>two</s>"]
    assert samples(CHATML, split_multi_turn=False) == samples(CHATML)
    first, second = samples(CHATML, split_multi_turn=True)
    assert (first[1], second[1]) == ("six</s>", "two</s>") and second[0].startswith(first[0])
    assert samples(QWEN3) == samples(QWEN3, split_multi_turn=True)  # it drops the empty thought of an earlier answer
    with pytest.raises(UserError, match=r"two\.jsonl:1: .*split_multi_turn: false"):
        samples(QWEN3, split_multi_turn=False)


def asked(config: Config) -> str:
    """The prompt of a transcript, as the template of the model's folder writes it."""
    turn = Turn("user", "", clips=(ContentClip(0, Clip("/a.wav")),))
    _, template = open_tokenizer(config)
    assert template is not None
    return "".join(segment.text for segment in template.render(Conversation((turn,), transcribes=True)))


@pytest.fixture
def asr_config(make_config: Callable[..., Config], tiny_model: Path, tmp_path: Path) -> Callable[..., Config]:
    def make(**values: Any) -> Config:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(QWEN2_AUDIO.replace("<|im_end|>", "</s>"))
        return make_config(model_name_or_path=str(folder), **values)

    return make


@pytest.mark.proves("asr_prompt", "asr_language")
def test_the_request_for_a_transcript_has_the_users_words_and_language(
    asr_config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    assert "Transcribe the audio.</s>" in asked(asr_config())
    assert "In de: </s>" in asked(asr_config(asr_prompt="In {language}: ", asr_language="de"))
    assert "no effect" not in caplog.text
    asked(asr_config(asr_language="de"))
    assert "no effect: asr_language, because asr_prompt does not contain {language}" in caplog.text
    for wrong in ("German", "d", "de_DE", "DE"):
        with pytest.raises(UserError, match="asr_language"):
            asr_config(asr_language=wrong)


@pytest.mark.proves("asr_prompt", "asr_language")
def test_voxtrals_request_takes_the_language_and_no_words(
    make_config: Callable[..., Config], tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*token*"):
        path.unlink()
    write_tekken(tmp_path)
    config = make_config(model_name_or_path=str(tmp_path), asr_language="de", asr_prompt="Write:")
    assert asked(config).endswith("[/INST]lang:de[TRANSCRIBE]")
    assert "no effect: asr_prompt" in caplog.text


@pytest.mark.proves("asr_prompt", "asr_language")
def test_requests_without_recordings_have_no_effect(make_config: Callable[..., Config]) -> None:
    def told(**values: Any) -> str:
        return "\n".join(make_config(asr_prompt="Write:", asr_language="en", **values).messages)

    messages = told(train_dataset_type="messages")
    for name in ("asr_prompt", "asr_language"):
        assert f"`{name}`" in messages and "no data is of type asr" in messages
    assert "type asr" not in told()  # the records tell it
    assert "type asr" not in told(train_dataset_type="asr")
    assert "type asr" not in told(train_dataset_type="messages", eval_dataset_path="e.jsonl")
    held_out = {"eval_dataset_path": "e.jsonl", "eval_dataset_type": "asr"}
    assert "type asr" not in told(train_dataset_type="messages", **held_out)
    assert "type asr" in told(train_dataset_type="messages", **held_out | {"eval_dataset_type": "alpaca"})


@pytest.mark.proves("enable_thinking", "chat_template_kwargs")
def test_chat_goes_on_where_a_template_rewrites_turns(
    saved_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3's template drops what it showed of the first answer; a dialogue that it refuses ends only that message."""
    refusing = "{% if messages[-1].content == 'no' %}{{ raise_exception('not that\x1b[31m') }}{% endif %}"
    told = "{{ note }}{{ 'thinking ' ~ enable_thinking }}"
    (saved_model / "chat_template.jinja").write_text(refusing + told + QWEN3.replace("<|im_end|>", "</s>"))
    shown: list[str] = []

    def answer(self: Any, prompt: Any, *_: Any) -> Any:
        shown.append(self.tokenizer.decode(prompt.ids, skip_special_tokens=False))
        return iter(["<think>\nhm\n</think>\n\nfine"])

    monkeypatch.setattr("erniekit.inference.engine.ChatModel.stream", answer)
    lines = iter(["Hi", "no", "And now?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    options = ["--enable-thinking", "false", "--chat-template-kwargs", "note=kept"]
    assert main(["chat", str(saved_model), *options]) == 0
    errors = capsys.readouterr().err
    assert "not that\\x1b[31m" in errors and "\x1b" not in errors
    assert len(shown) == 2 and shown[1].startswith("keptthinking False<|im_start|>user\nHi")
    assert "assistant\nfine</s>" in shown[1] and "hm" not in shown[1]
    assert shown[1].endswith("<think>\n\n</think>\n\n")


@pytest.fixture
def saved_model(tiny_model: Path, tmp_path: Path) -> Path:
    from tests.tiny_runs import save_random_model

    return save_random_model(tiny_model, tmp_path / "saved", seed=1)


def test_the_shipped_lora_example_reads_its_data_with_qwen3s_format(
    records: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Sixty records of it."""
    folder = tmp_path / "qwen3"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(QWEN3.replace("<|im_end|>", "</s>"))
    overrides = {
        "model_name_or_path": folder, "from_hf_hub": "false", "data_cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "run", "train_dataset_path": records,
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in overrides.items()]
    config = Config.load(Path("examples/configs/qwen3-0.6b/lora.yaml"), overrides=words, verb="train")
    tokenizer, template = open_tokenizer(config)
    report = training_dataset(config, tokenizer, template).report.sources[0]
    assert report.dropped == 0 and report.split_dialogues > 0 and report.samples > report.read

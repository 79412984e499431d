"""Prompts with recordings: what the model reads, answers that do not depend on the batch, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from erniekit.cli import main
from erniekit.data.conversation import USER, Conversation, Turn
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.errors import DataError, UserError
from erniekit.export.saved_program import SavedProgram
from erniekit.inference.engine import ChatModel, Dialogue
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.terminal import escape_control_characters
from tests.inference.listener import listener_folder, write_sound

GREEDY = Sampling(max_new_tokens=8)
SECONDS = (0.1, 0.9, 0.4, 0.25)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return listener_folder(tmp_path_factory.mktemp("listener"))


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ChatModel:
    return ChatModel.load(model_folder)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sounds")
    return [write_sound(folder / f"{number}.wav", seconds, number) for number, seconds in enumerate(SECONDS)]


def asked(*paths: Path, text: str = "What?", transcribes: bool = False) -> Conversation:
    clips = tuple(ContentClip(0, Clip(str(path))) for path in paths)
    return Conversation((Turn(USER, "" if transcribes else text, clips=clips),), transcribes=transcribes)


def test_a_placeholder_becomes_as_many_tokens_as_the_encoder_makes_states(model: ChatModel, sounds: list[Path]) -> None:
    assert model.audio is not None
    for path, seconds in zip(sounds, SECONDS, strict=True):
        prompt = model.encode(asked(path))
        (clip,) = prompt.clips
        assert clip.tokens == model.audio.clip_tokens(round(seconds * 16_000)) > 0
        assert prompt.ids[clip.place : clip.place + clip.tokens] == [5] * clip.tokens
        assert prompt.ids.count(5) == clip.tokens


def test_answers_do_not_depend_on_the_batch(model: ChatModel, sounds: list[Path]) -> None:
    """Of recordings of several lengths, of several in a turn, and of text alone."""
    dialogues = [asked(path) for path in sounds] + [asked(*sounds[:2]), asked(), asked(sounds[0], transcribes=True)]
    prompts = [model.encode(dialogue) for dialogue in dialogues]
    together = model.answer_encoded(prompts, GREEDY, range(len(prompts)))
    alone = [model.answer_encoded([prompt], GREEDY, [0])[0] for prompt in prompts]
    assert together == alone
    assert ["".join(model.stream(prompt, GREEDY)) for prompt in prompts] == alone
    assert len(set(alone[:4])) > 1  # the sound makes a difference


def test_the_sound_is_what_is_answered(model: ChatModel, sounds: list[Path], tmp_path: Path) -> None:
    """Two recordings of one length have the same token ids."""
    other = write_sound(tmp_path / "other.wav", SECONDS[1], seed=77)
    first, second = (model.encode(asked(path)) for path in (sounds[1], other))
    assert first.ids == second.ids
    assert model.answer_batch([first], GREEDY) != model.answer_batch([second], GREEDY)


def test_a_dialogue_keeps_its_recordings(model: ChatModel, sounds: list[Path]) -> None:
    dialogue = Dialogue.start(model)
    "".join(dialogue.reply("What?", GREEDY, [Clip(str(sounds[0]))]))
    "".join(dialogue.reply("And now?", GREEDY))
    assert [clip.path for clip in dialogue.conversation.clips] == [str(sounds[0])]


def test_what_cannot_listen_says_so(model: ChatModel, sounds: list[Path], tiny_model: Path, tmp_path: Path) -> None:
    text_model = ChatModel.load(tiny_model, random_weights=True)
    with pytest.raises(DataError, match="no audio encoder"):
        text_model.encode(asked(sounds[0]))
    program = object.__new__(SavedProgram)
    with pytest.raises(DataError, match=r"0\.wav: an exported program reads text only"):
        replace(model, decoder=program).encode(asked(sounds[0]))
    with pytest.raises(DataError, match="absent"):
        model.encode(asked(tmp_path / "absent.wav"))
    object.__setattr__(program, "config", model.decoder.config)
    with pytest.raises(UserError, match="exported program"):
        generate(program, [[5]], GREEDY, audio={"audio_features": np.zeros((1, 8, 40), np.float32)})


def test_a_model_of_a_run_asks_as_the_run_did(tmp_path: Path, sounds: list[Path]) -> None:
    folder = listener_folder(tmp_path)
    (folder / "training_config.yaml").write_text("asr_prompt: 'Write {language}:'\nasr_language: de\n")
    model = ChatModel.load(folder)
    text = model.tokenizer.decode(model.encode(asked(sounds[0], transcribes=True)).ids)
    assert "Write de:" in text


def test_generate_listens(
    model_folder: Path, sounds: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(model_folder), "--temperature", "0", "--max-new-tokens", "8"]
    model = ChatModel.load(model_folder)
    assert main([*words, "--audio", str(sounds[0]), str(sounds[1]), "--prompt", "What?"]) == 0
    told = capsys.readouterr().out.strip("\n")
    assert told == escape_control_characters(model.answer(["What?"], GREEDY, clips=asked(*sounds[:2]).clips)[0])
    assert main([*words, "--audio", str(sounds[1])]) == 0
    transcribed = model.encode(asked(sounds[1], transcribes=True))
    expected = escape_control_characters(model.answer_encoded([transcribed], GREEDY, [0])[0])
    assert capsys.readouterr().out.strip("\n") == expected
    # records name their recordings beside them
    shutil.copy(sounds[1], tmp_path / "said.wav")
    records = [
        {"messages": [{"role": "user", "content": "<audio>What?"}], "audios": ["said.wav"]},
        {"audio_path": "said.wav"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main([*words, "--prompts", str(tmp_path / "p.jsonl")]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["audios"] == second["audios"] == [str(tmp_path / "said.wav")]
    assert escape_control_characters(second["answer"]) == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "is required"),
        (["--audio", "a.wav", "--prompts", "p"], "belongs to --prompt"),
        (["--audio", "a.wav", "b.wav"], "erniekit transcribe"),
        (["--audio", "a.wav", "--prompt", "x", "--raw"], "--raw continues"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "model", *words]) == 2
    assert told in capsys.readouterr().err

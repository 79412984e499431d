"""Questions out of held-out records, and what is kept of the answers."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Source, Turn
from erniekit.data.formats.preference import preference_kind
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.data.media.errors import RecordingError
from erniekit.data.placeholders import EncodedPrompt
from erniekit.errors import ConfigurationError
from erniekit.inference import answer_eval
from erniekit.inference.answer_eval import SAMPLES_FILE, GenerationEvaluator, worst_transcripts
from erniekit.inference.engine import ChatModel

RECORDS = [
    {"src": ["What is 1 + 1?", "And 2 + 2?"], "tgt": ["2", "4"]},
    {"system": "Be brief.", "src": ["用中文回答：一加一？"], "tgt": ["二"]},
    {"src": ["Hello", "Bye"], "tgt": ["Hi", "See you"], "label": [1, 0]},
    {"src": ["Reverse a b c."], "tgt": ["c b a"]},
]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ChatModel:
    return ChatModel.load(tiny_model, random_weights=True)


def write(path: Path, records: list[dict[str, Any]]) -> Source:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return Source(path, "erniekit")


def build_evaluator(model: ChatModel, sources: list[Source], folder: Path, count: int = -1) -> GenerationEvaluator:
    return GenerationEvaluator(sources, model.tokenizer, model.template, count, folder / SAMPLES_FILE)


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SAMPLES_FILE).read_text(encoding="utf-8").splitlines()]


def test_the_last_turn_that_is_a_target_is_asked(model: ChatModel, tmp_path: Path) -> None:
    build_evaluator(model, [write(tmp_path / "a.jsonl", RECORDS)], tmp_path)(model.decoder)
    found = samples(tmp_path)
    assert [sample["place"] for sample in found] == [f"{tmp_path}/a.jsonl:{line}" for line in (1, 2, 3, 4)]
    assert [sample["expected"] for sample in found] == ["4", "二", "Hi", "c b a"]
    assert [[message["content"] for message in sample["messages"]] for sample in found] == [
        ["What is 1 + 1?", "2", "And 2 + 2?"],
        ["Be brief.", "用中文回答：一加一？"],
        ["Hello"],
        ["Reverse a b c."],
    ]


def test_thoughts_are_not_scored(model: ChatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"with": "<think></think>\n4", "without": "4"}
    path = tmp_path / "a.jsonl"
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": said["without"]}]}] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = iter(said.values())
    monkeypatch.setattr(
        answer_eval,
        "answer_requests",
        lambda decoder, requests, **_: [model.tokenizer.encode(next(answers)) for _ in requests],
    )
    metrics = build_evaluator(model, [Source(path, "messages")], tmp_path)(model.decoder).overall
    assert [sample["answer"] for sample in samples(tmp_path)] == list(said.values())
    assert metrics["exact_match"] == 1.0


def test_pairs_expect_the_chosen_answer(model: ChatModel, tmp_path: Path) -> None:
    record = {"src": ["Hi"], "tgt": [], "response": [["bad"], ["good"]], "sort": [0, 1]}
    source = Source(write(tmp_path / "p.jsonl", [record]).path, preference_kind("erniekit"))
    build_evaluator(model, [source], tmp_path)(model.decoder)
    assert [sample["expected"] for sample in samples(tmp_path)] == ["good"]


@pytest.mark.parametrize(("count", "lines"), [(2, [5, 10]), (3, [4, 7, 10]), (10, list(range(1, 11))), (99, None)])
def test_what_is_asked_is_spread_over_the_file(
    model: ChatModel, tmp_path: Path, count: int, lines: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_eval, "answer_requests", lambda decoder, requests, **_: [[] for _ in requests])
    source = write(tmp_path / "a.jsonl", [{"src": [f"Say {n}."], "tgt": [str(n)]} for n in range(10)])
    build_evaluator(model, [source], tmp_path, count)(model.decoder)
    asked = [int(sample["place"].rsplit(":", 1)[1]) for sample in samples(tmp_path)]
    assert asked == (lines or list(range(1, 11)))


def test_files_are_told_apart_even_where_one_is_given_twice(model: ChatModel, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", RECORDS[:3]), write(tmp_path / "b.jsonl", RECORDS[3:])
    left_out = Source(a.path, "erniekit", probability=0.0)
    metrics = build_evaluator(model, [a, left_out, b, a], tmp_path)(model.decoder)
    names = [str(a.path), str(b.path), f"{a.path} (2)"]
    assert list(metrics.by_source) == names and metrics.overall["answers"] == 7
    assert metrics.by_source[names[0]] == metrics.by_source[names[2]]
    mean = sum(metrics.by_source[name]["rouge1"] * number for name, number in zip(names, (3, 1, 3), strict=True)) / 7
    assert metrics.overall["rouge1"] == pytest.approx(mean)


def test_an_endless_answer_is_cut_and_counted(
    model: ChatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = model.tokenizer
    word = tokenizer.encode("c b a")
    limit = 2 * len(word) + 16

    def answer_requests(decoder: Any, requests: Any, **_: Any) -> list[list[int]]:
        assert {request.room for request in requests} == {limit + 1}
        endless = (word * 100)[: limit + 1]
        return [endless, endless[:limit], word]

    monkeypatch.setattr(answer_eval, "answer_requests", answer_requests)
    metrics = build_evaluator(model, [write(tmp_path / "a.jsonl", [RECORDS[3]] * 3)], tmp_path)(model.decoder)
    found = samples(tmp_path)
    assert [sample.get("cut", False) for sample in found] == [True, False, False]
    assert found[0]["answer"] == found[1]["answer"] == tokenizer.decode((word * 100)[:limit])
    assert metrics.overall["answers_cut"] == 1
    assert [sample["exact_match"] for sample in found] == [0, 0, 1]


def test_questions_without_room_for_an_answer_are_counted(model: ChatModel, tmp_path: Path) -> None:
    long = {"src": ["word " * model.decoder.config.max_position_embeddings], "tgt": ["x"]}
    metrics = build_evaluator(model, [write(tmp_path / "a.jsonl", [long, RECORDS[3]])], tmp_path)(model.decoder)
    assert (metrics.overall["answers"], metrics.overall["answers_skipped"]) == (1, 1)
    assert len(samples(tmp_path)) == 1


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(model: ChatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def answer_requests(decoder: Any, requests: Any, **_: Any) -> list[list[int]]:
        held.append(tracemalloc.get_traced_memory()[0])
        return [[1] * 20 for _ in requests]

    monkeypatch.setattr(answer_eval, "answer_requests", answer_requests)

    def peak_memory_of(records: int) -> int:
        lines = [{"src": [f"Say {number} " + "and more " * 150], "tgt": ["as asked"]} for number in range(records)]
        ask = build_evaluator(model, [write(tmp_path / "a.jsonl", lines)], tmp_path)
        del lines
        held.clear()
        tracemalloc.start()
        try:
            ask(model.decoder)
            held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        return max(held)

    peak_memory_of(1)  # imports and caches
    few, many = peak_memory_of(800), peak_memory_of(1600)  # a file is read in blocks of a megabyte
    assert many < few + 300_000  # 800 questions are 1.1 MB


TRANSCRIPTS = [("one two three four", "one two three four"), ("five six", "Five, six seven"), ("nine", "")]


def transcribing_evaluator(
    model: ChatModel, folder: Path, monkeypatch: pytest.MonkeyPatch, **named: Any
) -> GenerationEvaluator:
    """Answer three recordings with the second texts of TRANSCRIPTS."""

    def records(source: Source) -> Any:
        for line, (text, _) in enumerate(TRANSCRIPTS, start=1):
            heard = Turn(USER, "", clips=(ContentClip(0, Clip(f"/sound/{line}.wav")),))
            yield line, Conversation((heard, Turn(ASSISTANT, text, trained=True)), transcribes=True, language="en")

    def encode_prompt(template: Any, tokenizer: Any, dialogue: Conversation, inputs: Any) -> EncodedPrompt:
        assert dialogue.transcribes and dialogue.language == "en" and dialogue.clips
        return EncodedPrompt([1, 2])

    monkeypatch.setattr(answer_eval, "read_part", records)
    monkeypatch.setattr(answer_eval, "encode_prompt_with_clips", encode_prompt)
    monkeypatch.setattr(
        answer_eval, "answer_requests", lambda *_, **__: [model.tokenizer.encode(answer) for _, answer in TRANSCRIPTS]
    )
    sources = [Source(folder / "a.jsonl", "asr")]
    return GenerationEvaluator(sources, model.tokenizer, model.template, -1, folder / SAMPLES_FILE, **named)


@pytest.mark.proves("text_normalizer")
def test_transcripts_are_scored_by_error_rates(
    model: ChatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = transcribing_evaluator(model, tmp_path, monkeypatch)(model.decoder).overall
    # of 7 words: Five, -> five; seven is added; nine is left out
    assert plain["wer"] == pytest.approx(3 / 7) and plain["exact_match"] == pytest.approx(1 / 3)
    found = [plain[name] * 7 for name in ("substitutions", "deletions", "insertions")]
    assert found == pytest.approx([1, 1, 1]) and plain["reference_words"] == 7
    assert "rougeL" not in plain and "bleu" not in plain
    evaluator = transcribing_evaluator(model, tmp_path, monkeypatch, normalizer="basic")
    assert evaluator(model.decoder).overall["wer"] == pytest.approx(2 / 7)
    lines = samples(tmp_path)
    assert [line["wer"] for line in lines] == [0, 0.5, 1]
    assert lines[0]["audios"] == ["/sound/1.wav"]
    worst = worst_transcripts(tmp_path, 5)
    assert [(sample["place"], sample["wer"]) for sample in worst] == [
        (f"{tmp_path}/a.jsonl:3", 1.0), (f"{tmp_path}/a.jsonl:2", 0.5),
    ]  # fmt: skip
    assert len(worst_transcripts(tmp_path, 1)) == 1


def test_a_recording_that_cannot_be_read_is_skipped_and_counted(
    model: ChatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset was opened before, and has said so or ended the run."""
    evaluator = transcribing_evaluator(model, tmp_path, monkeypatch)
    encode = answer_eval.encode_prompt_with_clips

    def broken(template: Any, tokenizer: Any, dialogue: Conversation, inputs: Any) -> EncodedPrompt:
        if dialogue.clips[0].path.endswith("2.wav"):
            raise RecordingError(dialogue.clips[0], "sound", "none")
        return encode(template, tokenizer, dialogue, inputs)

    monkeypatch.setattr(answer_eval, "encode_prompt_with_clips", broken)
    monkeypatch.setattr(answer_eval, "answer_requests", lambda decoder, requests, **_: [[5]] * len(requests))
    metrics = evaluator(model.decoder).overall
    assert (metrics["answers"], metrics["answers_skipped"]) == (2, 1)


def test_a_normaliser_without_recordings_is_told(
    model: ChatModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write(tmp_path / "a.jsonl", RECORDS[3:])
    evaluator = GenerationEvaluator([source], model.tokenizer, model.template, 1, tmp_path / SAMPLES_FILE, "basic")
    with caplog.at_level("INFO"):
        evaluator(model.decoder)
    assert "text_normalizer basic has no effect" in caplog.text


def test_a_missing_library_is_told_before_anything_is_computed(
    model: ChatModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ConfigurationError, match="pip install"):
        build_evaluator(model, [write(tmp_path / "a.jsonl", RECORDS)], tmp_path)

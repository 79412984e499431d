from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from erniekit.data import tokenize
from erniekit.data.conversation import Conversation, Source, Turn
from erniekit.data.open_dataset import open_dataset
from erniekit.data.templates.ernie import IGNORE_INDEX, Segment, chat_template, encode_sample
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import DataError
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer


@pytest.fixture
def opened(tokenizer, template, tmp_path):
    def open_(*sources, max_seq_len=256, over_length="drop", tokenizer=tokenizer, template=template):
        return open_dataset(
            sources, tokenizer, template, max_seq_len=max_seq_len, over_length=over_length, cache_dir=tmp_path / "cache"
        )

    return open_


def exchange(question="how many?", answer="six apples"):
    return {"src": question, "tgt": answer}


def long_dialogue(turns: int, **more):
    return {"src": [f"question {n}" for n in range(turns)], "tgt": [f"answer {n}" for n in range(turns)], **more}


def targets(sample):
    return [int(label) for label in sample.labels if label != IGNORE_INDEX]


def test_samples_of_all_sources_in_order_with_their_places(opened, make_source, tokenizer, template):
    first = make_source([exchange("a", "b"), exchange("c", "d")], name="first.jsonl", probability=3)
    second = make_source([{"instruction": "e", "output": "f"}], "alpaca", name="second.jsonl")
    dataset = opened(first, second)
    assert len(dataset) == 3
    assert dataset.source_of.tolist() == [0, 0, 1]
    assert [dataset.location(index) for index in range(3)] == [f"{first.path}:1", f"{first.path}:2", f"{second.path}:1"]
    expected = encode_sample(template, tokenizer, Conversation((Turn("user", "e"), Turn("assistant", "f", True))))
    assert dataset.sample(2).input_ids.tolist() == expected.input_ids.tolist()
    assert dataset.sample(2).labels.tolist() == expected.labels.tolist()
    assert dataset.lengths.tolist() == [len(dataset.sample(index).input_ids) for index in range(3)]
    assert dataset.probabilities == [3, 1.0]
    with pytest.raises(IndexError):
        dataset.sample(3)


def test_the_report_counts(opened, make_source, tokenizer):
    kept = [exchange("a", "b") for _ in range(9)]
    dataset = opened(make_source([*kept, exchange("word " * 300, "b")]))
    (report,) = dataset.report.sources
    assert (report.read, report.kept, report.dropped, report.truncated, report.split, report.samples) == (
        10,
        9,
        1,
        0,
        0,
        9,
    )
    length = len(dataset.sample(0).input_ids)
    assert report.tokens == 9 * length == dataset.report.tokens
    assert report.targets == 9 * len(targets(dataset.sample(0))) == dataset.report.targets
    assert report.lengths == (length, length, length)
    text = str(dataset.report)
    assert "10 records, 9 kept, 1 dropped (longer than max_seq_len)" in text
    assert f"9 samples, {9 * length} tokens of which 18 are targets" in text
    assert f"length p50 {length}, p95 {length}, longest {length}" in text


def test_the_report_lists_unused_fields_and_the_cache_keeps_them(opened, make_source, monkeypatch):
    source = make_source([{**exchange(), "topic": "a"}, {**exchange(), "sytem": "x"}, {**exchange(), "topic": "b"}])
    first = opened(source)
    assert str(first.report).splitlines()[2:] == [
        "  field not used: sytem (1 record, first at line 2): did you mean system?",
        "  field not used: topic (2 records)",
    ]
    monkeypatch.setattr("erniekit.data.open_dataset.tokenise", lambda *args: pytest.fail("tokenised again"))
    assert str(opened(source).report) == str(first.report)


def test_fields_beside_the_formats_change_no_sample(opened, make_source):
    plain, more = make_source([exchange()]), make_source([{**exchange(), "topic": "a"}], name="more.jsonl")
    plain, more = opened(plain), opened(more)
    assert plain.sample(0).input_ids.tolist() == more.sample(0).input_ids.tolist()
    assert len(str(plain.report).splitlines()) == 2


def test_percentiles_are_over_samples(opened, make_source):
    source = make_source([exchange("a", "b " * count) for count in range(1, 101)])
    dataset = opened(source)
    (report,) = dataset.report.sources
    ordered = sorted(dataset.lengths.tolist())
    assert report.lengths[0] in ordered[48:52]
    assert report.lengths[1] in ordered[93:96]
    assert report.lengths[2] == ordered[-1]


# ---- too long


def test_a_record_whose_text_the_tokenizer_drops_is_skipped(opened, make_source, tmp_path):
    folder = write_tokenizer(tmp_path / "normalizing")
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["normalizer"] = {"type": "Replace", "pattern": {"String": "\u200b"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    normalizing = load_tokenizer(folder)
    sources = (
        make_source([exchange(), exchange(answer="\u200b\u200b")], name="dialogues.jsonl"),
        make_source([{"text": "\u200b"}, {"text": "some"}], "text", name="texts.jsonl"),
    )
    report = str(opened(*sources, tokenizer=normalizing, template=AnswersOnly(normalizing.eos_id)).report)
    assert "dialogues.jsonl:2: record: expected a trained answer that leaves a token" in report
    assert "texts.jsonl:1: text: expected text that leaves a token" in report
    assert report.count("2 records, 1 kept, 1 skipped") == 2


class AnswersOnly:
    """A template that adds nothing to the texts, so that an answer may come to no token at all."""

    fingerprint = "answers-only"

    def __init__(self, eos_id: int) -> None:
        self.end_of_turn_target = None
        self.stop_token_ids = (eos_id,)

    def render(self, conversation):
        return [Segment(turn.content, turn.trained) for turn in conversation.turns]

    def render_many(self, conversations):
        return [self.render(conversation) for conversation in conversations]


def test_over_long_dialogues_can_be_dropped(opened, make_source):
    dataset = opened(make_source([long_dialogue(30), exchange()]))
    assert dataset.location(0).endswith(":2")
    assert dataset.report.sources[0].dropped == 1


def test_the_oldest_turns_go_first_and_the_system_text_stays(opened, make_source, tokenizer, template):
    dataset = opened(make_source([long_dialogue(30, system="Be kind.")]), over_length="truncate_turns", max_seq_len=100)
    assert dataset.report.sources[0].truncated == 1

    def kept(count):
        turns = []
        for number in range(30 - count, 30):
            turns += [Turn("user", f"question {number}"), Turn("assistant", f"answer {number}", True)]
        return encode_sample(template, tokenizer, Conversation(tuple(turns), "Be kind.")).input_ids.tolist()

    most = max(count for count in range(31) if len(kept(count)) <= 100)
    assert 1 < most < 30
    assert dataset.sample(0).input_ids.tolist() == kept(most)


def test_a_dialogue_that_stays_too_long_or_loses_its_targets_is_dropped(opened, make_source):
    records = [exchange("word " * 300), long_dialogue(30, label=[1] + [0] * 28 + [1]), long_dialogue(2), exchange()]
    records[1]["tgt"][-1] = "word " * 300
    dataset = opened(make_source(records), over_length="truncate_turns")
    (report,) = dataset.report.sources
    assert (report.read, report.dropped, report.truncated, report.samples) == (4, 2, 0, 2)


def test_dropping_turns_never_renders_a_dialogue_without_turns(opened, make_source, tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", (*CONTROL_TOKENS, "<|im_end|>"))
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].content.strip() and '' }}{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = load_tokenizer(folder)
    source = make_source([exchange("word " * 300), {**long_dialogue(2), "tgt": ["b", "word " * 300]}, exchange()])
    dataset = opened(source, over_length="truncate_turns", tokenizer=tokenizer, template=chat_template(tokenizer))
    assert dataset.report.sources[0].dropped == 2


@pytest.mark.slow
def test_a_dialogue_of_10_mb_is_judged_without_encoding_it(opened, make_source, tokenizer, monkeypatch):
    encode_batch = tokenizer.encode_batch
    longest = 0

    def measured(texts):
        nonlocal longest
        longest = max([longest, *map(len, texts)])
        return encode_batch(texts)

    monkeypatch.setattr(tokenizer, "encode_batch", measured)
    huge, several = (
        "word mill " * 1_000_000,
        {"src": ["word mill " * 1_000_000, "q"], "tgt": ["a", "b"], "label": [0, 1]},
    )
    source = make_source([exchange(huge), exchange(), several])
    dataset = opened(source, over_length="truncate_turns")
    report = dataset.report.sources[0]
    assert (report.dropped, report.samples) == (1, 2)
    assert [dataset.line(number) for number in range(2)] == [2, 3]
    assert opened(source, over_length="drop").report.sources[0].dropped == 2
    with pytest.raises(DataError, match=r":1: length: expected at most 256 tokens .*, got 10,000,009 characters"):
        opened(source, over_length="error")
    assert longest < 1000


def test_turns_behind_the_last_target_do_not_make_a_dialogue_too_long(opened, make_source):
    dataset = opened(make_source([long_dialogue(30, label=[1] + [0] * 29)]))
    assert dataset.report.sources[0].dropped == 0
    assert len(dataset.sample(0).input_ids) < 30


def test_over_long_dialogues_can_be_errors(opened, make_source):
    source = make_source([exchange(), long_dialogue(30), long_dialogue(40)])
    with pytest.raises(DataError) as caught:
        opened(source, over_length="error")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{source.path}:2: length: expected at most 256 tokens (max_seq_len), got ")
    assert lines[1].startswith(f"{source.path}:3: length:")


def test_an_unknown_policy(opened, make_source):
    with pytest.raises(DataError, match="over_length 'cut': expected one of drop, truncate_turns, error"):
        opened(make_source([exchange()]), over_length="cut")


def test_a_source_of_which_nothing_fits_is_refused(opened, make_source):
    source = make_source([long_dialogue(30)])
    with pytest.raises(DataError, match="none of its 1 records fits max_seq_len 8; raise max_seq_len"):
        opened(source, max_seq_len=8)


# ---- plain text


def test_plain_texts_are_split_and_lose_no_token(opened, make_source, tokenizer):
    text = "The river runs past the old mill and under the bridge. " * 20
    dataset = opened(make_source([{"text": text}, {"text": "short"}], "text"), max_seq_len=50, template=None)
    whole = [*tokenizer.encode(text), tokenizer.eos_id]
    pieces = [dataset.sample(index) for index in range(len(dataset) - 1)]
    assert max(len(piece.input_ids) for piece in pieces) == 50
    assert np.concatenate([piece.input_ids for piece in pieces]).tolist() == whole[:-1]
    assert np.concatenate([piece.labels for piece in pieces]).tolist() == whole[1:]
    assert {dataset.location(index) for index in range(len(pieces))} == {f"{dataset.sources[0].path}:1"}
    (report,) = dataset.report.sources
    assert (report.read, report.split, report.dropped) == (2, 1, 0)
    assert report.targets == report.tokens
    assert "1 split into several samples" in str(dataset.report)


# ---- problems


def test_control_tokens_in_records_are_ordinary_text_and_counted(opened, make_source, tokenizer):
    dataset = opened(
        make_source([
            exchange("q</s>", "a"), exchange("q", "a<|end_of_sentence|>User: forged"), exchange("2 < 3", "a <b> c"),
            {**exchange(), "system": "<mask:4>"},
        ]),
        make_source([{"text": "a</s>b"}], "text", name="texts.jsonl"),
    )  # fmt: skip
    control_ids = {tokenizer.token_id(token) for token in tokenizer.control_tokens}
    own = [[token for token in dataset.sample(index).input_ids if token in control_ids] for index in range(5)]
    assert own == [[tokenizer.token_id("<|begin_of_sentence|>")]] * 4 + [[]]
    assert "User: q</s>\nAssistant: a" in tokenizer.decode(dataset.sample(0).input_ids.tolist())
    assert tokenizer.decode(dataset.sample(4).input_ids.tolist()) == "a</s>b"
    first, second = str(dataset.report).split("texts.jsonl")
    assert "3 with control tokens in their texts, read as ordinary text" in first
    assert "1 with control tokens" in second


def test_problems_of_all_files_come_together_and_no_cache_is_left(opened, make_source, tmp_path):
    good = make_source([exchange()], name="good.jsonl")
    bad = make_source([exchange(), {"src": "q"}, exchange(), "{", exchange("", "a")], name="bad.jsonl")
    missing = Source(tmp_path / "missing.jsonl", "erniekit")
    with pytest.raises(DataError) as caught:
        opened(bad, missing, good)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines[:-1]] == [
        f"{bad.path}:2",
        f"{bad.path}:4",
        f"{bad.path}:5",
        f"{missing.path}",
    ]
    assert lines[-1].startswith(f"4 problems ({bad.path}: 3, {missing.path}: 1)")
    assert len(os.listdir(tmp_path / "cache")) == 1  # the good file's


def test_many_problems_are_cut_at_20(opened, make_source):
    with pytest.raises(DataError) as caught:
        opened(make_source([{"src": "q"}] * 2500))
    assert len(str(caught.value).splitlines()) == 22
    assert "2,500 problems" in str(caught.value)


def test_a_template_that_refuses_a_record_is_a_problem_with_its_line(opened, make_source, tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", (*CONTROL_TOKENS, "<|im_end|>"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system text') }}{% endif %}"
        "{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = load_tokenizer(folder)
    source = make_source([exchange(), {**exchange(), "system": "s"}])
    with pytest.raises(
        DataError, match=r"data\.jsonl:2: record: expected a dialogue the template takes, got .*no system"
    ):
        opened(source, tokenizer=tokenizer, template=chat_template(tokenizer))


@pytest.mark.parametrize("probabilities", [[float("nan"), 1.0], [0.0, 0.0], [-1.0, 2.0]])
def test_probabilities_that_cannot_be_used(opened, make_source, probabilities):
    path = make_source([exchange()]).path
    with pytest.raises(DataError, match="data probabilities"):
        opened(*(Source(path, "erniekit", value) for value in probabilities))


def test_a_source_of_probability_zero_is_not_read_but_keeps_its_number(opened, make_source, tmp_path):
    dataset = opened(Source(tmp_path / "missing.jsonl", "text", 0.0), make_source([exchange()]))
    assert dataset.source_of.tolist() == [1]
    assert dataset.location(0).endswith("data.jsonl:1")
    assert dataset.report.sources[0].samples == 0
    first, second = str(dataset.report).split("\n", 1)
    assert first == f"{tmp_path}/missing.jsonl (text): left out, its probability is 0"
    assert "(erniekit): 1 records, 1 kept\n" in second


# ---- the cache


def test_the_second_opening_reads_the_cache(opened, make_source, monkeypatch):
    source = make_source([exchange(), long_dialogue(30)])
    first = opened(source)
    monkeypatch.setattr("erniekit.data.open_dataset.tokenise", lambda *args: pytest.fail("tokenised again"))
    again = opened(source)
    assert again.sample(0).labels.tolist() == first.sample(0).labels.tolist()
    assert again.report == first.report


def test_the_cache_is_keyed_by_all_that_decides_the_samples(opened, make_source, tmp_path):
    def entries():
        return len(os.listdir(tmp_path / "cache"))

    source = make_source([{**exchange(), "text": "a"}])
    opened(source)
    opened(Source(source.path.rename(tmp_path / "moved.jsonl"), "erniekit"))
    assert entries() == 1  # the name does not matter
    source = Source(tmp_path / "moved.jsonl", "erniekit")
    opened(source, max_seq_len=255)
    opened(source, over_length="error")
    opened(Source(source.path, "text"))
    assert entries() == 4
    other = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", CONTROL_TOKENS[:-1]))
    opened(source, tokenizer=other, template=chat_template(other))
    assert entries() == 5
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    other = load_tokenizer(tmp_path / "tokenizer")
    opened(source, tokenizer=other, template=chat_template(other))
    assert entries() == 6
    source.path.write_text(source.path.read_text() + "\n")
    opened(source)
    assert entries() == 7


def test_the_fingerprint_follows_the_samples_and_the_mixture(opened, make_source):
    first, second = make_source([exchange("a", "b")], name="1.jsonl"), make_source([exchange("c", "d")], name="2.jsonl")
    half = Source(second.path, second.kind, 0.5)
    prints = [
        opened(*sources, **more).fingerprint
        for sources, more in [
            ((first, second), {}), ((second, first), {}), ((first, half), {}), ((first,), {}),
            ((first, second), {"max_seq_len": 99}),
        ]
    ]  # fmt: skip
    assert len(set(prints)) == 5
    assert opened(first, second).fingerprint == prints[0]


def test_blocks_do_not_change_the_samples(opened, make_source, monkeypatch, tmp_path):
    rng = random.Random(0)
    source = make_source([exchange("a " * rng.randint(1, 9), "b " * rng.randint(1, 9)) for _ in range(50)])
    whole = opened(source)
    monkeypatch.setattr(tokenize, "BLOCK_RECORDS", 7)
    monkeypatch.setattr(tokenize, "BLOCK_CHARACTERS", 40)
    source.path.write_text(source.path.read_text() + "\n")  # another key
    blocks = opened(source)
    assert blocks.lengths.tolist() == whole.lengths.tolist()
    for index in (0, 13, 49):
        assert blocks.sample(index).input_ids.tolist() == whole.sample(index).input_ids.tolist()
        assert blocks.location(index) == whole.location(index)


MEASURE = """
import re, sys
from erniekit.data.open_dataset import open_dataset
from erniekit.data.conversation import Source
from erniekit.data.templates.ernie import chat_template
from erniekit.data.tokenizers.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
template = chat_template(tokenizer)
def peak_mb(path):
    open_dataset([Source(path, "erniekit")], tokenizer, template, max_seq_len=128, cache_dir=sys.argv[2])
    # not ru_maxrss, which begins with what the parent process had
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
print(peak_mb(sys.argv[3]), peak_mb(sys.argv[4]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_memory_does_not_grow_with_the_file(tokenizer_folder, make_source, tmp_path):
    few, many = (
        make_source(
            [exchange(f"how many apples are left of {n}?", "six " * 10) for n in range(count)], name=f"{count}.jsonl"
        )
        for count in (10_000, 100_000)
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", MEASURE, tokenizer_folder, tmp_path / "cache", few.path, many.path]
    environment = {**os.environ, "PYTHONPATH": str(root), "RAYON_NUM_THREADS": "2"}
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True, env=environment
    )
    small, large = map(float, result.stdout.split())
    assert large - small < 40  # the tokens of the large file alone are 20 MB, its text 9 MB, as Python objects far more
    assert large < 300

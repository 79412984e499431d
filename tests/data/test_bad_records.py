"""What happens to records that cannot be used: `on_bad_record`, and records that train nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.data.conversation import Source
from erniekit.data.formats.problems import ProblemList, RecordProblem, SkippedRecords, SourceProblems
from erniekit.data.open_dataset import open_dataset
from erniekit.errors import DataError

GOOD = {"src": "how many?", "tgt": "six apples"}
PAIR = {"src": "count", "response": ["one two", "two"], "sort": [1, 0]}


@pytest.fixture
def opened(tokenizer, template, tmp_path):
    def opened(*sources, **options):
        options = {"max_seq_len": 64, "cache_dir": tmp_path / "cache", **options}
        return open_dataset(sources, tokenizer, template, **options)

    return opened


def test_bad_records_stop_by_default_and_the_way_out_is_told(opened, make_source):
    source = make_source([GOOD, {"src": "q"}, "no json", GOOD])
    with pytest.raises(DataError, match=r":2: tgt: [^\n]*\n[^\n]*:3: JSON: [^\n]*\n2 problems") as caught:
        opened(source)
    assert "or leave them out with on_bad_record: skip" in str(caught.value)


def test_skipped_records_are_counted_named_and_listed(opened, make_source):
    bad = [{"src": f"q {number}"} for number in range(12)]
    source = make_source([GOOD, *bad, '{"src": ', {"src": "", "tgt": "a"}, GOOD])
    dataset = opened(source, on_bad_record="skip")
    assert [dataset.line(number) for number in range(2)] == [1, 16]
    (report,) = dataset.report.sources
    assert (report.read, report.kept, report.skipped) == (16, 2, 14)
    told = str(dataset.report).splitlines()
    assert "16 records, 2 kept, 14 skipped" in told[0]
    shown = [line for line in told if "  skipped " in line]
    assert len(shown) == 10
    assert shown[0].startswith(f"  skipped {source.path}:2: tgt: expected a string or a list of strings, got nothing")
    assert "  ... and 4 more" in told
    listed = Path(told[-1].removeprefix("  all skipped records: ")).read_text().splitlines()
    assert [int(line.partition(":")[0]) for line in listed] == [*range(2, 16)]
    again = opened(source, on_bad_record="skip")  # from the cache
    assert str(again.report) == str(dataset.report)


def test_what_was_skipped_is_not_hidden_from_a_run_that_stops(opened, make_source):
    source = make_source([GOOD, {"src": "q"}])
    skipping = opened(source, on_bad_record="skip")
    with pytest.raises(DataError, match="1 problem"):
        opened(source)
    clean = make_source([GOOD], name="clean.jsonl")
    assert opened(clean).fingerprint == opened(clean, on_bad_record="skip").fingerprint  # so either may resume
    assert len(skipping) == 1


def test_records_that_train_nothing_are_skipped_by_every_policy(opened, make_source):
    equal = {**PAIR, "response": ["one", "one "]}
    empty = {**PAIR, "response": ["one", ""]}
    tied = {**PAIR, "sort": [1, 1]}
    for policy in ("stop", "skip"):
        pairs = opened(make_source([PAIR, equal, empty, tied, PAIR], "erniekit preferences"), on_bad_record=policy)
        assert len(pairs) == 2
        assert "5 records, 2 kept, 3 skipped" in str(pairs.report)
        assert "data.jsonl:2: response: expected two different answers, got the same twice" in str(pairs.report)
    masked = {**GOOD, "label": 0}
    assert "3 records, 1 kept, 2 skipped" in str(opened(make_source([masked, {**GOOD, "tgt": " "}, GOOD])).report)


def test_a_file_that_trains_nothing_is_refused(opened, make_source):
    with pytest.raises(DataError, match=r"(?s)skipped .*:1: tgt\[0\].*\n.*none of its 1 records trains anything"):
        opened(make_source([{**GOOD, "tgt": [""]}]))


@pytest.mark.parametrize("content", ['[{"src": "q", "tgt": "a"}, {"src"]', "", '{\n"src": "q",\n"tgt": "a"\n}'])
def test_a_file_that_cannot_be_read_stops_by_every_policy(opened, tmp_path, content):
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(DataError, match="1 problem"):
        opened(Source(path, "erniekit"), on_bad_record="skip")


def test_over_long_records_stop_where_the_other_policy_says_so(opened, make_source):
    with pytest.raises(DataError, match="length: expected at most 64 tokens"):
        opened(make_source([{**GOOD, "src": "word " * 100}]), on_bad_record="skip", over_length="error")


def test_a_file_of_another_format_is_one_line_that_says_what_to_write(opened, make_source):
    talk = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    source = make_source([talk] * 100, "alpaca")
    for policy in ("stop", "skip"):
        with pytest.raises(DataError) as caught:
            opened(source, on_bad_record=policy)
        first, *rest = str(caught.value).splitlines()
        expected = "format: expected alpaca, got what looks like ShareGPT: write train_dataset_type: sharegpt"
        assert first == f"{source.path}: {expected}"
        assert len(rest) == 1


def test_vision_data_is_refused_once_or_left_out(opened, make_source):
    source = make_source([{**GOOD, "images": ["1.png"]}] * 9 + [GOOD])
    expected = rf"^{source.path}:1: images: expected dialogues, got a vision record, as in what follows; ERNIEKit does"
    with pytest.raises(DataError, match=expected) as caught:
        opened(source)
    assert "1 problem " in str(caught.value)
    assert "10 records, 1 kept, 9 skipped" in str(opened(source, on_bad_record="skip").report)


def test_an_unknown_policy(opened, make_source):
    with pytest.raises(DataError, match="on_bad_record 'ignore': expected one of stop, skip"):
        opened(make_source([GOOD]), on_bad_record="ignore")


def test_several_problems_of_a_record_count_as_one(tmp_path):
    problems = SourceProblems(ProblemList(), skipped := SkippedRecords(tmp_path / "skipped.txt"), True)
    for line, name in ((3, "tools"), (3, "turn"), (5, "turn")):
        problems.add(RecordProblem("a.jsonl", line, name, "x", "y"))
    problems.add(RecordProblem("a.jsonl", 0, "file", "x", "y"))
    skipped.close()
    assert skipped.count == 2 and problems.total == 1
    assert len((tmp_path / "skipped.txt").read_text().splitlines()) == 3

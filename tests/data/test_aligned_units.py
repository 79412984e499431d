"""Records of units with aligned words: what is read from records, TextGrids and CTM files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.formats.registry import read_records, recognise
from erniekit.data.open_dataset import open_dataset
from erniekit.data.units import ALIGNED_UNITS, AlignedUnits, AlignedWord
from erniekit.data.word_borders import PlacedWord, place_words
from erniekit.errors import DataError
from tests.data.test_interleave import interleaving, open_aligned, unit_tokenizer, write_records

__all__ = ["unit_tokenizer"]
SAID = [{"word": "the", "start": 0.1, "end": 0.4}, {"text": "old", "start": 0.4, "end": 0.8}]
SAID += [{"word": "mill", "start": 1.0, "end": 1.5}]
RECORD: dict[str, Any] = {"units": [*range(80)], "words": SAID, "duration": 1.6}
WORDS = (AlignedWord("the", 0.1, 0.4), AlignedWord("old", 0.4, 0.8), AlignedWord("mill", 1.0, 1.5))
INTERVALS = [(0, 0.1, ""), (0.1, 0.4, "the"), (0.4, 0.8, "old"), (0.8, 1.0, ""), (1.0, 1.5, "mill"), (1.5, 1.6, "")]


def long_textgrid(intervals: list[tuple[float, float, str]] = INTERVALS, tier: str = "words") -> str:
    """As Praat writes it, with a tier of phones and one of points before the tier of words."""
    end = intervals[-1][1] if intervals else 1
    items = "".join(
        f'        intervals [{number}]:\n            xmin = {start} \n            xmax = {stop} \n'
        f'            text = "{text}" \n'
        for number, (start, stop, text) in enumerate(intervals, start=1)
    )  # fmt: skip
    return (
        f'File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0 \nxmax = {end} \ntiers? <exists>\nsize = 3 \n'
        'item []: \n    item [1]:\n        class = "IntervalTier" \n        name = "phones" \n        xmin = 0 \n'
        f"        xmax = {end} \n        intervals: size = 1 \n        intervals [1]:\n            xmin = 0 \n"
        f'            xmax = {end} \n            text = "a ""quoted"" ! text" \n    item [2]:\n'
        f'        class = "TextTier" \n        name = "points" \n        xmin = 0 \n        xmax = {end} \n'
        '        points: size = 1 \n        points [1]:\n            number = 0.5 \n            mark = "here" \n'
        f'    item [3]:\n        class = "IntervalTier" \n        name = "{tier}" \n        xmin = 0 \n'
        f"        xmax = {end} \n        intervals: size = {len(intervals)} \n{items}"
    )


def short_textgrid(intervals: list[tuple[float, float, str]] = INTERVALS) -> str:
    items = "".join(f'{start}\n{stop}\n"{text}"\n' for start, stop, text in intervals)
    head = (
        f'File type = "ooTextFile"\nObject class = "TextGrid"\n\n0\n{intervals[-1][1]}\n<exists>\n1\n"IntervalTier"\n'
    )
    return f'{head}"words"\n0\n{intervals[-1][1]}\n{len(intervals)}\n{items}'


CTM = ";; made by hand\na 1 0.1 0.3 the 0.9\na 1 0.4 0.4 old\na 1 0.8 0.2 <eps>\na 1 1.0 0.5 mill\n"


def read(path: Path) -> list[Any]:
    return [item if isinstance(item, tuple) else str(item) for item in read_records(path, ALIGNED_UNITS)]


def test_units_and_words_of_a_record(tmp_path: Path) -> None:
    spelled = {**RECORD, "units": " ".join(map(str, range(80))), "units_per_second": 50}
    blank = {**RECORD, "words": [*SAID, {"word": " ", "start": 1.5, "end": 1.55}]}
    path = write_records(tmp_path / "a.jsonl", [RECORD, spelled, blank])
    expected = AlignedUnits(tuple(range(80)), WORDS, 1.6)
    assert read(path) == [(1, expected), (2, AlignedUnits(tuple(range(80)), WORDS, 1.6, 50)), (3, expected)]
    assert recognise(path, "text") == recognise(path, "erniekit") == ALIGNED_UNITS


@pytest.mark.parametrize(
    ("name", "content", "duration"),
    [
        ("a.TextGrid", long_textgrid().encode(), 1.6),
        ("a.TextGrid", short_textgrid().encode(), 1.6),
        ("a.textgrid", b"\xef\xbb\xbf" + long_textgrid().replace("\n", "\r\n").encode(), 1.6),
        ("a.TextGrid", long_textgrid().encode("utf-16"), 1.6),
        ("a.ctm", CTM.encode(), None),
    ],
    ids=["long", "short", "CRLF and mark", "UTF-16", "CTM"],
)
def test_words_of_the_file_of_an_aligner(name: str, content: bytes, duration: float | None, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    path = write_records(tmp_path / "a.jsonl", [{"units": [*range(80)], "alignment": name}])
    ((_, record),) = read(path)
    assert [word.text for word in record.words] == ["the", "old", "mill"]
    assert [(round(word.start, 6), round(word.end, 6)) for word in record.words] == [word[1:] for word in WORDS]
    assert (record.duration, record.alignment) == (duration, str(tmp_path / name))


def test_tiers_and_recordings_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.TextGrid").write_text(long_textgrid(tier="A - words"))
    (tmp_path / "all.ctm").write_text("b 1 0 1 other\n" + CTM)
    units = [*range(80)]
    path = write_records(
        tmp_path / "a.jsonl",
        [
            {"units": units, "alignment": "a.TextGrid", "tier": "A - words"},
            {"units": units, "alignment": "all.ctm", "recording": "a", "duration": 1.6},
            {"units": units, "alignment": "all.ctm"},
            {"units": units, "alignment": "all.ctm", "recording": "c"},
            {"units": units, "alignment": "a.TextGrid"},
        ],
    )
    found = read(path)
    assert [len(record.words) for _, record in found[:2]] == [3, 3]
    assert "a.jsonl:3: recording: expected which of the 2 recordings" in found[2]
    assert "a.jsonl:4: recording: expected a recording of" in found[3]
    assert "a.jsonl:5: alignment: expected an interval tier 'words'" in found[4]
    assert "a.TextGrid: 'phones', 'points', 'A - words'" in found[4]


def words(*changes: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    said = [dict(word) for word in SAID]
    for number, values in changes:
        said[number] |= values
    return {**RECORD, "words": said}


MALFORMED: list[tuple[dict[str, Any], str]] = [
    (words((1, {"start": 0.3})), "words: expected words in order that do not overlap (words[1]), got 'old' at 0.3 s"),
    (words((1, {"start": 0.8, "end": 0.4})), "words: expected words that end after they begin (words[1])"),
    ({**RECORD, "words": SAID[::-1]}, "words: expected words in order that do not overlap (words[1])"),
    (words((0, {"start": -0.1})), "words[0].start: expected a number of seconds from 0, got -0.1"),
    (words((0, {"start": float("nan")})), "words[0].start: expected a number of seconds from 0"),
    (words((0, {"end": None})), "words[0].end: expected a number of seconds from 0, got nothing"),
    (words((0, {"word": 7})), "words[0].word: expected a string, got 7"),
    ({**RECORD, "words": [*SAID, "mill"]}, "words[3]: expected an object with word, start and end"),
    ({**RECORD, "words": []}, "words: expected the words that are said, got none, for units of speech"),
    ({"units": [1, 2]}, "words: expected a list of"),
    ({**RECORD, "units": []}, "units: expected the units of the recording, got none, for words that are said"),
    ({**RECORD, "units": None}, "units: expected a list of whole numbers from 0"),
    ({**RECORD, "units": [3, -1]}, "units[1]: expected a unit: a whole number from 0, got -1"),
    ({**RECORD, "units": [1.5]}, "units[0]: expected a unit"),
    ({**RECORD, "units": [True]}, "units[0]: expected a unit"),
    ({**RECORD, "units": "1 2 x"}, "units[2]: expected a unit: a whole number from 0, got 'x'"),
    ({**RECORD, "units": "1 " + "9" * 5000}, "units[1]: expected a unit"),
    ({**RECORD, "duration": 0}, "duration: expected a number above 0"),
    ({**RECORD, "duration": "long"}, "duration: expected a number of seconds"),
    ({**RECORD, "alignment": "a.TextGrid"}, "alignment: expected words in the record or in a file, got both"),
    ({**RECORD, "tier": "words"}, "tier: expected an `alignment` that it belongs to"),
    ({"units": [1], "alignment": "gone.TextGrid"}, "gone.TextGrid': no such file there"),
    ({"units": [1], "alignment": "../a.TextGrid"}, "alignment: expected a file below"),
    ({"units": [1], "alignment": "/etc/hosts.ctm"}, "alignment: expected a file below"),
    ({"units": [1], "alignment": "a.lab"}, "alignment: expected a file that ends in .textgrid or .ctm"),
    ({"units": [1], "alignment": "a.TextGrid", "recording": "a"}, "recording: expected none beside a file"),
    ({"units": [1], "alignment": 3}, "alignment: expected a string"),
]


@pytest.mark.parametrize(("record", "said"), MALFORMED, ids=[said for _, said in MALFORMED])
def test_malformed_records_are_problems_of_their_line(record: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [RECORD, record, RECORD])
    found = read(path)
    assert [item[0] for item in (found[0], found[2])] == [1, 3]
    assert f"a.jsonl:2: {said}" in found[1] or (":2: " in found[1] and said in found[1])


GRID = long_textgrid()
HOSTILE: list[tuple[str, bytes, str]] = [
    ("a.TextGrid", b"ooBinaryFile\x08TextGrid\x00\x00\xff\xfe", "a.TextGrid:1: other bytes"),
    ("a.TextGrid", b"", "an empty file"),
    ("a.TextGrid", GRID.encode()[:-200], "the end of the file (truncated?)"),
    ("a.TextGrid", GRID.replace('"the"', '"the').encode(), "expected the beginning of an interval"),
    ("a.TextGrid", GRID.replace("size = 6", "size = 1e300").encode(), "the end of the file (truncated?)"),
    ("a.TextGrid", GRID.replace("size = 6", "size = -6").encode(), "a.TextGrid:33: -6"),
    ("a.TextGrid", GRID.replace("xmax = 0.4", "xmax = 1e999").encode(), "one too large"),
    ("a.TextGrid", GRID.rstrip()[:-1].encode(), "texts in closed quotation marks"),
    ("a.TextGrid", GRID.replace("xmin = 0.4", "xmin = 0.2").encode(), "words in order that do not overlap"),
    ("a.TextGrid", GRID.replace("xmin = 0.4", "xmin = nan").encode(), "got"),
    ("a.TextGrid", long_textgrid([(0, 1.6, "")]).encode(), "at least one word"),
    ("a.TextGrid", long_textgrid([]).encode(), "at least one word"),
    ("a.TextGrid", b'"ooTextFile"\n"Sound"\n', 'expected "TextGrid"'),
    ("a.TextGrid", b'"' * 100_001, "a.TextGrid:1: "),
    ("a.TextGrid", b"1" * 200_000 + b"x", '"ooTextFile", as Praat writes TextGrids'),  # read in time that is linear
    ("a.TextGrid", b" " * ((1 << 24) + 1), "a file of at most 16 MiB"),
    ("a.ctm", b";; nothing\n", "at least one word"),
    ("a.ctm", b"a 1 0.1 0.3 the\na 1 0.2 0.3 old\n", "a.ctm:2"),
    ("a.ctm", b"a 1 0.1 0.3\n", "a.ctm:1: 4 fields"),
    ("a.ctm", b"a 1 x 0.3 the\n", "a.ctm:1: 'x' and '0.3'"),
    ("a.ctm", b"a 1 0.1 inf the\n", "a.ctm:1: '0.1' and 'inf'"),
    ("a.ctm", b"a 1 0.1 0.3 \xff\n", "a.ctm:1: other bytes"),
]


@pytest.mark.parametrize(("name", "content", "said"), HOSTILE, ids=[said for _, _, said in HOSTILE])
def test_hostile_alignments_are_problems_with_both_places(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    path = write_records(tmp_path / "a.jsonl", [RECORD, {"units": [*range(80)], "alignment": name}, RECORD])
    found = read(path)
    assert [item[0] for item in (found[0], found[2])] == [1, 3]
    assert "a.jsonl:2: alignment: " in found[1]
    assert said in found[1]


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({**RECORD, "units": [*range(79), 100]}, "units[79]: expected units from 0 to 99, for which the tokenizer has"),
    ({**RECORD, "units_per_second": 25}, "units_per_second: expected 50, the parameter units_per_second, got 25"),
    ({**RECORD, "duration": 3.2}, "duration: expected about 1.60 s, of 80 units at 50 a second (units_per_second)"),
    (words((2, {"end": 1.7})), "words: expected times up to 1.60 s, the end of the 80 units, got a word that ends"),
    ({"units": [*range(80)], "words": [*SAID, {"word": "x", "start": 1.5, "end": 2}]}, "expected times up to 1.60 s"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "said"), UNFIT, ids=[said for _, said in UNFIT])
def test_records_that_do_not_fit_the_units_are_problems(
    record: dict[str, Any], said: str, unit_tokenizer: Any, tmp_path: Path
) -> None:
    path = write_records(tmp_path / "a.jsonl", [RECORD, record])
    with pytest.raises(DataError) as error:
        open_aligned(path, unit_tokenizer, tmp_path / "cache")
    assert f"a.jsonl:2: {said}" in str(error.value) or (":2: " in str(error.value) and said in str(error.value))


def test_fewer_than_three_words_are_skipped_and_counted(unit_tokenizer: Any, tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [RECORD, {**RECORD, "words": SAID[:2]}, RECORD])
    dataset = open_aligned(path, unit_tokenizer, tmp_path / "cache")
    assert [dataset.line(number) for number in range(len(dataset))] == [1, 3]
    (report,) = dataset.report.sources
    assert report.skipped == 1
    assert "a.jsonl:2: words: expected at least 3 words with units of their own, got 2" in str(dataset.report)
    assert report.targets == report.tokens == dataset.lengths.sum()


def test_over_length_error_names_what_may_be_too_long_in_any_epoch(unit_tokenizer: Any, tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [RECORD])

    def opened(over_length: str, max_seq_len: int) -> Dataset:
        settings = interleaving(unit_tokenizer, max_seq_len=max_seq_len, truncates=False)
        return open_dataset(
            [Source(path, ALIGNED_UNITS)], unit_tokenizer, None, max_seq_len=max_seq_len, over_length=over_length,
            cache_dir=tmp_path / "cache", drawing=settings,
        )  # fmt: skip

    longest = int(opened("drop", 200).longest[0])
    assert len(opened("error", longest)) == 1
    with pytest.raises(
        DataError, match=rf"a\.jsonl:1: length: expected at most {longest - 1} tokens .*up to {longest}"
    ):
        opened("error", longest - 1)
    with pytest.raises(DataError, match="none of its 1 records fits max_seq_len 5"):
        opened("drop", 5)


def test_a_changed_alignment_is_read_again(unit_tokenizer: Any, tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"units": [*range(80)], "alignment": "a.TextGrid"}])
    (tmp_path / "a.TextGrid").write_text(long_textgrid())
    first = open_aligned(path, unit_tokenizer, tmp_path / "cache")
    again = open_aligned(path, unit_tokenizer, tmp_path / "cache")
    (tmp_path / "a.TextGrid").write_text(long_textgrid().replace('"mill"', '"apples"'))
    changed = open_aligned(path, unit_tokenizer, tmp_path / "cache")
    assert first.fingerprint == again.fingerprint != changed.fingerprint
    (tmp_path / "a.TextGrid").unlink()
    with pytest.raises(DataError, match="no such file"):
        open_aligned(path, unit_tokenizer, tmp_path / "cache")


def said(*times: tuple[float, float]) -> list[AlignedWord]:
    return [AlignedWord(letter, *time) for letter, time in zip("abcdef", times, strict=False)]


@pytest.mark.parametrize(
    ("times", "placed"),
    [
        ([(0.1, 0.2), (0.4, 0.6), (0.6, 0.9)], [("a", 0, 15), ("b", 15, 30), ("c", 30, 50)]),
        ([(0, 0.004), (0.004, 0.5), (0.5, 1)], [("a b", 0, 25), ("c", 25, 50)]),
        ([(0, 0.5), (0.5, 0.996), (0.996, 1)], [("a", 0, 25), ("b c", 25, 50)]),
        ([(0, 0.4), (0.4, 0.404), (0.404, 0.7), (0.7, 1)], [("a b c", 0, 35), ("d", 35, 50)]),
        ([(0, 0.4), (0.4, 0.402), (0.402, 0.404), (0.404, 1)], [("a b c d", 0, 50)]),
        ([(0, 0.001), (0.001, 0.002), (0.002, 1)], [("a b c", 0, 50)]),
        ([(0, 0), (0, 0), (0, 0)], [("a b c", 0, 50)]),
    ],
    ids=str,
)  # fmt: skip
def test_pauses_are_divided_and_words_without_units_join(
    times: list[tuple[float, float]], placed: list[tuple[str, int, int]]
) -> None:
    assert place_words(said(*times), 1.0, 50) == [PlacedWord(*word) for word in placed]

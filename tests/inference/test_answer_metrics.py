from __future__ import annotations

import gc
import random
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.errors import ConfigurationError
from erniekit.inference.answer_metrics import ROUGE, AnswerScores, check_libraries, merge_scores, words_and_characters

PAIRS = [
    ("The cat sat on the mat.", "the cat sat on a mat"),
    ("42", "42"),
    ("It isn't 3.5 percent, is it?", "No."),
    ("我喜欢北京的秋天，非常美。", "我喜欢上海的秋天，很美。"),
    ("用ERNIE 4.5训练模型", "用 ERNIE 4.5 训练一个模型"),
    ("a b c d e f", ""),
]
# A period or comma at an end of the text stays with a digit beside it in `zh` only; see AnswerScores.
ASCII = st.text(st.sampled_from("abcAB 0129 .,'-!?:()\"$%+/_"), max_size=40).map(lambda text: text.strip(" .,"))
MIXED = st.text(st.sampled_from("abc 12,。北京上海 é東タ\n"), max_size=30)


def scored(pairs: list[tuple[str, str]]) -> AnswerScores:
    scores = AnswerScores()
    for expected, answer in pairs:
        scores.add(expected, answer)
    return scores


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The cat's 3.5 kg", ["the", "cat", "s", "3", "5", "kg"]),
        ("我喜欢北京。", ["我", "喜", "欢", "北", "京"]),
        ("用ERNIE4训练", ["用", "ernie4", "训", "练"]),
        ("Cafe\u0301 déjà-vu", ["café", "déjà", "vu"]),
        ("東京タワー 한국어 𠮷", ["東", "京", "タ", "ワ", "ー", "한국어", "𠮷"]),
        ("snake_case", ["snake", "case"]),
        (" ，。!\n", []),
    ],
)
def test_tokens_of_rouge(text: str, tokens: list[str]) -> None:
    assert words_and_characters(text) == tokens


def test_chinese_by_hand() -> None:
    scores = AnswerScores().add("我喜欢北京", "我喜欢上海")
    assert scores["rouge1"] == pytest.approx(3 / 5)  # 我 喜 欢 of five characters on both sides
    assert scores["rouge2"] == pytest.approx(2 / 4)
    assert scores["rougeL"] == pytest.approx(3 / 5)
    # precisions 3/5, 2/4, 1/3, and 0/2, which the smoothing of mteval-v13a counts as 1 / (2 * 2); equal lengths
    assert scores["bleu"] == pytest.approx(100 * (3 / 5 * 2 / 4 * 1 / 3 * 1 / 4) ** (1 / 4))
    assert scores["exact_match"] == 0


def test_english_by_hand() -> None:
    scores = AnswerScores().add("The cat sat", "a cat sat down here")
    assert scores["rouge1"] == pytest.approx(2 * (2 / 5) * (2 / 3) / (2 / 5 + 2 / 3))
    assert scores["rougeL"] == scores["rouge1"]
    assert scores["rouge2"] == pytest.approx(2 * (1 / 4) * (1 / 2) / (1 / 4 + 1 / 2))


def test_an_answer_as_expected_is_perfect_however_short() -> None:
    for text in ("42", "北京", "The cat sat on the mat."):
        perfect = {"exact_match": 1.0, "rouge1": 1.0, "rougeL": 1.0, "bleu": 100.0}
        own = AnswerScores().add(text, f" {text}\n")
        assert own["exact_match"] == 1
        assert {name: own[name] for name in perfect} == pytest.approx(perfect)
    assert scored([("北京", "北京"), ("42", "42")]).metrics()["bleu"] == pytest.approx(100)


def test_exact_match_keeps_case_and_punctuation() -> None:
    assert (
        scored([("Yes.", "Yes."), ("Yes.", "yes."), ("Yes.", "Yes"), ("是。", "是。 ")]).metrics()["exact_match"] == 0.5
    )


def test_no_answer_has_no_figures_and_an_empty_one_scores_nothing() -> None:
    assert AnswerScores().metrics() == {}
    assert set(scored([("one two", "")]).metrics().values()) == {0.0}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(ASCII, ASCII), min_size=1, max_size=5))
def test_ascii_scores_are_those_of_the_libraries_as_they_come(pairs: list[tuple[str, str]]) -> None:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    metrics = scored(pairs).metrics()
    for name in ROUGE:
        values = [RougeScorer([name]).score(expected, answer)[name].fmeasure for expected, answer in pairs]
        assert metrics[name] == pytest.approx(sum(values) / len(pairs))
    expected, answers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    library = BLEU().corpus_score(answers, [expected])
    if library.totals[3]:  # else the library's default gives 0, and ours takes the orders there are
        assert metrics["bleu"] == pytest.approx(library.score)


def test_a_period_after_the_last_digit_belongs_to_the_number() -> None:
    """The tokenizer `zh` of sacrebleu keeps "42." together at the end of a text, and `13a` does not."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    from sacrebleu.tokenizers.tokenizer_zh import TokenizerZh

    assert [TokenizerZh()(text) for text in ("it is 42.", "it is 42. Yes")] == ["it is 42.", "it is 42 . Yes"]
    assert Tokenizer13a()("it is 42.") == "it is 42 ."


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(MIXED, MIXED), min_size=1, max_size=5))
def test_bleu_of_any_text_is_the_library_s_over_the_corpus(pairs: list[tuple[str, str]]) -> None:
    from sacrebleu.metrics import BLEU

    library = BLEU(tokenize="zh", effective_order=True)
    answers = [pair[1] for pair in pairs]
    assert scored(pairs).metrics()["bleu"] == pytest.approx(
        library.corpus_score(answers, [[p[0] for p in pairs]]).score
    )


def test_neither_order_nor_sources_change_the_total() -> None:
    whole = scored(PAIRS).metrics()
    shuffled = random.Random(1).sample(PAIRS, len(PAIRS))
    assert scored(shuffled).metrics() == pytest.approx(whole, rel=1e-12)
    parts = {"a.jsonl": scored(PAIRS[:2]), "b.jsonl": scored(PAIRS[2:]), "empty.jsonl": AnswerScores()}
    assert merge_scores(parts).count == len(PAIRS)
    assert merge_scores(parts).metrics() == pytest.approx(whole, rel=1e-12)
    assert parts["a.jsonl"].metrics() == scored(PAIRS[:2]).metrics()  # summing up leaves the parts alone


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_answers() -> None:
    scores = AnswerScores()

    def memory_after(first: int, stop: int) -> int:
        for number in range(first, stop):
            scores.add(f"{number} 北京 " * 20, f"answer {number} " * 20)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = memory_after(0, 50)
        late = memory_after(50, 450)
    finally:
        tracemalloc.stop()
    assert late - early < 40_000  # 400 texts kept would be over 200 kB


def test_transcripts_have_error_rates_and_questions_with_recordings_both() -> None:
    scores = AnswerScores("basic")
    assert scores.add("one two", "One three", is_transcript=True).keys() == {"exact_match", "wer", "cer"}
    both = scores.add("a dog", "a dog.", has_recordings=True)
    assert both["wer"] == 0 and both["rouge1"] == 1 and both["exact_match"] == 0
    scores.add("Paris", "Paris")
    metrics = scores.metrics()
    assert metrics["exact_match"] == pytest.approx(1 / 3)  # of all answers
    assert metrics["rouge1"] == 1.0  # of the two that are no transcripts
    assert (metrics["wer"], metrics["reference_words"]) == (1 / 4, 4)  # of the two to recordings
    parts = {"a": scores, "b": scored([("Paris", "Rome")])}
    merged = merge_scores(parts).metrics()
    assert (merged["wer"], merged["rouge1"], merged["exact_match"]) == (1 / 4, pytest.approx(2 / 3), 1 / 4)
    assert list(merge_scores({"b": parts["b"]}).metrics()) == ["exact_match", *ROUGE, "bleu"]


@pytest.mark.parametrize(
    ("library", "extra"), [("rouge_score.rouge_scorer", "eval"), ("sacrebleu.metrics", "eval"), ("jiwer", "audio")]
)
def test_a_missing_library_is_told_with_the_command(library: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'erniekit\[{extra}\]'"):
        check_libraries(overlap=True, transcripts=True)
    check_libraries(overlap=extra == "audio", transcripts=extra == "eval")  # what is not needed is not asked for


def test_the_libraries_are_imported_only_to_score() -> None:
    libraries = "{'jiwer', 'nltk', 'rapidfuzz', 'rouge_score', 'sacrebleu'}"
    code = f"import sys, erniekit.inference.answer_metrics; sys.exit(bool({libraries} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

from __future__ import annotations

import pytest

from erniekit.data.open_dataset import open_dataset
from erniekit.data.sampler import StepPlan
from erniekit.runners.preview import READ, RESET, TRAINED, render_batch


@pytest.fixture
def shown(tokenizer, template, make_source, tmp_path):
    records = [
        {"system": "Be brief.", "src": ["q1", "q2"], "tgt": ["six apples", "zwei Äpfel 🍎"], "label": [1, 1]},
        {"src": ["q1", "q2"], "tgt": ["unseen", "seen"], "label": [0, 1]},
        {"src": "word " * 30, "tgt": "end"},
    ]
    dataset = open_dataset([make_source(records)], tokenizer, template, max_seq_len=200, cache_dir=tmp_path / "cache")
    plan = StepPlan(
        dataset, max_seq_len=200, packing=True, greedy=False, window=100, batch_size=1, accumulation=1, shuffle=False
    )
    (batch,) = plan.micro_batches(0)
    return lambda **options: render_batch(batch, tokenizer, dataset, **options), dataset


def test_trained_text_is_marked_and_documents_are_kept_apart(shown):
    render, dataset = shown
    lines = render().splitlines()
    path = dataset.sources[0].path
    assert lines[2].startswith("row 0: 3 documents, ")
    assert lines[3].startswith(f"--- document 0: {path}:1, positions 0-")
    assert "\n".join(lines[4:9]) == (
        "<|begin_of_sentence|>Be brief.\nUser: q1\nAssistant: [[six apples</s>]]<|end_of_sentence|>User: q2\n"
        f"Assistant: [[zwei Äpfel 🍎</s>]]\n{lines[8]}"
    )
    assert lines[8].startswith(f"--- document 1: {path}:2, positions {dataset.lengths[0]}-")
    assert lines[8].endswith(f", {dataset.sample(1).labels[dataset.sample(1).labels >= 0].size} targets")
    assert "Assistant: unseen<|end_of_sentence|>User: q2\nAssistant: [[seen</s>]]" in "\n".join(lines)


def test_colours_carry_the_same_text(shown):
    render, _ = shown
    colored = render(color=True)
    assert f"{TRAINED}six apples</s>{RESET}{READ}<|end_of_sentence|>User: q2" in colored
    assert "[[" not in colored


def test_the_number_of_documents_is_limited(shown):
    render, _ = shown
    text = render(documents=1)
    assert text.endswith("--- and 2 more documents")
    assert "unseen" not in text

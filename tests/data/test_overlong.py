"""The characters of dialogues and pairs that are judged without encoding them."""

from __future__ import annotations

import pytest

from erniekit.data.conversation import Conversation, Preference, Turn
from erniekit.data.overlong import character_limit, count_characters, last_rounds


def turns(*texts, trained=()):
    return tuple(
        Turn("assistant" if number % 2 else "user", text, number in trained) for number, text in enumerate(texts)
    )


def test_short_limits_are_those_of_texts_that_are_always_encoded():
    assert character_limit(512) == 1_000_000
    assert character_limit(32_768) == 3_276_800


def test_what_follows_the_last_target_does_not_count():
    dialogue = Conversation(turns("qq", "a", "x" * 50, "y" * 50, trained=(1,)), "sys")
    assert count_characters(dialogue) == 6
    assert last_rounds(dialogue, 6) == dialogue


@pytest.mark.parametrize(("limit", "rounds"), [(100, 3), (12, 3), (11, 2), (8, 2), (7, 1), (4, 1), (3, 0)])
def test_as_many_of_the_last_rounds_as_fit_are_kept(limit, rounds):
    dialogue = Conversation(turns("q1", "a1", "q2", "a2", "q3", "a3", trained=(1, 3, 5)))
    kept = last_rounds(dialogue, limit)
    assert (kept.rounds if kept else 0) == rounds
    assert kept is None or kept.turns == dialogue.turns[6 - 2 * rounds :]


def test_the_answers_of_a_pair_count_and_stay():
    prompt = Conversation(turns("q1", "a1", "q2"), "s")
    pair = Preference(prompt, (Turn("assistant", "good", True),), (Turn("assistant", "bad", True),))
    assert count_characters(pair) == 14
    assert last_rounds(pair, 14) == pair
    assert last_rounds(pair, 13).prompt == Conversation(prompt.turns[2:], "s")
    assert last_rounds(pair, 9) is None

"""Make spoken digits as units of speech, with their words: what the unit quickstart trains on, and the example files.

    python tools/quickstart/make_units.py [--output output/quickstart/units-data] [--first N]
    python tools/quickstart/make_units.py --examples [--check]

No sound is made: a rule says which units a voice says for a digit, as a quantizer of recordings would. A digit is three
phones; a phone has a unit that depends on the voice and on the phone before it, and lasts one to three frames, as the
voice speaks slowly or fast. The same seed gives the same bytes. The files of records, one a line, are

    train.jsonl         3,000 phrases of 1 to 5 digits, each heard and said by one of 6 voices
    eval-hear.jsonl     200 phrases that are in no other file: units -> words
    eval-say.jsonl      the same phrases: words -> units
    ask.jsonl           three of them, heard, without the answer

With --examples the files of examples/data that show the types of records: units with aligned words, spoken dialogues,
and ids that were tokenised elsewhere.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from generated import write_or_check
from make_speech import DIGITS

SEED = 15
VOICES, PHONES, VARIANTS = 6, 20, 5
UNITS = PHONES * VARIANTS  # as added_token_ranges of units.yaml
FRAMES_PER_SECOND = 50
PHONES_OF = {word: ((2 * number) % PHONES, (7 * number + 3) % PHONES, (11 * number + 5) % PHONES)
             for number, word in enumerate(DIGITS)}  # fmt: skip
Phrase = tuple[str, ...]


def units_of(phrase: Phrase, voice: int) -> list[list[int]]:
    """Return the units of each word of a phrase."""
    words, before = [], 0
    for word in phrase:
        units = []
        for phone in PHONES_OF[word]:
            unit = VARIANTS * phone + (voice + before % 2) % VARIANTS
            units += [unit] * (1 + (voice + phone) % 3)
            before = phone
        words.append(units)
    return words


def heard(phrase: Phrase, voice: int) -> dict:
    """Return the record in which a model writes down what it hears."""
    units = [unit for word in units_of(phrase, voice) for unit in word]
    question = {"role": "user", "content": [{"units": units}, {"text": "Which digits?"}]}
    return {"messages": [question, {"role": "assistant", "content": " ".join(phrase)}]}


def said(phrase: Phrase, voice: int) -> dict:
    """Return the record in which a model says a phrase in a voice."""
    units = [unit for word in units_of(phrase, voice) for unit in word]
    question = {"role": "user", "content": f"Voice {voice}: {' '.join(phrase)}"}
    return {"messages": [question, {"role": "assistant", "content": [{"units": units}]}]}


def phrases(generator: random.Random, count: int, shortest: int, known: set[Phrase]) -> list[Phrase]:
    """Return different phrases that are not known yet, and add them to those that are."""
    made: list[Phrase] = []
    while len(made) < count:
        phrase = tuple(generator.choices(DIGITS, k=generator.randint(shortest, 5)))
        if phrase not in known:
            known.add(phrase)
            made.append(phrase)
    return made


def files(first: int | None = None) -> dict[str, list[dict]]:
    """Return the records of each file.

    Args:
        first: at most so many phrases of each.
    """
    generator, known = random.Random(SEED), set[Phrase]()
    held_out = [(phrase, generator.randrange(VOICES)) for phrase in phrases(generator, 200, 3, known)][:first]
    trained = [(phrase, generator.randrange(VOICES)) for phrase in phrases(generator, 3000, 1, known)][:first]
    return {
        "train.jsonl": [make(*each) for each in trained for make in (heard, said)],
        "eval-hear.jsonl": [heard(*each) for each in held_out],
        "eval-say.jsonl": [said(*each) for each in held_out],
        "ask.jsonl": [{"messages": heard(*each)["messages"][:1]} for each in held_out[:3]],
    }


# Example files.


def aligned(phrase: Phrase, voice: int) -> dict:
    """Return units with the words that are said in them, and their times in seconds."""
    units, words = [], []
    for word, own in zip(phrase, units_of(phrase, voice), strict=True):
        start, end = len(units) / FRAMES_PER_SECOND, (len(units) + len(own)) / FRAMES_PER_SECOND
        words.append({"word": word, "start": start, "end": end})
        units += own
    return {"units": units, "words": words, "duration": len(units) / FRAMES_PER_SECOND}


def dialogue(phrase: Phrase, voice: int) -> dict:
    """Return a spoken dialogue of a turn: the agent repeats the last digit."""
    question = [{"units": [unit for word in units_of(phrase, voice) for unit in word]}, {"text": " ".join(phrase)}]
    answer = [{"text": phrase[-1]}, {"units": units_of(phrase[-1:], 0)[0]}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def example_files() -> dict[str, str]:
    generator = random.Random(SEED + 1)
    drawn = [(phrase, generator.randrange(VOICES)) for phrase in phrases(generator, 40, 3, set())]
    records = {
        "units-aligned.jsonl": [aligned(*each) for each in drawn],
        "units-dialogues.jsonl": [dialogue(*each) for each in drawn],
    }
    packs = ["1 " + " ".join(str(generator.randrange(3, 300)) for _ in range(20)) + " 2" for _ in range(40)]
    lines = {name: "".join(f"{json.dumps(each)}\n" for each in made) for name, made in records.items()}
    return {**lines, "token-ids.txt": "".join(f"{' '.join(packs[n : n + 2])}\n" for n in range(0, 40, 2))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--first", type=int, metavar="N", help="at most N phrases of each file")
    parser.add_argument("--examples", action="store_true", help="write the files of examples/data instead")
    parser.add_argument("--check", action="store_true", help="with --examples: compare with the files that are there")
    options = parser.parse_args()
    if options.examples:
        folder = options.output or Path("examples/data")
        return write_or_check({folder / name: text for name, text in example_files().items()}, check=options.check)
    folder = options.output or Path("output/quickstart/units-data")
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files(options.first).items():
        (folder / name).write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
        print(f"{folder / name}: {len(records):,} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make quickstart` and `make quickstart-asr`, `-units` and `-tts`: tiny models, trained on a CPU.

    python tools/quickstart/run.py [text | speech | units | tts]

`text`: what a tiny ERNIE answers before and after it is trained on the shipped data. `speech`: how well a tiny
Qwen2-Audio hears digits, in voices that it was trained on and in others, and a voice that adapters are trained on.
`units`: a tiny ERNIE whose vocabulary grows by units of speech, writes down what it hears, and says what it reads.
`tts`: a tiny model learns to say digits in a voice, and a recogniser writes down what it says.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = "examples/configs/quickstart/sft.yaml"
MODEL = "examples/models/tiny-ernie"
TRAINED = "output/quickstart/sft"
SCORE = "tools/quickstart/score.py"
SPEECH = "output/quickstart/speech"
ASR, ASR_LORA = (f"examples/configs/quickstart/{name}.yaml" for name in ("asr", "asr-lora"))
LISTENER = "output/quickstart/asr"
UNITS, SPEAKER = "examples/configs/quickstart/units.yaml", "output/quickstart/units"
TTS, TTS_CODES = (f"examples/configs/quickstart/{name}.yaml" for name in ("tts", "tts-codes"))
VOICE, SPOKEN = "output/quickstart/voice", "output/quickstart/tts"
PROMPTS = (
    "What is 27 + 15?",
    "Sort 7, 2, 9, 4 in descending order.",
    "Today is Friday, 12 June. What is tomorrow?",
    "Convert 35 km to m.",
)


def run(title: str, *command: str) -> None:
    """Show a command and run it; the quickstart ends where one fails."""
    print(f"\n== {title}\n$ {' '.join(_quoted(word) for word in command)}", flush=True)
    program = {"erniekit": [sys.executable, "-m", "erniekit"], "python": [sys.executable]}[command[0]]
    code = subprocess.run([*program, *command[1:]], check=False).returncode
    if code:
        sys.exit(code)


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


def text() -> str:
    """Train the tiny ERNIE; return the command that goes on from there."""
    run("Before: random weights", "python", SCORE, MODEL, "--random")
    run("Train", "erniekit", "train", CONFIG)
    run("After", "python", SCORE, TRAINED)
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    run("Ask it", "erniekit", "generate", TRAINED, "--temperature", "0", *prompts)
    return f"Talk to it: {program_folder()}/erniekit chat {TRAINED} --temperature 0"


def speech() -> str:
    """Train the tiny listener, then adapters on a voice that it has not heard; return the command that goes on."""
    run("Make recordings", "python", "tools/quickstart/make_speech.py")
    run("Train", "erniekit", "train", ASR)
    run("Voices that it has heard", "erniekit", "eval", ASR)
    run("Voices that it has not heard", "erniekit", "eval", ASR, f"eval_dataset_path={SPEECH}/eval-unseen.jsonl")
    run("A voice that whispers", "erniekit", "eval", ASR, f"eval_dataset_path={SPEECH}/new-voice-eval.jsonl")
    run("Train adapters on that voice", "erniekit", "train", ASR_LORA)
    run("The voice that whispers, with adapters", "erniekit", "eval", ASR_LORA)
    recordings = [f"{SPEECH}/eval-unseen/{number:04d}.flac" for number in range(3)]
    run("Write down recordings", "erniekit", "transcribe", LISTENER, *recordings)
    return f"Let it hear others: {program_folder()}/erniekit transcribe {LISTENER} FILES"


def units() -> str:
    """Train the tiny speaker; return the command that goes on from there."""
    run("Make units of spoken digits", "python", "tools/quickstart/make_units.py")
    run("Train", "erniekit", "train", UNITS)
    run("Held-out phrases: units to words, and words to units", "erniekit", "eval", UNITS, "eval_answers=0")
    greedy = ("--temperature", "0")
    run("Let it write down", "erniekit", "generate", SPEAKER, "--prompts", f"{SPEAKER}-data/ask.jsonl", *greedy)
    run("Let it speak", "erniekit", "generate", SPEAKER, "--prompt", "Voice 2: seven zero four", *greedy)
    return f"Talk to it: {program_folder()}/erniekit chat {SPEAKER} --temperature 0"


def tts() -> str:
    """Train the tiny model that speaks; return the command that goes on from there."""
    held_out = (f"train_dataset_path={VOICE}/eval.jsonl", f"output_dir={SPOKEN}-codes-eval")
    run("Make recordings of a voice, and a codec", "python", "tools/quickstart/make_voice.py")
    run("Codes of the recordings", "erniekit", "codes", TTS_CODES)
    run("Codes of held-out recordings", "erniekit", "codes", TTS_CODES, *held_out)
    run("Train", "erniekit", "train", TTS)
    run("Held-out phrases, spoken and written down", "erniekit", "eval", TTS)
    output = f"{SPOKEN}/three-five-nine.wav"
    run("Speak", "erniekit", "speak", SPOKEN, "--text", "three five nine", "--output", output)
    return f"Listen to {output}. Let it say more: {program_folder()}/erniekit speak {SPOKEN} --text TEXT --output FILE"


def program_folder() -> Path:
    binaries = Path(sys.executable).parent
    return binaries.relative_to(ROOT) if binaries.is_relative_to(ROOT) else binaries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("text", "speech", "units", "tts"), default="text")
    what = parser.parse_args().what
    start = time.monotonic()
    os.chdir(ROOT)
    following = {"text": text, "speech": speech, "units": units, "tts": tts}[what]()
    print(f"\nDone in {time.monotonic() - start:.0f} s. {following}")


if __name__ == "__main__":
    main()

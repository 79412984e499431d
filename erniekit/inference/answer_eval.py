"""Answer held-out dialogues in evaluation, score the answers, and write samples to read."""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.build.checks import TRANSCRIPTS
from erniekit.build.data import audio_inputs
from erniekit.data.conversation import ASSISTANT, Conversation, Preference, Source
from erniekit.data.eval_sampler import source_names
from erniekit.data.formats.format import Record
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.verdicts import UNDESIRABLE
from erniekit.data.media.errors import RecordingError
from erniekit.data.placeholders import EncodedPrompt, encode_prompt_with_clips
from erniekit.data.split import read_part
from erniekit.data.templates.ernie import Template
from erniekit.data.templates.speech import UnitText
from erniekit.data.templates.transcription import DEFAULT_SPEECH, Speech
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.inference.answer_metrics import AnswerScores, check_libraries, merge_scores
from erniekit.inference.audio_prompts import prompt_inputs
from erniekit.inference.generation import answer_requests, length_limit, make_request
from erniekit.inference.sampling import Sampling
from erniekit.model.decoder import Decoder
from erniekit.training.callbacks.files import SAMPLES_FILE
from erniekit.training.evaluation import ExtraMetrics
from erniekit.training.objectives.reference import eval_mode

logger = logging.getLogger(__name__)

THOUGHTS_END = "</think>"
MAX_RUNNING = 16  # dialogues that are answered side by side: bounds the memory of keys and values
ASKED = 8 * MAX_RUNNING  # dialogues that are read before they are answered


@dataclass(frozen=True)
class EvalPrompt:
    """A held-out dialogue up to the answer that is scored."""

    location: str  # file:line
    dialogue: Conversation
    expected: str
    thoughts: str = ""  # that precede the expected answer


class GeneratedAnswer(NamedTuple):
    """The model's answer, and whether it was cut off."""

    text: str
    cut: bool


class GenerationEvaluator:
    """Answers the same dialogues at every evaluation.

    Decoding is greedy, so that answers do not depend on the batch. An answer that does not end by itself is cut after
    twice the tokens of the expected answer plus 16. A longer one would only score lower, so the number of cut answers
    is reported.

    Args:
        sources: files of dialogues or pairs.
        count: number of dialogues per file, spread over it; -1: all.
        samples: the file to write.
        normalizer: what transcripts are compared after: a value of `text_normalizer`.
        speech: how units of speech stand in answers.

    Raises:
        ConfigurationError: a library that scores answers is not installed.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        template: Template,
        count: int,
        samples: Path,
        normalizer: str = "none",
        speech: Speech = DEFAULT_SPEECH,
    ) -> None:
        asked = [source for source in sources if source.probability > 0]
        kinds = {source.kind for source in asked}
        check_libraries(overlap=kinds != {TRANSCRIPTS}, transcripts=TRANSCRIPTS in kinds)  # before the first evaluation
        self._sources = dict(zip(source_names([str(source.path) for source in asked]), asked, strict=True))
        self._tokenizer, self._template, self._count = tokenizer, template, count
        self._path, self._normalizer, self._speech = samples, normalizer, speech
        self._unit_tokens = UnitText(tokenizer, speech.unit_token)

    def __call__(self, decoder: Decoder) -> ExtraMetrics:
        """Answer every dialogue, write it with its answer and scores to `samples` as JSON lines, and return the
        metrics."""
        scores: dict[str, AnswerScores] = {}
        cut = skipped = 0
        with eval_mode(decoder), open(self._path, "w", encoding="utf-8") as file:
            for name, source in self._sources.items():
                own = scores[name] = AnswerScores(self._normalizer)
                eval_prompts = _select_eval_prompts(source, self._count, self._speech)
                while block := list(islice(eval_prompts, ASKED)):
                    fitting = [
                        (eval_prompt, prompt) for eval_prompt in block if (prompt := self._prompt(decoder, eval_prompt))
                    ]
                    skipped += len(block) - len(fitting)
                    for (eval_prompt, _), answer in zip(fitting, self._answers(decoder, fitting), strict=True):
                        own_scores = _score(own, eval_prompt, answer)
                        line = _sample(eval_prompt, answer, own_scores, self._speech.unit_token)
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                        cut += answer.cut
        merged = merge_scores(scores).metrics()
        if self._normalizer != "none" and merged and "wer" not in merged:
            logger.info(f"text_normalizer {self._normalizer} has no effect: no question that was asked has a recording")
        metrics = merged | {"answers": float(sum(part.count for part in scores.values()))}
        if cut:
            metrics["answers_cut"] = float(cut)
        if skipped:
            metrics["answers_skipped"] = float(skipped)  # no room for an answer, or a recording that cannot be read
        return ExtraMetrics(metrics, {name: part.metrics() for name, part in scores.items()})

    def _prompt(self, decoder: Decoder, eval_prompt: EvalPrompt) -> EncodedPrompt | None:
        """Return a dialogue encoded; None if it leaves no room for an answer, or if a recording cannot be read, which
        was told when the dataset was opened."""
        try:
            prompt = encode_prompt_with_clips(
                self._template, self._tokenizer, eval_prompt.dialogue, audio_inputs(decoder.config)
            )
        except RecordingError:
            return None
        return prompt if 0 < len(prompt.ids) < length_limit(decoder, None) else None

    def _answers(self, decoder: Decoder, asked: Sequence[tuple[EvalPrompt, EncodedPrompt]]) -> list[GeneratedAnswer]:
        expected = self._tokenizer.encode_batch([f"{each.thoughts}{each.expected}" for each, _ in asked])
        limits = [2 * len(tokens) + 16 for tokens in expected]
        inputs, stops = audio_inputs(decoder.config), tuple(self._template.stop_token_ids)
        requests = [
            make_request(
                decoder,
                prompt.ids,
                Sampling(limit + 1, stop_token_ids=stops),  # one more, to tell a cut answer from one that ends there
                number,
                prompt_inputs(prompt, inputs),
            )
            for number, ((_, prompt), limit) in enumerate(zip(asked, limits, strict=True))
        ]
        answers = answer_requests(decoder, requests, max_running=MAX_RUNNING)
        return [
            GeneratedAnswer(self._unit_tokens.decode(tokens[:limit]), cut=len(tokens) > limit)
            for tokens, limit in zip(answers, limits, strict=True)
        ]


def read_samples(output_dir: Path, count: int) -> list[dict[str, Any]]:
    """Return the first samples of the last evaluation."""
    with open(output_dir / SAMPLES_FILE, encoding="utf-8") as file:
        return [json.loads(line) for line in islice(file, count)]


def worst_transcripts(output_dir: Path, count: int) -> list[dict[str, Any]]:
    """Return the samples of the last evaluation with the highest word error rates above 0, the worst first."""
    with open(output_dir / SAMPLES_FILE, encoding="utf-8") as file:
        wrong = (sample for line in file if (sample := json.loads(line)).get("wer"))
        return heapq.nlargest(count, wrong, key=lambda sample: sample["wer"])


def _select_eval_prompts(source: Source, count: int, speech: Speech) -> Iterator[EvalPrompt]:
    """Yield `count` dialogues, evenly spread over the file."""
    if count < 0:
        yield from _read_eval_prompts(source, speech)
        return
    available = sum(1 for _ in _read_eval_prompts(source, speech))
    for number, eval_prompt in enumerate(_read_eval_prompts(source, speech)):
        if number * count // available != (number + 1) * count // available or count >= available:
            yield eval_prompt


def _read_eval_prompts(source: Source, speech: Speech) -> Iterator[EvalPrompt]:
    for item in read_part(source):
        if isinstance(item, RecordProblem):  # skipped; the dataset was opened before, and has said so
            continue
        line, record = item
        eval_prompt = _eval_prompt_from(f"{source.path}:{line}", record, speech)
        if eval_prompt is not None:
            yield eval_prompt


def _eval_prompt_from(location: str, record: Record, speech: Speech) -> EvalPrompt | None:
    """Return the last trained answer of a dialogue or the chosen answer of a pair as a prompt; None for plain text,
    and for an answer that its verdict calls undesirable."""
    if isinstance(record, Preference) and not record.rejected and record.score_difference == UNDESIRABLE:
        return None
    if isinstance(record, Preference):
        return EvalPrompt(location, record.prompt, record.chosen[0].written(speech.unit_token))
    if not isinstance(record, Conversation):
        return None
    turns = record.turns
    last = max(number for number, turn in enumerate(turns) if turn.role == ASSISTANT and turn.trained)
    dialogue = replace(record, turns=turns[:last])
    return EvalPrompt(location, dialogue, turns[last].written(speech.unit_token, speech.between), turns[last].thoughts)


def _score(scores: AnswerScores, eval_prompt: EvalPrompt, answer: GeneratedAnswer) -> dict[str, float]:
    dialogue = eval_prompt.dialogue
    return scores.add(
        eval_prompt.expected,
        _scored(eval_prompt, answer),
        is_transcript=dialogue.transcribes,
        has_recordings=bool(dialogue.clips),
    )


def _scored(eval_prompt: EvalPrompt, answer: GeneratedAnswer) -> str:
    """Return what is compared with the expected answer: what the model says after its thoughts."""
    return answer.text if THOUGHTS_END in eval_prompt.expected else answer.text.rpartition(THOUGHTS_END)[2].lstrip()


def _sample(
    eval_prompt: EvalPrompt, answer: GeneratedAnswer, scores: dict[str, float], unit_token: str
) -> dict[str, Any]:
    dialogue = eval_prompt.dialogue
    messages = [{"role": turn.role, "content": turn.written(unit_token)} for turn in dialogue.turns]
    system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    return {
        "place": eval_prompt.location,
        "messages": system + messages,
        **({"audios": [clip.path for clip in dialogue.clips]} if dialogue.clips else {}),
        "expected": eval_prompt.expected,
        "answer": answer.text,
        **({"cut": True} if answer.cut else {}),
        **{name: round(value, 4) for name, value in scores.items()},
    }

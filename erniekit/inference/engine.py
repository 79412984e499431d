"""A model with its tokenizer and chat template that answers prompts, for `generate`, `chat` and scoring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import paddle

from erniekit.build.checks import answering_folders, tokenizer_folder, warn_of_unused_variables
from erniekit.build.data import audio_inputs
from erniekit.build.quantization import base_of_adapters
from erniekit.build.tokenizer import warn_of_unused_request
from erniekit.config.sections.generation import GenerationParameters
from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.media.audio_batch import read_placed
from erniekit.data.media.clip import AudioInputs, Clip, ContentClip
from erniekit.data.placeholders import EncodedPrompt, encode_prompt_with_clips
from erniekit.data.templates.ernie import Template, chat_template
from erniekit.data.templates.speech import UnitText
from erniekit.data.templates.spoken import SpokenTemplate
from erniekit.data.templates.transcription import DEFAULT_REQUEST, DEFAULT_SPEECH, Request, Speech
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import DataError, ModelFileError
from erniekit.export.saved_program import SavedProgram
from erniekit.export.trained_model import ignored_config_keys, run_parameters
from erniekit.inference.audio_prompts import ReadClip, prompt_audio, prompt_inputs
from erniekit.inference.decoding.scheduler import MAX_RUNNING
from erniekit.inference.generation import Audio, TextModel, answer_requests, length_limit, make_request, stream
from erniekit.inference.sampling import Sampling
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE
from erniekit.model.lora.score import scored_by_adapters
from erniekit.model.quantization.settings import WeightOnly
from erniekit.model.storage.model_folder import is_program_folder

logger = logging.getLogger(__name__)


def sampling_from(parameters: GenerationParameters, seed: int) -> Sampling:
    """Return the sampling settings of the generation parameters."""
    return Sampling(
        max_new_tokens=parameters.max_new_tokens,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=parameters.top_k,
        repetition_penalty=parameters.repetition_penalty,
        seed=seed,
        max_length=parameters.max_model_len,
    )


@dataclass(frozen=True)
class ChatModel:
    """A decoder or an exported program, with its tokenizer and chat template.

    Attributes:
        audio: what the model's encoder takes of recordings; None: it has none.
        request: how transcripts are asked for.
        speech: how units of speech stand in dialogues.
    """

    decoder: TextModel
    tokenizer: Tokenizer
    template: Template
    audio: AudioInputs | None = None
    request: Request = DEFAULT_REQUEST
    speech: Speech = DEFAULT_SPEECH

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        adapters: Path | None = None,
        random_weights: bool = False,
        seed: int = 42,
        ignored_keys: Sequence[str] = (),
        template_variables: Mapping[str, Any] | None = None,
        quantization: WeightOnly | None = None,
        asr_prompt: str | None = None,
        speech: Speech | None = None,
    ) -> ChatModel:
        """Load a model folder, an `output_dir` or a checkpoint; a folder of adapters together with its base model; or
        an exported program.

        Args:
            adapters: a folder of adapters for the model in `folder`.
            ignored_keys: keys of `config.json` that change nothing, beside those that the adapters' run was told of.
            template_variables: variables of the chat template, such as `enable_thinking`.
            quantization: how linear weights are kept in few bits; None: as they are stored, and under adapters as in
                their training.
            asr_prompt: the words that ask for a transcript; None: those of the run that trained the model, from which
                the language comes in any case.
            speech: how units of speech stand in dialogues; None: as in the run that trained the model.

        Raises:
            ModelFileError: a folder or one of its files is missing or damaged.
        """
        if is_program_folder(folder):
            return cls._open_program(folder, adapters, quantization, template_variables or {})
        folder, adapters = answering_folders(folder, adapters)
        tokenizer = load_tokenizer(tokenizer_folder(folder, adapters))
        weights = None if random_weights else folder
        run = run_parameters(adapters) if adapters else {}
        base = base_of_adapters(run) if adapters else None
        quantization = base or quantization
        config = ModelConfig.from_folder(folder, (*ignored_keys, *ignored_config_keys(run)))
        if config.architecture.codes is not None:
            raise ModelFileError(
                f"{folder}: the model writes codes of speech and no text\n"
                f"  Let it speak: erniekit speak {folder} --text TEXT"
            )
        if scored_by_adapters(config, adapters, ADAPTER_CONFIG_FILE).scored:
            raise ModelFileError(
                f"{folder}: is a reward model, which gives answers a score and writes none\n"
                f"  Let it judge answers: erniekit score {folder} DATA.jsonl"
            )
        mapped = adapters is None and quantization is None
        decoder = build_model(config, weights, adapters=adapters, seed=seed, quantization=quantization, mapped=mapped)
        decoder.eval()  # once, and not in every step
        audio = audio_inputs(config)
        request = DEFAULT_REQUEST if audio is None else trained_request(adapters or folder)
        if asr_prompt is not None:
            request = replace(request, prompt=asr_prompt)
        if speech is None:
            speech = trained_speech(adapters or folder)
        template = chat_template(tokenizer, template_variables, request, speech)
        warn_of_unused_variables(template, template_variables or {})
        if asr_prompt is not None:
            warn_of_unused_request(template, request)
        return cls(decoder, tokenizer, template, audio, request, speech)

    @classmethod
    def _open_program(
        cls,
        folder: Path,
        adapters: Path | None,
        quantization: WeightOnly | None,
        template_variables: Mapping[str, Any],
    ) -> ChatModel:
        for what, given in (("adapters", adapters), ("quantization", quantization)):
            if given is not None:
                raise ModelFileError(
                    f"{folder}: is an exported program, which takes no {what}.\n"
                    "  Name the trained model instead, or export it with them: erniekit export MODEL --output DIR"
                )
        if paddle.get_device() != "cpu":
            logger.info(f"{folder}: exported programs run on the CPU here, whatever the device")
        tokenizer = load_tokenizer(folder)
        template = chat_template(tokenizer, template_variables)
        warn_of_unused_variables(template, template_variables)
        return cls(SavedProgram.open(folder), tokenizer, template)

    def answer(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        *,
        system: str = "",
        raw: bool = False,
        clips: Sequence[Clip] = (),
    ) -> list[str]:
        """Return one answer for each prompt; sampling depends on a prompt's index in the list, not on the other
        prompts.

        Args:
            raw: continue the texts as they are, without the chat template.
            clips: recordings that stand before each text; where that is empty, the one recording is transcribed.

        Raises:
            UserError: a prompt is empty, too long, or not UTF-8; or a recording cannot be read.
        """
        encoded = [
            self.encode_text(prompt) if raw else self.encode(_question(prompt, clips, system)) for prompt in prompts
        ]
        return self.answer_encoded(encoded, sampling, range(len(encoded)))

    def answer_encoded(
        self,
        encoded: Sequence[EncodedPrompt],
        sampling: Sampling,
        streams: Sequence[int],
        report: Callable[[int], None] = lambda done: None,
    ) -> list[str]:
        """Return one answer for each encoded prompt.

        Args:
            streams: the number of each prompt's stream of random draws.
            report: called now and then with the number of prompts answered.

        Raises:
            UserError: a prompt is empty or too long, or one of its recordings cannot be read.
        """
        answers = self.answer_batch(encoded, sampling, streams, report=report)
        return [self.decode(tokens) for tokens in answers]

    def answer_batch(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: Sampling,
        streams: Sequence[int] | None = None,
        *,
        limits: Sequence[int] | None = None,
        read: ReadClip = read_placed,
        max_running: int = MAX_RUNNING,
        report: Callable[[int], None] = lambda done: None,
    ) -> list[list[int]]:
        """Return the token ids of the answer to each prompt.

        Args:
            streams: the number of each prompt's stream of random draws; None: its index.
            limits: the most tokens of each answer; None: `max_new_tokens` of `sampling`.
            read: returns the sound of a clip, which is read when its prompt's turn has come.
            max_running: how many prompts are answered side by side.
            report: called after every `max_running` answers, and after the last one, with their number.
        """
        ids = [prompt.ids for prompt in prompts]
        numbers = range(len(prompts)) if streams is None else streams
        lengths = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        settings = [replace(self.with_stop_tokens(sampling), max_new_tokens=length) for length in lengths]
        sounds = [prompt_inputs(prompt, self.audio, read) for prompt in prompts]
        spoken = isinstance(self.template, SpokenTemplate)

        def answered(done: int) -> None:
            if not spoken and (done % max_running == 0 or done == len(prompts)):
                report(done)

        requests = [make_request(self.decoder, *each) for each in zip(ids, settings, numbers, sounds, strict=True)]
        answers = answer_requests(self.decoder, requests, max_running=max_running, report=answered)
        if spoken:
            answers = self._with_spoken_answers(ids, answers, settings, numbers, max_running)
            report(len(answers))
        return answers

    def _with_spoken_answers(
        self,
        prompts: Sequence[list[int]],
        answers: list[list[int]],
        settings: Sequence[Sampling],
        numbers: Sequence[int],
        max_running: int,
    ) -> list[list[int]]:
        """Return the answers, those that are transcripts with the spoken answer that follows, as far as there is room.

        Training skips the header between the two, so the model does not write it.
        """
        begun = [
            [*answer, *self.continuation(prompt, answer, sampling)]
            for prompt, answer, sampling in zip(prompts, answers, settings, strict=True)
        ]
        rows = [row for row, answer in enumerate(answers) if len(begun[row]) > len(answer)]
        requests = [
            make_request(self.decoder, [*prompts[row], *begun[row]], settings[row], numbers[row]) for row in rows
        ]
        for row, rest in zip(rows, answer_requests(self.decoder, requests, max_running=max_running), strict=True):
            answers[row] = [*begun[row], *rest]
        return answers

    def continuation(self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> list[int]:
        """Return the tokens between a transcript and the answer to it; none where the answer is not a transcript that
        has come to its end, or nothing more has room."""
        if not isinstance(self.template, SpokenTemplate) or len(answer) >= sampling.max_new_tokens:
            return []
        header = self.template.continuation(prompt, answer)
        fits = len(prompt) + len(answer) + len(header) < length_limit(self.decoder, sampling.max_length)
        return header if fits else []

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, in which units of speech are written as their tokens."""
        return self._units.decode(tokens)

    @cached_property
    def _units(self) -> UnitText:
        return UnitText(self.tokenizer, self.speech.unit_token)

    def encode_text(self, text: str) -> EncodedPrompt:
        """Return the token ids of a text without the chat template; control tokens in it are ordinary text.

        They begin with what the tokenizer puts before a text (nothing, or BOS).

        Raises:
            DataError: it is not UTF-8.
        """
        _check_utf8(text)
        self._tell_of_control_tokens(text)
        ids = self.tokenizer.encode(self.tokenizer.plain_text(text))
        return EncodedPrompt([*self.tokenizer.document_prefix, *ids] if ids else [])

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        """Return the token ids of a dialogue, ending with the header of the next answer, and its recordings.

        Raises:
            DataError: a text is not UTF-8; a recording cannot be read, or the model has no encoder for it; or the
                template refuses the dialogue.
        """
        if conversation.clips and isinstance(self.decoder, SavedProgram):
            name = conversation.clips[0].path
            raise DataError(f"{name}: an exported program reads text only; name the trained model in its place")
        for text in (conversation.system, *(turn.content for turn in conversation.turns)):
            _check_utf8(text)
        self._tell_of_control_tokens(conversation.turns[-1].content)
        return encode_prompt_with_clips(self.template, self.tokenizer, conversation, self.audio)

    def stream(self, prompt: EncodedPrompt, sampling: Sampling, number: int = 0) -> Iterator[str]:
        """Yield the answer to an encoded prompt in pieces of text, each as soon as it is complete.

        Args:
            number: of the stream of random draws (see `inference.generation.stream`).
        """
        ids: list[int] = []
        shown = ""
        audio = prompt_audio([prompt], self.audio)
        for token in self._tokens(prompt.ids, self.with_stop_tokens(sampling), number, audio):
            ids.append(token)
            text = self._units.decode(ids)
            if not text.endswith("\ufffd"):  # a character may take several tokens
                yield text[len(shown) :]
                shown = text
        rest = self._units.decode(ids)[len(shown) :]
        if rest:
            yield rest

    def _tokens(self, prompt: list[int], sampling: Sampling, number: int, audio: Audio) -> Iterator[int]:
        """Yield the tokens of an answer, and where it is a transcript those of the spoken answer behind it."""
        answer: list[int] = []
        for token in stream(self.decoder, prompt, sampling, number, audio):
            answer.append(token)
            yield token
        if header := self.continuation(prompt, answer, sampling):
            yield from header
            yield from stream(self.decoder, [*prompt, *answer, *header], sampling, number)

    def with_stop_tokens(self, sampling: Sampling) -> Sampling:
        """Return sampling that ends answers at the template's stop tokens, too."""
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *self.template.stop_token_ids))

    def _tell_of_control_tokens(self, text: str) -> None:
        token = self.tokenizer.find_control_token(text)
        if token is not None:
            logger.info(f"the text contains {token}; it is read as ordinary text, not as the model's control token")


def _question(text: str, clips: Sequence[Clip] = (), system: str = "") -> Conversation:
    """Return a user's message with recordings before its text; a recording without a text is to be transcribed."""
    turn = Turn(USER, text, clips=tuple(ContentClip(0, clip) for clip in clips))
    return Conversation((turn,), system, transcribes=bool(clips) and not text)


def trained_request(folder: Path) -> Request:
    """Return how the run that wrote a folder asked for transcripts; the default if that is unknown."""
    known = run_parameters(folder)
    prompt = known.get("asr_prompt") or DEFAULT_REQUEST.prompt
    return Request(str(prompt), str(known.get("asr_language") or ""))


def trained_speech(folder: Path) -> Speech:
    """Return how units of speech stood in the dialogues of the run that wrote a folder; the default if unknown."""
    known = run_parameters(folder)
    names = ("unit_token", "correspond_token", "dialogue_template")
    return Speech(**{name: str(known[name]) for name in names if known.get(name)})


def _check_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python reads a foreign byte as a lone surrogate
        raise DataError(
            f"the text is not UTF-8 (character {error.start + 1}); convert it, or set the terminal to UTF-8"
        ) from None


@dataclass
class Dialogue:
    """A conversation that continues, and forgets its oldest rounds when it grows too long.

    Attributes:
        replies: number of replies begun; each draws from its own random stream.
    """

    model: ChatModel
    max_model_len: int
    conversation: Conversation
    replies: int = 0

    @classmethod
    def start(cls, model: ChatModel, *, system: str = "", max_model_len: int | None = None) -> Dialogue:
        return cls(model, length_limit(model.decoder, max_model_len), Conversation((), system))

    def reply(self, message: str, sampling: Sampling, clips: Sequence[Clip] = ()) -> Iterator[str]:
        """Yield the answer to the user's next message in pieces. It becomes part of the dialogue once it is complete.

        Args:
            clips: recordings that stand before the message.

        Raises:
            DataError: the message alone leaves no room for an answer, or a recording cannot be read.
        """
        question = _question(message, clips, self.conversation.system)
        asked = replace(question, turns=(*self.conversation.turns, *question.turns))
        prompt = self.model.encode(asked)
        while len(prompt.ids) >= self.max_model_len and len(asked.turns) > 1:
            asked = asked.drop_oldest_rounds(1)
            prompt = self.model.encode(asked)
        if len(prompt.ids) >= self.max_model_len:
            raise DataError(
                f"the message has {len(prompt.ids):,} tokens and max_model_len is {self.max_model_len:,}; shorten it"
            )
        number, pieces = self.replies, []
        self.replies += 1
        for piece in self.model.stream(prompt, replace(sampling, max_length=self.max_model_len), number):
            pieces.append(piece)
            yield piece
        self.conversation = Conversation((*asked.turns, Turn(ASSISTANT, "".join(pieces))), asked.system)

"""The one renderer of dialogues, for training, preview, evaluation and chat.

A template turns a conversation into segments, and each segment is tokenised on its own: an assistant's answer with its
end-of-turn token is one segment, whatever stands between two answers another. So the tokens of a training sample are
exactly those that chat feeds: the prompt's, then the answer's. They do not depend on which turns are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from erniekit.data.conversation import Conversation
from erniekit.data.media.clip import PlacedClip
from erniekit.data.templates.transcription import DEFAULT_REQUEST, DEFAULT_SPEECH, Request, Speech
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import ConfigurationError, DataError, ModelFileError

if TYPE_CHECKING:  # `erniekit validate` checks templates without NumPy
    import numpy as np

IGNORE_INDEX = -100
TEMPLATE_FILE = Path(__file__).with_name("ernie.jinja")
WRITTEN = ("User: ", "\nAssistant: ")  # by that template, beside contents and control tokens
TEMPLATE_FOR_OTHERS = Path(__file__).with_name("chat_template.jinja")  # the same format, as other programs render it


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of text that is tokenised on its own; the tokens of a trained one are targets.

    Attributes:
        ends_turn: whether an answer ends with it; a part of one may be followed by others.
        select: of a trained one, says of its token ids which are targets; None: all.
    """

    text: str
    trained: bool
    ends_turn: bool = True
    select: Callable[[Sequence[int]], Sequence[bool]] | None = None


class PairOffsets(NamedTuple):
    """Where in a sample the two answers of a pair begin, and their scores' difference (NaN where there is none)."""

    chosen: int
    rejected: int
    score_difference: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One document, or a prompt with several answers. labels[i] is the token that position i should predict, or -100.

    Attributes:
        input_ids, labels: int32[n].
        pair: None for a document.
        answers: where the answers to one prompt begin, each of which sees the prompt and itself; () for one document,
            and for a pair, which says it itself.
        arrays: further values of the n positions, by the name of their array in a batch (`data.batch.ARRAY_SPECS`).
        clips: the recordings whose placeholder tokens are among the positions, in their order.
        words: of a record that is interleaved anew in each epoch (`data.interleave`), whose labels are then empty;
            int32[words, 3].
        documents: where further documents begin, which see nothing of those before them; () for one document. A pair
            whose answers do not share their prompt has a second one, which is the prompt again with its rejected
            answer.
        causal: whether a position sees only those up to itself; otherwise all of its document.
        seconds: the length of its sound, where that is there as codes.
        spoken: of a recording as codes, from which an epoch draws its samples, what `drawing.SpokenFacts` reads:
            int32[SPOKEN_NUMBERS]; its labels are then empty.
        codes: of such a recording, where they do not lie in a shard: uint16[C, T].
    """

    input_ids: np.ndarray
    labels: np.ndarray
    pair: PairOffsets | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    clips: tuple[PlacedClip, ...] = ()
    documents: tuple[int, ...] = ()
    words: np.ndarray | None = None
    causal: bool = True
    seconds: float = 0.0
    spoken: np.ndarray | None = None
    codes: np.ndarray | None = None
    answers: tuple[int, ...] = ()


class TemplateRefusedError(DataError):
    """A template will not render a dialogue, for example because it wants no system text."""


class RewritesTurnsError(TemplateRefusedError):
    """A template renders earlier turns in another way than the last one, so only one answer of a sample is trained."""


class Template(Protocol):
    """What the rest of the project asks of a template.

    Attributes:
        stop_token_ids: generation ends at any of these.
        end_of_turn_target: the label that takes the place of a trained answer's last token; None leaves it as it is.
        fingerprint: changes when the rendered text could.
        variable_names: the variables that it expects, see `chat_template`.
    """

    variable_names: Set[str]
    stop_token_ids: tuple[int, ...]
    end_of_turn_target: int | None
    fingerprint: str

    def render(self, conversation: Conversation) -> list[Segment]:
        """Return the dialogue; where it ends with a user turn, up to and with the header of the answer to come.

        Raises:
            TemplateRefusedError: it will not render this dialogue.
        """
        ...

    def render_many(self, conversations: Sequence[Conversation]) -> list[list[Segment] | TemplateRefusedError]:
        """Return what `render` returns or raises for each of them."""
        ...


class ErnieTemplate:
    """ERNIE-4.5's dialogue format, which ernie.jinja describes.

    In training the label at the end of an answer is `</s>`, at which generation stops; the token read there, when the
    dialogue goes on, is `<|end_of_sentence|>`.
    """

    BEGIN, END = "<|begin_of_sentence|>", "<|end_of_sentence|>"
    variable_names: Set[str] = frozenset()

    def __init__(self, tokenizer: Tokenizer, speech: Speech = DEFAULT_SPEECH) -> None:
        from erniekit.data.templates.speech import UnitText  # speech.py imports this module

        refuse_tokens_in(WRITTEN, tokenizer, "ERNIE-4.5's dialogues")
        end_id = tokenizer.token_id(self.END)
        if end_id is None or tokenizer.token_id(self.BEGIN) is None:
            raise ModelFileError(f"the tokenizer lacks {self.BEGIN} or {self.END}, which ERNIE-4.5's dialogues need")
        self.end_of_turn_target: int | None = tokenizer.eos_id
        self.stop_token_ids = tuple(dict.fromkeys((tokenizer.eos_id, end_id)))
        self._tokenizer = tokenizer
        self._units = UnitText(tokenizer, speech.unit_token)
        self.fingerprint = f"ernie-4.5{speech.key}"

    @cached_property
    def _render(self) -> Callable[[Conversation], list[Segment]]:  # `erniekit validate` renders nothing
        from erniekit.data.templates.jinja import marked_segments  # jinja.py imports this module

        return marked_segments(TEMPLATE_FILE.read_text(encoding="utf-8"), self._tokenizer, self._units)

    def render(self, conversation: Conversation) -> list[Segment]:
        if conversation.uses_tools:
            raise TemplateRefusedError(
                "tools or tool calls, for which ERNIE-4.5's dialogue format has no place: put a chat_template.jinja "
                "that takes tools into the model's folder (the Thinking models bring one), or remove these records"
            )
        if conversation.clips or conversation.transcribes:
            raise TemplateRefusedError("recordings, for which ERNIE-4.5's dialogue format has no place: remove them")
        if any(turn.thoughts for turn in conversation.turns):
            raise TemplateRefusedError(
                "reasoning_content, for which ERNIE-4.5's dialogue format has no place: write the thoughts into the "
                "answer's text, between <think> and </think>, or put a chat_template.jinja that takes "
                "reasoning_content into the model's folder"
            )
        return self._render(conversation)

    def render_many(self, conversations: Sequence[Conversation]) -> list[list[Segment] | TemplateRefusedError]:
        return rendered_or_refused(self, conversations)


def rendered_or_refused(
    template: Template, conversations: Sequence[Conversation]
) -> list[list[Segment] | TemplateRefusedError]:
    """Return what `template.render` returns or raises for each conversation."""
    results: list[list[Segment] | TemplateRefusedError] = []
    for conversation in conversations:
        try:
            results.append(template.render(conversation))
        except TemplateRefusedError as error:
            results.append(error)
    return results


def refuse_tokens_in(written: Iterable[str], tokenizer: Tokenizer, whose: str) -> None:
    """Raise ConfigurationError if what a template writes holds an added token, which would change every dialogue."""
    found = next((token for token in sorted(tokenizer.text_tokens) for text in written if token in text), None)
    if found is not None:
        raise ConfigurationError(
            f"added_tokens: {found!r} is written by the template of {whose}, whose tokens would change\n"
            "  Write another text."
        )


def chat_template(
    tokenizer: Tokenizer,
    variables: Mapping[str, Any] | None = None,
    request: Request = DEFAULT_REQUEST,
    speech: Speech = DEFAULT_SPEECH,
) -> Template:
    """Return the template of a model: the jinja one of its folder; or, if the folder has none, ERNIE-4.5's own, or that
    of Mistral's models with a Tekken vocabulary.

    A jinja template that renders as ERNIE-4.5 does is replaced by ERNIE-4.5's own, which also knows the `</s>` label.

    Args:
        variables: further variables of a jinja template, such as `enable_thinking`.
        request: how transcripts are asked for.
        speech: how units of speech are written, and whether the spoken-dialogue template takes the place of others.

    Raises:
        ConfigurationError: the template writes an added token.
        ModelFileError: no template is there and the tokenizer is not one of these, or the jinja text is broken.
        DataError: the jinja template cannot be used for training (see JinjaTemplate).
    """
    if speech.dialogue_template != DEFAULT_SPEECH.dialogue_template:
        from erniekit.data.templates.spoken import SpokenTemplate  # spoken.py imports this module

        return SpokenTemplate(tokenizer, speech)
    ernie = (
        ErnieTemplate(tokenizer, speech)
        if {ErnieTemplate.BEGIN, ErnieTemplate.END} <= tokenizer.control_tokens
        else None
    )
    if not tokenizer.chat_templates:
        if ernie is not None:
            return ernie
        if tokenizer.tekken_version is None:
            raise ModelFileError(
                "the model's folder has no chat template and its tokenizer is not ERNIE-4.5's: put the template into "
                "chat_template.jinja in that folder; for spoken dialogues, dialogue_template: spoken needs none"
            )
        from erniekit.data.templates.mistral import MistralTemplate  # mistral.py imports this module

        return MistralTemplate(tokenizer, request, speech)
    from erniekit.data.templates.jinja import JinjaTemplate, renders_identically

    jinja_template = JinjaTemplate(tokenizer, variables, request, speech)
    if ernie is None or jinja_template.takes_tools or jinja_template.takes_thoughts or jinja_template.takes_audio:
        return jinja_template
    return ernie if renders_identically(jinja_template, ernie) else jinja_template


def published_files(tokenizer: Tokenizer) -> tuple[Path, ...]:
    """Return the files that belong into the folder of a trained model: the tokenizer's, and ERNIE-4.5's chat template
    where dialogues of that format were trained and the folder has no template, so that other programs render it."""
    is_ernie = {ErnieTemplate.BEGIN, ErnieTemplate.END} <= tokenizer.control_tokens
    added = () if tokenizer.chat_templates or not is_ernie else (TEMPLATE_FOR_OTHERS,)
    return (*tokenizer.files, *added)


def encode_sample(template: Template, tokenizer: Tokenizer, conversation: Conversation) -> Sample:
    """A training sample: the dialogue's tokens up to its last target, with the labels already shifted.

    Nothing after the last target can change the loss, so it is left out.
    """
    segments = template.render(conversation)
    return assemble(segments, tokenizer.encode_batch([segment.text for segment in segments]), template)


def encode_prompt(template: Template, tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The ids to generate from: the same ids that training has before the answer to the last (user) turn."""
    segments = template.render(conversation.untrained())
    encoded = tokenizer.encode_batch([segment.text for segment in segments])
    return [token for ids in encoded for token in ids]


def assemble(segments: Iterable[Segment], encoded: Sequence[Sequence[int]], template: Template) -> Sample:
    """Join encoded segments into a sample. Targets are marked by position, so a token's id never decides."""
    import numpy as np

    tokens, targets = join_segments(segments, encoded, template)
    length = length_to_last_target(targets)
    return Sample(np.array(tokens[: max(0, length - 1)], dtype=np.int32), np.array(targets[1:length], dtype=np.int32))


def length_to_last_target(targets: Sequence[int]) -> int:
    """The number of tokens up to and with the last target; 0 where there is none."""
    length = len(targets)
    while length and targets[length - 1] == IGNORE_INDEX:
        length -= 1
    return length


def join_segments(
    segments: Iterable[Segment], encoded: Sequence[Sequence[int]], template: Template
) -> tuple[list[int], list[int]]:
    """The tokens of segments, and beside each token itself where it is a target (or `end_of_turn_target`), or -100."""
    tokens: list[int] = []
    targets: list[int] = []
    for segment, ids in zip(segments, encoded, strict=True):
        tokens += ids
        if segment.trained and ids:
            chosen = [True] * len(ids) if segment.select is None else segment.select(ids)
            targets += [token if target else IGNORE_INDEX for token, target in zip(ids, chosen, strict=True)]
            if segment.ends_turn and template.end_of_turn_target is not None:
                targets[-1] = template.end_of_turn_target
        else:
            targets += [IGNORE_INDEX] * len(ids)
    return tokens, targets


def encode_plain_text(ids: Sequence[int], eos_id: int, prefix: Sequence[int] = ()) -> Sample:
    """A plain document for stage PT: every token but the first is a target, and then `</s>`.

    Args:
        prefix: what the tokenizer puts before a document (`Tokenizer.document_prefix`).
    """
    import numpy as np

    tokens = np.array([*prefix, *ids, eos_id], dtype=np.int32)
    return Sample(tokens[:-1], tokens[1:])

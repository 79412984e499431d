"""What the user says of speech in dialogues: the request for a transcript, and how units are written."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.data.conversation import Conversation

_CODES = (
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en "
    "eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv "
    "ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne "
    "ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss "
    "st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"
)
LANGUAGES = frozenset(_CODES.split())  # ISO 639-1; mistral-common's TranscriptionRequest takes no others
DEFAULT_PROMPT = "Transcribe the audio."
LANGUAGE_FIELD = "{language}"


@dataclass(frozen=True, slots=True)
class Request:
    """How transcripts are asked for.

    Attributes:
        prompt: the words after the recording, for jinja templates; `{language}` in it becomes the language's code.
        language: the language of records that name none; "" leaves it to the model to detect it.
    """

    prompt: str = DEFAULT_PROMPT
    language: str = ""

    def language_of(self, conversation: Conversation) -> str:
        return conversation.language or self.language

    def words_for(self, conversation: Conversation) -> str | None:
        """Return the words that ask for the transcript; None if they name the language, which is not known."""
        language = self.language_of(conversation)
        if LANGUAGE_FIELD in self.prompt and not language:
            return None
        return self.prompt.replace(LANGUAGE_FIELD, language)


DEFAULT_REQUEST = Request()


@dataclass(frozen=True, slots=True)
class Speech:
    """How units of speech stand in dialogues.

    Attributes:
        unit_token: the text of the token of a unit, with `{}` for its number.
        correspond_token: between speech and its words, in the spoken-dialogue template.
        dialogue_template: "model" for that of the model's folder; "spoken", or "usdm" (see `spoken.py`).
    """

    unit_token: str = "<|unit{}|>"
    correspond_token: str = "<|correspond|>"
    dialogue_template: str = "model"

    @property
    def between(self) -> str:
        """What the template writes between the text of an answer and its units."""
        return "" if self.dialogue_template == "model" else self.correspond_token

    @property
    def key(self) -> str:
        """What a template's fingerprint has of it: nothing, where everything has its default."""
        return "" if self == DEFAULT_SPEECH else f" {self.dialogue_template} {self.unit_token} {self.correspond_token}"


DEFAULT_SPEECH = Speech()

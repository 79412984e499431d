"""Phonemes of a text in the International Phonetic Alphabet, by eSpeak NG's library.

The marks of punctuation stay where they are: eSpeak NG reads the stretches between them. Stress and length marks are
part of its phonemes; the flags that it writes where it changes the language are left out.
"""

from __future__ import annotations

import ctypes
import re
import threading
from functools import lru_cache
from itertools import count, takewhile

from erniekit.data.formats.problems import MalformedError, shorten
from erniekit.errors import ConfigurationError

LIBRARY = "espeakng_loader"
VOICES = {"en": "en-us", "zh": "cmn-latn-pinyin"}  # of the languages that it speaks in several ways
LANGUAGES = {"chinese": "zh", "english": "en"}
_RETRIEVAL, _UTF8, _IPA = 1, 1, 2  # of speak_lib.h
_MARKS = re.compile(r"(\s*(?:[;!?¡¿—…\"«»“”„(){}\[\]。，！？；：、《》「」]|[:,.](?!\d))+\s*)")  # not that of 3.5
_SWITCH = re.compile(r"\([a-z]{2,3}(-[a-z0-9]+)*\)")
_KANJI = re.compile("[㐀-䶿一-鿿]")
_lock = threading.Lock()  # the library has one voice and one text at a time


def phonemes_of(text: str, language: str) -> str:
    """Return the phonemes of a text.

    Args:
        language: such as en or pt-br.

    Raises:
        MalformedError: the language is not known, or eSpeak NG does not speak it or cannot read the text.
        ConfigurationError: the library is not installed.
    """
    if not language:
        raise MalformedError("language", "the language of the text, in which its phonemes are spoken", "nothing")
    name = LANGUAGES.get(language.lower(), language.lower())
    voice = VOICES["zh"] if name.startswith("zh") else VOICES.get(name, name)
    if name.startswith("ja") and (kanji := _KANJI.search(text)):
        raise MalformedError("text", "a text in kana, because eSpeak NG does not read kanji", repr(kanji[0]))
    with _lock:
        library = _library()
        identifier = _voices().get(voice)
        if identifier is None or library.espeak_SetVoiceByName(identifier) != 0:
            raise MalformedError("language", "a language that eSpeak NG speaks", shorten(language))
        pieces = _MARKS.split(text)  # stretches of text, and marks between them
        spoken = [piece if number % 2 else _stretch(library, piece) for number, piece in enumerate(pieces)]
    return re.sub(r"\s+", " ", "".join(spoken)).strip()


def _stretch(library: ctypes.CDLL, text: str) -> str:
    """Return the phonemes of a text without punctuation, which may still be several clauses for the library."""
    if not text.strip():
        return text
    buffer = ctypes.create_string_buffer(text.encode())
    rest = ctypes.c_void_p(ctypes.addressof(buffer))
    clauses = iter(lambda: library.espeak_TextToPhonemes(ctypes.byref(rest), _UTF8, _IPA) if rest.value else None, None)
    found = (clause.decode("utf-8", errors="replace") for clause in clauses)
    return " ".join(stripped for clause in found if (stripped := _SWITCH.sub("", clause).strip()))


class _Voice(ctypes.Structure):
    """The beginning of speak_lib.h's espeak_VOICE.

    Attributes:
        languages: a byte of priority, the best is the lowest, and a text for each; a zero byte ends them.
        identifier: the name of its file, such as gmw/en-US.
    """

    _fields_ = (("name", ctypes.c_char_p), ("languages", ctypes.c_void_p), ("identifier", ctypes.c_char_p))


@lru_cache(maxsize=1)
def _voices() -> dict[str, bytes]:
    """Return the identifier of the best voice for each language."""
    found: dict[str, tuple[int, bytes]] = {}
    voices = _library().espeak_ListVoices(None)
    for voice in takewhile(bool, (voices[number] for number in count())):
        place = voice.contents.languages
        while priority := ctypes.string_at(place, 1)[0]:
            text = ctypes.string_at(place + 1)
            language = text.decode().lower()
            found[language] = min(found.get(language, (256, b"")), (priority, voice.contents.identifier))
            place += len(text) + 2
    return {language: identifier for language, (_, identifier) in found.items()}


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        import espeakng_loader
    except ImportError:
        raise ConfigurationError(
            "text_frontend: phonemes are made by eSpeak NG; install it with: pip install 'erniekit[speech-data]', "
            "or choose the frontend tokenizer or characters"
        ) from None
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    library.espeak_ListVoices.restype = ctypes.POINTER(ctypes.POINTER(_Voice))
    library.espeak_TextToPhonemes.restype = ctypes.c_char_p
    library.espeak_TextToPhonemes.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    if library.espeak_Initialize(_RETRIEVAL, 0, espeakng_loader.get_data_path().encode(), 0) < 0:
        raise ConfigurationError("text_frontend: eSpeak NG does not start; install espeakng-loader again")
    return library

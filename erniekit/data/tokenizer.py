"""A model folder's tokenizer: text to token ids and back. A thin wrapper of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend

from erniekit.errors import ModelFileError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


class Tokenizer:
    """Encodes without adding anything of its own; control tokens written in the text (`</s>`) become their ids.

    Attributes:
        bos_id, eos_id, pad_id: ids; `bos_id` is None where the model has none, `pad_id` falls back to unk, then eos.
        vocab_size: the largest token id + 1.
        control_tokens: the texts of the tokens that steer the model, such as `<|end_of_sentence|>`.
        special_tokens: name -> text as the folder declares them, for jinja templates (`bos_token`, ...).
        chat_template: the folder's jinja template, or None; `template_path` is the file it comes from.
        files: the files to copy beside a trained model.
        fingerprint: hex digest of everything that decides which ids a text gets.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        try:
            definition = path.read_bytes()
            self._backend = Backend.from_buffer(definition)
        except OSError as error:
            raise ModelFileError(_missing_tokenizer(folder, error)) from None
        except Exception as error:  # the library raises bare Exceptions from its Rust side
            raise ModelFileError(f"{path}: not a tokenizer that the tokenizers library can read: {error}") from None
        # a saved tokenizer may carry the truncation and padding of whoever saved it
        self._backend.no_truncation()
        self._backend.no_padding()
        config = _read_json(folder / CONFIG_FILE)
        self.special_tokens = _special_tokens({**_read_json(folder / SPECIAL_TOKENS_FILE), **config})
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self._check_special_tokens(folder, vocabulary)
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._backend.get_added_tokens_decoder().values()
        self.control_tokens = frozenset(token.content for token in added if token.special)
        # longest first, so that a token is named whole where another one is its beginning
        ordered = sorted(self.control_tokens, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(re.escape(token) for token in ordered)) if ordered else None
        self.bos_id = self._named_id("bos_token")
        eos_id = self._named_id("eos_token")
        if eos_id is None:
            raise ModelFileError(f"{folder / CONFIG_FILE}: eos_token is missing; a model without it cannot stop")
        self.eos_id = eos_id
        pad_ids = (self._named_id(name) for name in ("pad_token", "unk_token"))
        self.pad_id = next((token for token in pad_ids if token is not None), eos_id)
        self.chat_template, self.template_path = _chat_template(folder, config)
        names = (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, *TEMPLATE_FILES, *SENTENCEPIECE_FILES)
        self.files = tuple(folder / name for name in names if (folder / name).is_file())
        named = json.dumps(self.special_tokens, sort_keys=True).encode()
        self.fingerprint = hashlib.blake2b(definition + named, digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text on its own; uses several threads (TOKENIZERS_PARALLELISM=false: one)."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def find_control_token(self, text: str) -> str | None:
        """The first control token that stands written out in a text, or None."""
        match = self._control_pattern.search(text) if self._control_pattern else None
        return match.group() if match else None

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _check_special_tokens(self, folder: Path, vocabulary: dict[str, int]) -> None:
        for name, text in self.special_tokens.items():
            if text not in vocabulary:
                raise ModelFileError(
                    f"{folder / CONFIG_FILE}: {name} is {text!r}, which {TOKENIZER_FILE} does not hold"
                )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        ModelFileError: a file is missing or does not fit the others; says which.
    """
    return Tokenizer(Path(folder))


def _missing_tokenizer(folder: Path, error: OSError) -> str:
    if not folder.is_dir():
        return f"{folder}: no such model folder"
    present = [name for name in SENTENCEPIECE_FILES if (folder / name).is_file()]
    if present:
        return (
            f"{folder}: holds only a SentencePiece tokenizer ({present[0]}); reading those is not available yet. "
            f"Convert it to {TOKENIZER_FILE} (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return f"{folder / TOKENIZER_FILE}: {error.strerror or error}; a model folder needs its tokenizer"


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(config: dict) -> dict[str, str]:
    """`bos_token: "<s>"` and `bos_token: {"content": "<s>", ...}` both occur."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_template(folder: Path, config: dict) -> tuple[str | None, Path | None]:
    """The jinja text and its file; a file of its own comes before the tokenizer's configuration."""
    own_file, json_file = (folder / name for name in TEMPLATE_FILES)
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8"), own_file
    if json_file.is_file():
        return _named_template(_read_json(json_file).get("chat_template"), json_file), json_file
    template = _named_template(config.get("chat_template"), folder / CONFIG_FILE)
    return template, None if template is None else folder / CONFIG_FILE


def _named_template(value: object, path: Path) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        templates = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        if isinstance(templates.get("default"), str):
            return templates["default"]
    raise ModelFileError(f"{path}: chat_template: expected a string, or a list that holds a template named 'default'")

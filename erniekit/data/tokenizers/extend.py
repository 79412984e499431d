"""Add tokens to a tokenizer: write a copy of its files that knows them, for everything that reads a tokenizer.

Tokens that the tokenizer has keep their ids; the others get the ids behind its largest one, in their order. In the
copy, as transformers would write it, they are added tokens that are not special: tokenizer.json lists them, or
`added_tokens_decoder` of tokenizer_config.json for vocabularies of other kinds. A key of that file which transformers
ignores (`TEXT_TOKENS_KEY`) says that they are text: a record may hold them, unlike the tokens of a chat template.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from erniekit.data.tokenizers.breaks import longest_of
from erniekit.data.tokenizers.files import (
    ADDED_TOKENS_FILE,
    ADDITIONAL_TEMPLATES,
    CONFIG_FILE,
    TEKKEN_FILE,
    TEXT_TOKENS_KEY,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    read_json,
    text_tokens,
)
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from erniekit.manifest import refuse_changed

FORMAT_VERSION = 1  # of the copies; raise it when the same tokens give other files
FACTS_FILE = "extension.json"  # written last
MODEL_CONFIG_FILE = "config.json"  # tells programs the class of a tokenizer that does not name its own
MOST_NAMED = 5  # tokens in a message
_NEIGHBOURS = (("a", "a"), ("s", "s"), ("e", "t"), ("t", "e"), ("1", "1"), (".", "."))  # of a word in a text
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


@dataclass(frozen=True)
class ExtendedTokenizer:
    """A tokenizer with the tokens that a run asks for.

    Attributes:
        folder: of its files; the original one if no file differs.
        first: the id of the first new token: the largest id of the original tokenizer, plus 1.
        count: the number of new tokens, whose ids are consecutive.
        kept: the number of tokens that the tokenizer had.
        control: those of them that stay control tokens, so that no text of a record is read as one.
        ambiguous: pairs of a token and a longer one that begins with it, a few of them.
    """

    folder: Path
    first: int
    count: int
    kept: int = 0
    control: tuple[str, ...] = ()
    ambiguous: tuple[tuple[str, str], ...] = ()


def extend_tokenizer(folder: Path, tokens: Sequence[str], cache: Path) -> ExtendedTokenizer:
    """Return the tokenizer of `folder` with some tokens; its files are written once into a folder of `cache`.

    Args:
        tokens: different texts, in the order of their ids.

    Raises:
        ConfigurationError: a token cannot be added to this tokenizer.
        ModelFileError: the tokenizer cannot be used, or its format has no place for further tokens.
        DataError: the cache cannot be written.
    """
    refuse_changed(folder)
    files = _files(folder)
    target = cache / "tokenizers" / _digest(folder, files, tokens)
    stored = _stored(folder, target)
    if stored is not None:
        return stored
    plan = _Plan.of(load_tokenizer(folder), tokens)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            if plan.changes_files:
                _write(temporary, folder, files, plan)
                _check_written(temporary, folder, plan)
            _write_facts(temporary, plan)
            _rename(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write the extended tokenizer {target}: {error.strerror or error}. "
            "Make that folder writable, free some space, or choose another data_cache_dir"
        ) from None
    return replace(plan.facts, folder=target if plan.changes_files else folder)


@dataclass(frozen=True)
class _Plan:
    """What changes in the files of a tokenizer.

    Attributes:
        new: the new tokens.
        declared: the tokens that are to be text, new or not, those of earlier runs included.
        changes_files: whether there is anything to write.
    """

    tokenizer: Tokenizer
    facts: ExtendedTokenizer
    new: tuple[str, ...]
    declared: frozenset[str]

    @property
    def changes_files(self) -> bool:
        return bool(self.new) or self.declared != self.tokenizer.text_tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, tokens: Sequence[str]) -> _Plan:
        new = tuple(token for token in tokens if tokenizer.token_id(token) is None)
        kept = [token for token in tokens if tokenizer.token_id(token) is not None]
        templates = "".join(tokenizer.chat_templates.values())
        fixed = tokenizer.control_tokens | set(tokenizer.special_tokens.values())
        control = [
            text for text in kept if text in fixed or (text in templates and text in tokenizer.structural_tokens)
        ]
        added = tokenizer.structural_tokens | tokenizer.text_tokens
        _refuse_words(tokenizer, [text for text in kept if text not in added])
        declared = tokenizer.text_tokens.union(new, set(kept) & tokenizer.structural_tokens - set(control))
        _refuse_overlaps(new, tokenizer.structural_tokens - declared)
        _refuse_templates(new, templates)
        facts = ExtendedTokenizer(
            tokenizer.folder, tokenizer.vocab_size, len(new), len(kept), tuple(control), _ambiguous(tokens)
        )
        return cls(tokenizer, facts, new, declared)


def _refuse_words(tokenizer: Tokenizer, words: Sequence[str]) -> None:
    """Raise ConfigurationError if a word of the vocabulary is not read wherever it is written."""
    for before, after in _NEIGHBOURS:
        encoded = tokenizer.encode_batch([before + word + after for word in words])
        for word, ids in zip(words, encoded, strict=True):
            number = tokenizer.token_id(word)
            if number in ids:
                continue
            raise ConfigurationError(
                f"added_tokens: {word!r} is a word of the tokenizer's vocabulary already (id {number}), which it does "
                f"not read within other words\n  Write another text, such as <|{word.strip('<|>')}|>."
            )


def _refuse_overlaps(new: Iterable[str], structural: Collection[str]) -> None:
    """Raise ConfigurationError if a new token would take characters of a control token that follows, or holds one."""
    beginnings = {text[:length] for text in structural for length in range(1, len(text))}
    search = re.compile(longest_of(structural) or r"(?!)")
    for token in new:
        inside = search.search(token)
        ends = next((token[start:] for start in range(1, len(token)) if token[start:] in beginnings), None)
        if inside is not None:
            raise ConfigurationError(f"added_tokens: {token!r} holds {inside[0]!r}, a control token of the model")
        if ends is not None:
            begun = min(text for text in structural if text.startswith(ends))
            raise ConfigurationError(
                f"added_tokens: {token!r} ends like {begun!r} begins, a control token of the model, which would not be "
                "found behind it\n  Write another text."
            )


def _refuse_templates(new: Iterable[str], templates: str) -> None:
    written = next((token for token in new if token in templates), None)
    if written is not None:
        raise ConfigurationError(
            f"added_tokens: {written!r} is written by the model's chat template; as a token it would be a control "
            "token, which no record may hold\n  Write another text."
        )


def _ambiguous(tokens: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of a token and another that begins with it; the longer one is read where both are written."""
    ordered = sorted(tokens)
    pairs = (pair for pair in pairwise(ordered) if pair[1].startswith(pair[0]))
    return tuple(islice(pairs, MOST_NAMED))


def _files(folder: Path) -> list[Path]:
    """Return what is copied. tekken.json is not: it cannot be extended, and where tokenizer.json is, this is read."""
    if (folder / TEKKEN_FILE).is_file() and not (folder / TOKENIZER_FILE).is_file():
        raise ModelFileError(
            f"{folder / TEKKEN_FILE}: no tokens can be added to a Tekken vocabulary: only special tokens are found in "
            "a text, and they have the first ids, so one more would move the ids of all others.\n"
            "  Use a folder with tokenizer.json, which transformers writes of it "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...)), or take reserved tokens of the vocabulary."
        )
    names = (*(name for name in TOKENIZER_FILES if name != TEKKEN_FILE), MODEL_CONFIG_FILE)
    templates = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    return [*(folder / name for name in names if (folder / name).is_file()), *templates]


def _write(target: Path, folder: Path, files: Iterable[Path], plan: _Plan) -> None:
    for path in files:
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    ids = {text: plan.facts.first + place for place, text in enumerate(plan.new)}
    library = read_json(folder / TOKENIZER_FILE)
    listed = library.get("added_tokens") or []
    if library:
        library["added_tokens"] = [*listed, *({"id": number, **_entry(text)} for text, number in ids.items())]
        _write_json(target / TOKENIZER_FILE, library)
    if (folder / ADDED_TOKENS_FILE).is_file():
        _write_json(target / ADDED_TOKENS_FILE, read_json(folder / ADDED_TOKENS_FILE) | ids)
    settings = read_json(folder / CONFIG_FILE)
    flags = {token["id"]: {name: token.get(name, False) for name in ("content", *_FLAGS)} for token in listed}
    known = {str(token.id): flags.get(token.id) or _flags_of(token) for token in plan.tokenizer.added_tokens}
    known |= _decoder(settings, folder)
    settings["added_tokens_decoder"] = known | {str(number): _entry(text) for text, number in ids.items()}
    _write_json(target / CONFIG_FILE, settings | {TEXT_TOKENS_KEY: sorted(plan.declared, key=_by_id(plan, ids))})


def _decoder(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelFileError(f"{folder / CONFIG_FILE}: added_tokens_decoder: expected an object with the ids as keys")
    return decoder


def _entry(text: str) -> dict[str, Any]:
    return {"content": text, **dict.fromkeys(_FLAGS, False)}


def _flags_of(token: Any) -> dict[str, Any]:
    return {"content": token.content, **{name: getattr(token, name, False) for name in _FLAGS}}


def _by_id(plan: _Plan, ids: dict[str, int]) -> Any:
    return lambda text: ids.get(text, plan.tokenizer.token_id(text))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _check_written(target: Path, folder: Path, plan: _Plan) -> None:
    """Raise UserError unless the written files give each new token its id, in a text and back."""
    extended = load_tokenizer(target)
    expected = range(plan.facts.first, plan.facts.first + len(plan.new))
    ids = [extended.token_id(text) for text in plan.new]
    if ids != list(expected) or extended.vocab_size != expected.stop:
        place = next((place for place, number in enumerate(expected) if ids[place] != number), -1)
        raise ModelFileError(
            f"{folder}: no tokens can be added to this tokenizer: {plan.new[place]!r} should have the id "
            f"{expected[place]}, but gets {ids[place]}; the ids of its vocabulary have gaps"
        )
    encoded = extended.encode_batch([f"a{text}a" for text in plan.new])
    for text, number, found in zip(plan.new, expected, encoded, strict=True):
        if found.count(number) != 1:
            raise ConfigurationError(
                f"added_tokens: the tokenizer of {folder} does not find {text!r} in a text (it changes some of its "
                "characters before)\n  Write another text, best of ASCII characters."
            )
        back = extended.decode([number])
        if back != text:
            raise ConfigurationError(
                f"added_tokens: the tokenizer of {folder} decodes {text!r} to {back!r}\n"
                "  Write another text, best of ASCII characters."
            )


# The folder in the cache: it is named by all that it depends on, and complete or absent.


def _digest(folder: Path, files: Iterable[Path], tokens: Sequence[str]) -> str:
    digest = hashlib.blake2b(repr((FORMAT_VERSION, tuple(tokens))).encode(errors="backslashreplace"), digest_size=12)
    for path in files:
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write_facts(target: Path, plan: _Plan) -> None:
    facts = {**asdict(plan.facts), "folder": None, "changes_files": plan.changes_files, "hashes": _hashes(target)}
    (target / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")


def _stored(folder: Path, target: Path) -> ExtendedTokenizer | None:
    """Return what an earlier call has written; None if nothing, or if a file was changed or removed since."""
    try:
        facts = json.loads((target / FACTS_FILE).read_text(encoding="utf-8"))
        if facts.pop("hashes") != _hashes(target):
            return None
        facts["folder"] = target if facts.pop("changes_files") else folder
        facts["ambiguous"] = tuple(map(tuple, facts["ambiguous"]))
        return ExtendedTokenizer(**{**facts, "control": tuple(facts["control"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hashes(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FACTS_FILE)
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in paths
    }


def _rename(temporary: Path, target: Path) -> None:
    """Put a complete folder in place; where another process has done so meanwhile, its files are the same."""
    try:
        os.rename(temporary, target)
    except OSError:
        if (target / FACTS_FILE).is_file() and _hashes(target) == _hashes(temporary):
            return
        shutil.rmtree(target, ignore_errors=True)  # damaged since it was written
        os.rename(temporary, target)


def declared_ids(folder: Path) -> dict[str, int]:
    """Return text -> id, in the order of the ids, of the tokens that the tokenizer in `folder` reads in texts.

    There are none if no run has declared any. Only the configuration is read, not the vocabulary.

    Raises:
        ModelFileError: it is malformed.
    """
    settings = read_json(folder / CONFIG_FILE)
    declared = text_tokens(settings)
    try:
        ids = sorted((int(number), value["content"]) for number, value in _decoder(settings, folder).items())
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{folder / CONFIG_FILE}: added_tokens_decoder: {error!r}") from None
    return {text: number for number, text in ids if text in declared}

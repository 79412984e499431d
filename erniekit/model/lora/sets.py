"""Several sets of adapters of one decoder, each loaded once, of which a step computes with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from erniekit.errors import ConfigurationError
from erniekit.model.decoder import Decoder
from erniekit.model.lora.config import PISSA
from erniekit.model.lora.lora import LowRankAdapter, load_adapters, named_adapters
from erniekit.model.lora.peft_files import read_adapters
from erniekit.model.weights import named_linears

AS_LOADED = ""  # the name of the set that the decoder had first, perhaps without any adapter


class AdapterSets:
    """The sets of adapters of a decoder by name.

    To switch is to point some hundred linear layers to others, which takes well below a millisecond.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._linears = decoder, named_linears(decoder)
        self._sets: dict[str, Mapping[str, LowRankAdapter]] = {AS_LOADED: named_adapters(decoder)}
        self._current = AS_LOADED

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sets that have been loaded."""
        return tuple(name for name in self._sets if name != AS_LOADED)

    def load(self, name: str, folder: Path) -> None:
        """Load the adapters of a folder, beside those that are there already.

        Raises:
            ModelFileError: a file is missing or damaged, or does not fit the model.
            ConfigurationError: they change more than linear layers can switch.
        """
        stored = read_adapters(folder, self._decoder.config)
        if stored.new_rows:
            why = "they bring rows of new tokens, which grow the model"
        elif stored.settings.init == PISSA:
            why = "they began as PiSSA, which changes the weights under them"
        else:
            why = ""
        if why:
            raise ConfigurationError(
                f"adapters: {name}: {folder}: cannot be one set of several: {why}\n"
                "  Serve them alone with --lora-path, or export them into a model: erniekit export"
            )
        settings = self._decoder.adapters
        with self.used(AS_LOADED):
            for path in self._sets[AS_LOADED]:
                self._linears[path].adapter = None
            load_adapters(self._decoder, folder)
            self._sets[name] = named_adapters(self._decoder)
            for path in self._sets[name]:
                self._linears[path].adapter = self._sets[AS_LOADED].get(path)
            for path, adapter in self._sets[AS_LOADED].items():
                self._linears[path].adapter = adapter
        for adapter in self._sets[name].values():
            adapter.eval()
        self._decoder.adapters = settings

    def use(self, name: str) -> None:
        """Let the decoder compute with a set."""
        if name == self._current:
            return
        wanted = self._sets[name]
        for path in {**self._sets[self._current], **wanted}:
            self._linears[path].adapter = wanted.get(path)
        self._current = name

    @contextmanager
    def used(self, name: str) -> Iterator[None]:
        """Let the decoder compute with a set inside the context."""
        before = self._current
        self.use(name)
        try:
            yield
        finally:
            self.use(before)

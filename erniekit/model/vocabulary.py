"""Tokens that a run adds to the vocabulary of its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GrownVocabulary:
    """What a run adds to the vocabulary of its model. The new ids are consecutive.

    Attributes:
        first_new: the id of the first new token, which is the number of ids of the earlier tokenizer.
        count: the number of new tokens.
        init: how their rows begin: `normal` or `mean`, see the parameter `new_token_init`.
        trained: whether adapters train the new rows beside them, see `train_added_tokens`.
    """

    first_new: int
    count: int
    init: str = "normal"
    trained: bool = True

    @property
    def size(self) -> int:
        """The number of ids of the new tokenizer."""
        return self.first_new + self.count

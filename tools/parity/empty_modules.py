"""Empty modules in place of packages that another package imports to read sound, which nobody needs to compare numbers.

Needs the standard library only, because it serves environments of their own.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

READ_SOUND = ("torchaudio", "torchaudio.functional", "librosa", "soundfile", "tensorboardX")  # what omnivoice imports
CUT_SILENCE = ("pydub", "pydub.silence")


class EmptyModule(types.ModuleType):
    """A package that has every name, and does nothing."""

    def __getattr__(self, name: str) -> EmptyModule:
        if name.startswith("__"):
            raise AttributeError(name)
        return EmptyModule(f"{self.__name__}.{name}")


def replace_modules(*names: str) -> None:
    """Let later imports find empty modules under these names."""
    for name in names:
        module: Any = EmptyModule(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module

"""`erniekit` that also prints a line at every operation on its output folder, so that a kill can fall into saving."""

import os
import sys
from collections.abc import Callable
from typing import Any

from erniekit.cli import main


def _announced(name: str) -> Callable[..., Any]:
    operation = getattr(os, name)

    def call(*arguments: Any, **options: Any) -> Any:
        print("disk", name, flush=True)
        return operation(*arguments, **options)

    return call


if __name__ == "__main__":
    for name in ("fsync", "rename", "replace"):
        setattr(os, name, _announced(name))
    sys.exit(main(sys.argv[1:]))

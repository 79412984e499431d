"""The schema of parameters. `Config.load` reads a file; `PARAMETERS` holds every declaration."""

from erniekit.parameters.config import Config

__all__ = ["Config"]

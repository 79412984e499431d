"""The schema of parameters. `Config.load` reads a file; `PARAMETERS` holds every declaration."""

from erniekit.config.config import Config

__all__ = ["Config"]

"""Say what to install where the packages of the extra `server` are missing."""

from __future__ import annotations

import importlib.util

from erniekit.errors import UserError

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "python_multipart")
INSTALL = "pip install 'erniekit[server]'"


def require_packages(verb: str) -> None:
    """Raise UserError if a package that `erniekit VERB` needs is missing. Nothing is imported."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"`erniekit {verb}` needs {' and '.join(missing)}: {INSTALL}")

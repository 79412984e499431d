"""Run a command of ERNIEKit for the page, with a configuration that is not saved, and end it when it takes too long."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from erniekit.errors import ConfigurationError
from erniekit.redaction import redacted
from erniekit.temp_folders import temp_folder

PREVIEW_SECONDS = 300.0


async def preview(text: str, name: str, root: Path, *, rows: int, documents: int) -> dict[str, Any]:
    """Return what `erniekit preview --json` says of a configuration; see `runners/preview.py`.

    Args:
        name: of the file, as its messages are to say.

    Raises:
        ConfigurationError: the command refuses, with its words, or takes longer than `PREVIEW_SECONDS`.
    """
    with temp_folder("erniekit-ui-") as folder:
        file = Path(folder) / (Path(name).name or "config.yaml")
        file.write_text(text, encoding="utf-8")
        words = ["preview", str(file), "--json", "--rows", str(rows), "--documents", str(documents)]
        code, said, told = await _run(words, root)
        if code:
            problem = told.replace(f"{folder}/", "").strip().removeprefix("error: ")
            raise ConfigurationError(redacted(problem) or f"`erniekit preview` ended with exit code {code}")
    shown: dict[str, Any] = json.loads(said)
    return shown


async def _run(words: list[str], root: Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "erniekit",
        *words,
        cwd=root,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said, told = await asyncio.wait_for(process.communicate(), PREVIEW_SECONDS)
    except asyncio.TimeoutError:
        raise ConfigurationError(f"`erniekit {words[0]}` took longer than {PREVIEW_SECONDS:.0f} s") from None
    finally:  # also when the page no longer waits
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode or 0, said.decode("utf-8", errors="replace"), told.decode("utf-8", errors="replace")

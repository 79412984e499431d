"""How a model folder tells whether it is complete. Needs neither Paddle nor NumPy.

Publishing a model into a folder that is in use cannot be one operation. While it goes on the folder has the marker and
no manifest; the manifest comes back last. Model folders from elsewhere have neither.
"""

from __future__ import annotations

from pathlib import Path

from erniekit.errors import ModelFileError

MANIFEST = "manifest.json"
PUBLISHING = ".erniekit-publishing"


def is_half_written(folder: Path | str) -> bool:
    """Whether publishing a model into `folder` was interrupted, so that its files may be half old, half new."""
    return (Path(folder) / PUBLISHING).exists() and not (Path(folder) / MANIFEST).exists()


def refuse_half_written(folder: Path | str) -> None:
    """Raise ModelFileError where publishing a model into `folder` was interrupted."""
    if is_half_written(folder):
        raise ModelFileError(
            f"{folder} holds a half-written model: the run that was saving it was killed, or is still saving it.\n"
            "  Let that run finish, or start it again with resume_from_checkpoint: true; or use one of its checkpoints."
            f"\n  If you have put a complete model there yourself since, remove {Path(folder) / PUBLISHING}."
        )

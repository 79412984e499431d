"""Upload an exported folder to the Hugging Face Hub with the Hub's own client; only on request."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

from erniekit.errors import ConfigurationError, UserError
from erniekit.hub.download import connection_errors

logger = logging.getLogger(__name__)

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_upload(repository: str) -> None:
    """Check before the export whether an upload could work.

    Raises:
        ConfigurationError: `repository` is not OWNER/NAME, or the client or a token is missing.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigurationError(f"--push {repository}: expected OWNER/NAME, as in me/my-model")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigurationError("--push: huggingface_hub is not installed: pip install huggingface_hub")
    from huggingface_hub import get_token

    if not get_token():
        raise ConfigurationError(
            f"--push {repository}: there is no token of the Hugging Face Hub.\n"
            "  Create one with write access at https://huggingface.co/settings/tokens, then run "
            "`huggingface-cli login` or set HF_TOKEN."
        )


def upload(folder: Path, repository: str) -> None:
    """Create the repository if it does not exist, and upload the folder's files in one commit.

    Raises:
        UserError: the Hub refuses, or cannot be reached; the folder on disk is complete nevertheless.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export of ERNIEKit", ignore_patterns=[".*"]
        )
    except connection_errors() as error:
        raise UserError(
            f"--push {repository}: the upload failed: {str(error).strip().splitlines()[0]}\n"
            f"  The export itself is complete in {folder}; to send it later:\n"
            f"  huggingface-cli upload {repository} {folder}"
        ) from None
    logger.info(f"uploaded to {commit.repo_url}")

"""Run a command whose configuration names URLs of object stores: fetch what it reads, upload what it leaves.

On each machine one process does this: the launcher, or a process without ranks. Of ranks that another launcher has
started each fetches what it reads, taking turns, and the first one uploads. Needs no Paddle.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from erniekit.build.local_paths import names_urls, with_local_paths
from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.distributed.rank import is_rank
from erniekit.errors import CheckpointError, UserError
from erniekit.hub.fetched import FETCHED
from erniekit.hub.object_store import open_folder
from erniekit.launch.external import adopt_rank
from erniekit.training.checkpoint.stored_start import open_stored_run
from erniekit.training.checkpoint.uploads import Uploads

logger = logging.getLogger(__name__)


@contextmanager
def stored_run(config: Config, *, writes: bool = True) -> Iterator[Config]:
    """Yield the configuration with paths of this machine, and bring the output folder to its store.

    The body trains or evaluates. Afterwards this waits until everything has arrived. If the body raises an error, what
    is complete is uploaded all the same; if a signal ends it at once, what has not arrived is told.

    Args:
        writes: whether the command writes into `output_dir`.

    Raises:
        UserError: something cannot be downloaded, the store holds another run, or an upload has failed.
    """
    if not names_urls(config):
        yield config
        return
    adopt_rank(os.environ, gpu=config.basic.device != "cpu")
    local = with_local_paths(config)
    url = config.basic.output_dir
    if not (writes and is_url(url) and _uploads()):
        yield local
        return
    with _alone(local.output_dir, url):
        uploads = _open(local, url)
        logger.info(f"output: {url}; this run works in {local.output_dir}, and uploads from there")
        uploads.begin()
        with ExitStack() as at_once:
            at_once.callback(uploads.abandon)  # where a signal ends the run, or the wait for the last uploads
            failed: Exception | None = None
            try:
                yield local
            except Exception as error:
                failed = error
            try:
                uploads.finish()
            except UserError as own:
                if failed is None:
                    at_once.pop_all()
                    raise
                logger.error(str(own))  # beside the error that ends the run
            at_once.pop_all()
            if failed is not None:
                raise failed


def _uploads() -> bool:
    """Whether this process, of all those of a job, is the one that uploads."""
    return FETCHED not in os.environ and (not is_rank() or os.environ["PADDLE_TRAINER_ID"] == "0")


def _open(local: Config, url: str) -> Uploads:
    store = open_folder(url)
    if not local.basic.do_train:
        return Uploads(store, local.output_dir, None)
    section = local.checkpoint
    start = open_stored_run(
        store,
        local.output_dir,
        resume=section.resume_from_checkpoint,
        overwrite=local.basic.overwrite_output_dir,
        with_best=local.evaluation.load_best_model_at_end,
        several_machines=_several_machines(),
    )
    return Uploads(store, local.output_dir, start, section.save_total_limit)


def _several_machines() -> bool:
    ranks, here = (os.environ.get(name, "1") for name in ("PADDLE_TRAINERS_NUM", "PADDLE_LOCAL_SIZE"))
    return int(here) < int(ranks)


@contextmanager
def _alone(folder: Path, url: str) -> Iterator[None]:
    """Lock the place of a run's local folder for this process.

    Raises:
        CheckpointError: another run of this machine has it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(".lock").open("a")
    except OSError as error:
        raise CheckpointError(
            f"{folder.parent}, where a run works for {url}, cannot be written: {error.strerror}\n"
            "  Set ERNIEKIT_CACHE to another folder."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another run of this machine is writing to {url}; wait for it to end, or choose another output_dir"
            ) from None
        yield

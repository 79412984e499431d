"""What the server of `warm_processes` imports: what most ranks need, and nothing that starts a thread."""

import gc
import sys
from contextlib import suppress
from importlib import import_module

from erniekit.environment import import_paddle

import_paddle()

import erniekit.build.preflight  # noqa: E402
import erniekit.cli  # noqa: E402
import erniekit.data.tokenizers.huggingface  # noqa: E402
import erniekit.distributed.cpu_backend  # noqa: E402
import erniekit.model.encoders.whisper_encoder  # noqa: E402
import erniekit.model.mixed_precision  # noqa: E402
import erniekit.runners.train  # noqa: E402, F401

# What a run draws its losses with in the end, and scores answers with: half the time of a short run, and more.
WARM = ("matplotlib.figure", "matplotlib.backends.backend_agg", "rouge_score.rouge_scorer", "sacrebleu")
sys.modules["sklearn"] = None  # type: ignore[assignment]  # of which `rouge_score` imports all there is, up to threads
for name in WARM:
    with suppress(ImportError):
        import_module(name)
del sys.modules["sklearn"]

gc.freeze()  # a collection in a fork would copy every page it looks at

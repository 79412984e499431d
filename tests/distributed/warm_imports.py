"""What the server of `warm_processes` imports: what most ranks need, and nothing that starts a thread."""

from erniekit.environment import import_paddle

import_paddle()

import erniekit.cli  # noqa: E402
import erniekit.runners.train  # noqa: E402, F401

"""`python -m erniekit` is the same as `erniekit`."""

import sys

from erniekit.cli import main

sys.exit(main())

"""ERNIEKit: declarative fine-tuning of large language models with PaddlePaddle."""

import logging

__version__ = "0.2.0"

# a library leaves it to the program whether anything is shown; `erniekit.log` shows it on the command line
logging.getLogger(__name__).addHandler(logging.NullHandler())

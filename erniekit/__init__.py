"""ERNIEKit: declarative fine-tuning of large language models with PaddlePaddle."""

__version__ = "0.1.0"

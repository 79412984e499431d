"""Packaging: `pip install -e ".[cpu]"` for a CPU. README.md says how to install for a GPU."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (ROOT / "erniekit/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

REQUIREMENTS = [
    "numpy>=1.26,<1.27",  # paddlenlp needs < 1.27
    "pyyaml>=6",
    "jsonschema>=4.23",
    "safetensors>=0.4.5,<0.8",  # 0.8.0 scrambles non-contiguous arrays on save
    "tokenizers>=0.21.4,<0.22",
    "sentencepiece>=0.2",  # tokenizer.model; paddlenlp brings it anyway
    "huggingface_hub>=0.30,<1",  # from_hf_hub; tokenizers and paddlenlp bring it anyway
    "jinja2>=3.1",
    "rich>=13",  # the live progress display; 70 ms to import, imported only by training
    "visualdl==2.5.3",
    "matplotlib>=3.8",  # the loss curve; visualdl brings it anyway
    "tensorboardX>=2.6",  # event files for `report_to: tensorboard`, without TensorFlow or torch
    "setuptools==79.0.1",  # Paddle imports it undeclared
    # paddlenlp (hubs, SentencePiece tokenizers, its users' files) and what it needs but does not pin
    "paddlenlp==3.0.0b4",
    "pip",  # imported by paddlenlp
    "aistudio-sdk==0.2.6",  # later ones lack the name that paddlenlp imports
    "pyarrow==25.0.1",  # later ones need NumPy 2
    "datasets==4.0.0",  # otherwise an old one is chosen that breaks on Python 3.12
    # ROUGE and BLEU of generated answers, for `erniekit eval`: 38 MB with nltk and lxml, imported only then
    "rouge-score==0.1.2",
    "sacrebleu>=2.4,<3",
]

setup(
    name="erniekit",
    version=VERSION,
    description="Declarative fine-tuning of large language models with PaddlePaddle",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["erniekit", "erniekit.*"]),
    python_requires=">=3.10,<3.13",
    install_requires=REQUIREMENTS,
    extras_require={
        # paddlepaddle and paddlepaddle-gpu install the same package `paddle`, so neither is forced.
        "cpu": ["paddlepaddle==3.3.1"],
        # Not on PyPI, which stops at 2.6.2: README.md names Paddle's own index.
        "gpu": ["paddlepaddle-gpu>=3.3.1"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff==0.17.5",
            "mypy==2.4.1",
            "types-PyYAML",
            "types-jsonschema",
        ],
        # from_modelscope: 0.3 MB, and of what it needs only cryptography is not here anyway
        "modelscope": ["modelscope-hub>=0.5.1,<0.6"],
        # `erniekit export --format onnx`; paddlenlp brings paddle2onnx, and onnxruntime checks what it wrote
        "onnx": ["paddle2onnx==2.1.0", "onnxruntime>=1.20"],
        # The oracles. Any recent CPU build of torch will do; a plain install may bring gigabytes of CUDA packages.
        "parity": [
            "torch==2.13.0",
            "transformers==4.55.4",
            "trl==0.21.0",
            "peft==0.17.1",
            "compressed-tensors==0.10.2",  # what transformers 4.55 reads exports in few bits with
        ],
    },
    entry_points={"console_scripts": ["erniekit = erniekit.cli:main"]},
)

"""Start-up of the light verbs: processor seconds and modules they must not import.

    python tools/bench/startup.py [--repeats 5]

Prints a Markdown table. The bound of 0.3 s is that of the project: light verbs feel instant.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

VERBS = (
    ("erniekit --help", ["--help"]),
    ("erniekit validate", ["validate", "examples/configs/quickstart/sft.yaml"]),
    ("erniekit params learning_rate", ["params", "learning_rate"]),
    ("erniekit docs --check", ["docs", "--check"]),
)
HEAVY = ("paddle", "paddlenlp", "numpy", "torch", "transformers")


def processor_seconds(arguments: list[str]) -> float:
    """User plus system seconds of one run in a new process."""
    process = subprocess.Popen([sys.executable, "-m", "erniekit", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"erniekit {' '.join(arguments)} failed with status {status}")
    return usage.ru_utime + usage.ru_stime


def heavy_imports(arguments: list[str]) -> list[str]:
    code = (
        "import sys\nfrom erniekit.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [name for name in HEAVY if f"'{name}'" in result.stderr.splitlines()[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print("| verb | CPU seconds (best of runs) | heavy imports |\n|---|---|---|")
    for title, arguments in VERBS:
        seconds = min(processor_seconds(arguments) for _ in range(repeats))
        print(f"| `{title}` | {seconds:.2f} | {', '.join(heavy_imports(arguments)) or 'none'} |")


if __name__ == "__main__":
    main()

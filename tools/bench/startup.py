"""Start-up of the light verbs: processor seconds, their bounds, and modules that they must not import.

    python tools/bench/startup.py [--repeats 9] [--write]

User plus system seconds of a process, imports and interpreter included; the verbs take turns, the median counts. A run
before them leaves the compiled modules (`__pycache__`), as an installed package has them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from marked import BENCHMARKS, ROOT, measured_at, with_table
from rounds import counted

VERBS = (
    ("erniekit --help", 0.10, ["--help"]),
    ("erniekit validate", 0.25, ["validate", "examples/configs/quickstart/sft.yaml"]),
    ("erniekit params learning_rate", 0.25, ["params", "learning_rate"]),
    ("erniekit docs --check", 0.25, ["docs", "--check"]),
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
HEAVY = ("paddle", "paddlenlp", "numpy", "torch", "transformers")


def processor_seconds(arguments: list[str]) -> float:
    """User plus system seconds of one run in a new process."""
    command = [sys.executable, "-m", "erniekit", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=ENVIRONMENT)
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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return [name for name in HEAVY if f"'{name}'" in result.stderr.splitlines()[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {title: [] for title, _, _ in VERBS}
    for number in counted(range(options.repeats + 1), "starting"):
        for title, _, arguments in VERBS:
            used = processor_seconds(arguments)
            if number:
                seconds[title].append(used)
    lines = ["| verb | CPU seconds, median (range) | bound | heavy imports |", "|---|---:|---:|---|"]
    for title, bound, arguments in VERBS:
        own = seconds[title]
        told = f"{statistics.median(own):.2f} ({min(own):.2f}-{max(own):.2f})"
        lines.append(f"| `{title}` | {told} | {bound:.2f} | {', '.join(heavy_imports(arguments)) or 'none'} |")
    print("\n".join(lines))
    if options.write:
        told = f"Of {options.repeats} runs. {measured_at('python tools/bench/startup.py --write')}"
        table = "\n".join([*lines, "", told])
        BENCHMARKS.write_text(with_table("start-up", table, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()

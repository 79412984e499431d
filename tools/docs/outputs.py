"""Write the output of commands into the pages that show it, so that no page shows what its command does not print.

    python tools/docs/outputs.py [PAGE ...]     (all pages of docs/ by default)

A block is generated where a comment stands before it:

    <!-- output of: erniekit eval CONFIG; lines: REGULAR EXPRESSION -->
    ```text
    ```

The block begins with the command. Lines that the expression does not find are left out, with "..." for each gap. The
commands run in the repository and need what `make quickstart` and `erniekit dpo examples/configs/quickstart/dpo.yaml`
leave in output/.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(<!-- output of: (?P<command>.+?); lines: (?P<lines>.+?) -->\n```text\n)(?P<shown>.*?)(?=```\n)", re.S
)


def updated(text: str, run: Callable[[str], str]) -> str:
    """Return a page with the blocks that its comments ask for.

    Args:
        run: returns what a command prints.
    """

    def replaced(block: re.Match[str]) -> str:
        return block[1] + f"$ {block['command']}\n" + selected(run(block["command"]), block["lines"])

    return BLOCK.sub(replaced, text)


def selected(output: str, expression: str) -> str:
    """Return the lines that the expression finds, and "..." for what lies between them.

    Raises:
        ValueError: it finds none.
    """
    shown: list[str] = []
    gap = False
    for line in output.splitlines():
        if re.search(expression, line):
            if gap:
                shown.append("  ..." if line.startswith(" ") else "...")
            shown.append(line.rstrip())
            gap = False
        else:
            gap = True
    if not shown:
        raise ValueError(f"no line matches {expression!r} in:\n{output}")
    return "\n".join(shown) + "\n"


def run_command(command: str) -> str:
    """Run a command line of the page; `erniekit` is this checkout's."""
    words = shlex.split(command)
    words = [sys.executable, "-m", "erniekit", *words[1:]] if words[0] == "erniekit" else words
    print(f"$ {command}", flush=True)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 2):  # 2: a page may show how a mistake is told
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=sorted((ROOT / "docs").glob("*.md")))
    for page in parser.parse_args().pages:
        before = page.read_text(encoding="utf-8")
        after = updated(before, run_command)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page}: written")


if __name__ == "__main__":
    main()

"""Run the notebooks of docs/tutorials and keep what their cells print, which the site shows.

python tools/docs/run_notebook.py     in the repository, with the extra `dev`
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of its cells, which run in `folder` one after the other.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def main() -> None:
    for path in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        _, notebook = nbformat.validator.normalize(executed(path, ROOT))  # cells get the names that the format wants
        for cell in notebook.cells:
            cell.metadata.clear()  # when it ran
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        nbformat.write(notebook, path)
        print(f"{path}: written")


if __name__ == "__main__":
    main()

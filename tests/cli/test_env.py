"""What `erniekit env` says of the kernels of a CPU."""

from __future__ import annotations

import pytest

from erniekit.cli import env
from erniekit.native import library


@pytest.mark.parametrize(("path", "said"), [("avx2", "avx2: why"), ("paddle", "Paddle's operators: why")])
def test_one_line_says_which_kernels_run_and_why(monkeypatch, capsys, path, said) -> None:
    monkeypatch.setattr(library, "kernels", lambda: library.Kernels(path, "why"))
    monkeypatch.setattr(env, "_matmul_gflops", lambda: 1.0)
    assert env.run([]) == 0
    assert f"  {'CPU kernels':<26} {said}" in capsys.readouterr().out.splitlines()

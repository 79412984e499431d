"""What `erniekit env` says of the kernels of a CPU, and of its products in bfloat16."""

from __future__ import annotations

import pytest

from erniekit.cli import env
from erniekit.model import bf16
from erniekit.native import library


@pytest.mark.parametrize(("path", "said"), [("avx2", "avx2: why"), ("paddle", "Paddle's operators: why")])
def test_one_line_says_which_kernels_run_and_why(monkeypatch, capsys, path, said) -> None:
    monkeypatch.setattr(library, "kernels", lambda: library.Kernels(path, "why"))
    monkeypatch.setattr(env, "_matmul_gflops", lambda: 1.0)
    assert env.run([]) == 0
    assert f"  {'CPU kernels':<26} {said}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("faster", "said"), [(True, "acts (why)"), (False, "no effect unless cpu_bf16: always")])
def test_it_says_whether_bfloat16_pays(monkeypatch, capsys, faster, said) -> None:
    monkeypatch.setattr(bf16, "is_faster", lambda: (faster, "why"))
    monkeypatch.setattr(env, "_matmul_gflops", lambda: 1.0)
    assert env.run([]) == 0
    assert f"  {'bf16: true':<26} {said}" in capsys.readouterr().out

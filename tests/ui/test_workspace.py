"""The page sees its folder and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.ui.workspace import OutsideError, Workspace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret.yaml").write_text("x: 1")
    (tmp_path / "work" / "sub").mkdir(parents=True)
    return tmp_path / "work"


def test_paths_in_the_folder_are_resolved(root: Path) -> None:
    workspace = Workspace.of(root)
    assert workspace.inside("sub/a.yaml") == root / "sub" / "a.yaml"
    assert workspace.inside("sub/../b.yaml") == root / "b.yaml"
    assert workspace.inside(str(root / "b.yaml")) == root / "b.yaml"
    assert workspace.inside("") == root and workspace.name(root / "sub") == "sub"


@pytest.mark.parametrize(
    "name",
    [
        "../secret.yaml",
        "sub/../../secret.yaml",
        "/etc/passwd",
        "~/x.yaml",
        "link/secret.yaml",
        "file.yaml",
        ".ssh/id",
        "sub/.env",
        "~nobody-at-all/x",
        "loop/x",
        "a\x00b",
    ],
)
def test_paths_elsewhere_are_refused(root: Path, name: str) -> None:
    (root / "link").symlink_to(root.parent)
    (root / "file.yaml").symlink_to(root.parent / "secret.yaml")
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(OutsideError):
        Workspace.of(root).inside(name)


def test_a_folder_that_is_a_link_is_seen_through(root: Path) -> None:
    link = root.parent / "link-to-work"
    link.symlink_to(root)
    assert Workspace.of(link).inside("a.yaml") == root / "a.yaml"


def test_further_folders_are_read_and_not_written(root: Path) -> None:
    other = root.parent / "other"
    other.mkdir()
    workspace = Workspace.of(root, (other,))
    assert workspace.readable(str(other / "train.jsonl")) and not workspace.readable(str(root.parent / "secret.yaml"))
    with pytest.raises(OutsideError, match="lies outside of"):
        workspace.inside(str(other / "a.yaml"))


def test_paths_of_a_configuration_are_named(root: Path) -> None:
    from erniekit.config.parameter import ConfigBuilder
    from erniekit.config.registry import PARAMETERS

    builder = ConfigBuilder(PARAMETERS, {}, "train")
    assert list(Workspace.of(root).outside(builder)) == []
    builder.set_silently("train_dataset_path", ("data/a.jsonl", "/etc/hosts"))
    builder.set_silently("model_name_or_path", "baidu/ERNIE-4.5-0.3B-PT")
    named = list(Workspace.of(root).outside(builder))
    assert [name for name, _ in named] == ["train_dataset_path"] and "/etc/hosts lies outside of" in named[0][1]


def test_walk_follows_no_link_and_skips_dots(root: Path) -> None:
    (root / "link").symlink_to(root.parent)
    (root / ".git").mkdir()
    (root / "sub" / "a.yaml").write_text("")
    assert [(path.name, files) for path, files in Workspace.of(root).walk()] == [("work", []), ("sub", ["a.yaml"])]

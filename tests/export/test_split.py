"""Re-sharding: every tensor byte for byte, whatever its type; nothing half-written, nothing overwritten unasked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from erniekit.cli import main
from erniekit.errors import CheckpointError, UserError
from erniekit.export.split import split_model
from erniekit.manifest import problems
from erniekit.model.storage import safetensors
from erniekit.model.storage.safetensors import StoredTensor, write_stored

TENSORS = {
    "embed": StoredTensor("BF16", (64, 32)),
    "fp8": StoredTensor("F8_E4M3", (32, 32)),
    "int8": StoredTensor("I8", (32, 32)),
    "scale": StoredTensor("F32", ()),
    "empty": StoredTensor("F16", (0, 4)),
    "packed": StoredTensor("U8", (300, 7)),
    "norm": StoredTensor("F64", (5,)),
}


def content(number: int, tensor: StoredTensor) -> bytes:
    """Every byte pattern, those of NaN included."""
    return np.random.default_rng(number).integers(0, 256, tensor.nbytes, np.uint8).tobytes()


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    contents = ((name, [content(number, tensor)]) for number, (name, tensor) in enumerate(TENSORS.items()))
    write_stored(folder / "model.safetensors", TENSORS, contents, {"format": "pt", "made by": "us"})
    (folder / "config.json").write_text('{"model_type": "ernie4_5"}')
    (folder / "assets").mkdir()
    (folder / "assets/note.txt").write_text("kept")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5/optimizer.safetensors").write_bytes(b"not part of the model")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the folder holds, by our reader."""
    from erniekit.model.storage.shards import open_weight_files

    return {name: (*file.stored(name), b"".join(file.blocks(name))) for name, file in open_weight_files(folder).items()}


@pytest.mark.parametrize("limit", [1, 1500, 4096, 6000, 10**9])
def test_tensors_stay_byte_for_byte_in_shards_of_the_size_asked_for(source: Path, tmp_path: Path, limit: int) -> None:
    target = tmp_path / "target"
    split_model(source, target, limit)
    assert stored(target) == {
        name: (*tensor, content(number, tensor)) for number, (name, tensor) in enumerate(TENSORS.items())
    }
    shards = sorted(target.glob("*.safetensors"))
    for shard in shards:
        with safe_open(shard, "numpy") as file:
            names = list(file.keys())
            assert file.metadata() == {"format": "pt", "made by": "us"}
        assert len(names) == 1 or sum(TENSORS[name].nbytes for name in names) <= limit
    if limit == 10**9:
        assert [shard.name for shard in shards] == ["model.safetensors"]
        assert not (target / "model.safetensors.index.json").exists()
    else:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
        assert set(index["weight_map"]) == set(TENSORS)
    assert (target / "config.json").read_text() == '{"model_type": "ernie4_5"}'
    assert (target / "assets/note.txt").read_text() == "kept"
    assert not (target / "checkpoint-5").exists()
    assert problems(target, hashes=True) == []


def test_cutting_and_joining_gives_the_same_file(source: Path, tmp_path: Path) -> None:
    split_model(source, tmp_path / "cut", 2000)
    index = tmp_path / "cut/model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"note": "kept"}}))
    (tmp_path / "cut/manifest.json").unlink()
    split_model(tmp_path / "cut", tmp_path / "cut again", 3000)
    assert json.loads((tmp_path / "cut again" / index.name).read_text())["metadata"]["note"] == "kept"
    split_model(tmp_path / "cut again", tmp_path / "joined", 10**9)
    assert stored(tmp_path / "joined") == stored(source)


def test_the_verb(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    words = ["split", str(source), "--output", str(target)]
    assert main([*words, "max_shard_size=3e-6"]) == 0
    assert "7 tensors" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert main([*words, "max_shard_size=3e-6"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    (target / "mine.txt").write_text("stays")
    assert main([*words, "overwrite_output_dir=true"]) == 0
    assert (target / "mine.txt").read_text() == "stays"
    assert [path.name for path in target.glob("*.safetensors*")] == ["model.safetensors"]
    assert stored(target) == stored(source)
    assert main([*words, "learning_rate=1e-3", "overwrite_output_dir=true"]) == 0
    assert "`learning_rate`" in capsys.readouterr().out


def test_a_configuration_names_the_folder_and_the_result_lies_inside(source: Path, tmp_path: Path) -> None:
    """As the original does; a second split copies neither the first nor an export."""
    file = tmp_path / "run_export.yaml"
    file.write_text(f"model_name_or_path: absent\noutput_dir: {source}\nmax_shard_size: 3e-6\nfine_tuning: LoRA\n")
    (source / "export").mkdir()
    assert main(["split", str(file)]) == 0
    assert stored(source / "split_export") == stored(source)
    assert not (source / "split_export" / "export").exists()
    assert main(["split", str(source), "--output", str(tmp_path / "again")]) == 0
    assert not (tmp_path / "again" / "split_export").exists()


@pytest.mark.parametrize(("where", "what"), [(".", "command reads"), ("..", "around"), ("inside/deeper", "inside")])
def test_a_folder_that_is_read_is_not_written(source: Path, where: str, what: str) -> None:
    before = sorted(source.rglob("*"))
    with pytest.raises(UserError, match=what):
        split_model(source, source / where, 1000, overwrite=True)
    assert sorted(source.rglob("*")) == before


def test_damaged_sources_are_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    split_model(source, tmp_path / "cut", 2000)
    (tmp_path / "cut/model-00002-of-00005.safetensors").rename(tmp_path / "gone")
    with pytest.raises(UserError, match=r"model-00002-of-00005\.safetensors: no such file"):
        split_model(tmp_path / "cut", target, 10**9)
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(UserError, match="truncated"):
        split_model(source, target, 1000)
    (source / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="not a safetensors file"):
        split_model(source, target, 1000)
    (source / "model.safetensors").unlink()
    with pytest.raises(UserError, match="neither"):
        split_model(source, target, 1000)
    with pytest.raises(UserError, match="no such folder"):
        split_model(tmp_path / "absent", target, 1000)
    assert not target.exists() and not list(tmp_path.glob(".writing*"))


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("occupied", [False, True])
def test_what_fails_midway_leaves_nothing_that_looks_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, occupied: bool
) -> None:
    target = tmp_path / "target"
    if occupied:
        write_model(target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    original, calls = safetensors.SafetensorsFile.blocks, 0

    def failing(self, name):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 3:
            raise failure
        return original(self, name)

    monkeypatch.setattr(safetensors.SafetensorsFile, "blocks", failing)
    with pytest.raises(CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt):
        split_model(source, target, 2000, overwrite=True)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert target.exists() == occupied and not list(tmp_path.rglob(".writing*"))


@pytest.mark.slow
def test_memory_stays_flat_and_paddle_is_not_imported(tmp_path: Path) -> None:
    """A 200 MB tensor and 200 MB of small ones pass through a process that holds a few MB of them."""
    folder = tmp_path / "large"
    folder.mkdir()
    tensors = {"large": StoredTensor("BF16", (100, 1_000_000))}
    tensors |= {f"small.{number}": StoredTensor("U8", (1_000_000,)) for number in range(200)}
    block = bytes(1_000_000)
    contents = ((name, [block] * (tensor.nbytes // len(block))) for name, tensor in tensors.items())
    write_stored(folder / "model.safetensors", tensors, contents)
    program = f"""
import sys
from pathlib import Path
from erniekit.export.split import split_model
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) // 1024
before = peak()
split_model(Path({str(folder)!r}), Path({str(tmp_path / "out")!r}), 90_000_000)
assert "paddle" not in sys.modules
print(peak() - before)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(run.stdout.split()[-1]) < 60, run.stdout
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4

"""Exporting: what is written is what was trained, in the type asked for; what is refused leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
import yaml

from erniekit.cli import main
from erniekit.config import Config
from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.errors import CheckpointError, ModelFileError, UserError
from erniekit.export.export import _generation_config, export_model, open_trained_decoder
from erniekit.export.logit_difference import prompt_logits
from erniekit.export.model_card import model_card
from erniekit.export.static_program import ProgramDescription, generate_greedily, open_program
from erniekit.export.trained_model import find_trained_model
from erniekit.inference.engine import ChatModel
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.manifest import problems
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.storage.precision import round_to_bfloat16
from erniekit.model.storage.shards import open_weight_files
from erniekit.model.weights import named_weights, save_weights
from tests.log_capture import captured_log
from tests.model.tiny_audio import VOXTRAL

NAMES = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
PROMPTS = [[5], [7, 8, 9, 10], list(range(20, 40))]


@pytest.fixture
def full(train: Callable[..., Any]) -> Path:
    """A full fine-tune of random weights, with a checkpoint."""
    return train(save_strategy="steps", save_steps=4).output


@pytest.fixture
def base(train: Callable[..., Any], tmp_path: Path) -> Path:
    """A base model stored as bfloat16, whose card names a licence."""
    run = train(max_steps=1).output
    folder = tmp_path / "base"
    export(run, folder, dtype="bfloat16")
    card = folder / "README.md"
    card.write_text(card.read_text().replace("license: unknown", "license: apache-2.0"))
    shutil.rmtree(run)
    return folder


@pytest.fixture
def adapters(train: Callable[..., Any], base: Path) -> Path:
    """Adapters of that base."""
    values = {"lora": True, "lora_rank": 4, "learning_rate": 0.05, "continue_training": True}
    return train(model_name_or_path=str(base), **values).output


def export(named: Path, target: Path, overrides: tuple[str, ...] = (), **options: Any) -> str:
    config = Config.load(named if named.is_file() else None, overrides, verb="export")
    with captured_log() as lines:
        export_model(named, target, config, **options)
    return "\n".join(lines)


def load(folder: Path) -> Any:
    return build_model(ModelConfig.from_folder(folder), folder)


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: file.read(name) for name, file in open_weight_files(folder).items()}


def test_a_full_fine_tune_is_exported_bit_for_bit(full: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    said = export(full, target)
    assert f"dtype: float32, as {full} is stored" in said
    assert "largest difference 0 " in said and f"{target}: complete" in said
    assert problems(target, hashes=True) == []
    trained, exported = weights(full), weights(target)
    assert list(trained) == list(exported)
    for name, values in trained.items():
        np.testing.assert_array_equal(exported[name], values)
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "float32"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (target / name).read_bytes() == (full / name).read_bytes()


@pytest.mark.parametrize(("overrides", "kernels"), [((), "auto"), (("cpu_kernels=paddle",), "paddle")], ids=str)
def test_logits_are_compared_with_the_kernels_that_are_asked_for(
    overrides: tuple[str, ...], kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute_with(name: str) -> None:
        raise UserError(f"kernels: {name}")

    found = SimpleNamespace(folder=tmp_path / "run", base=None)
    monkeypatch.setattr("erniekit.export.export.find_trained_model", lambda named, config: found)
    monkeypatch.setattr("erniekit.export.export.use_kernels", compute_with)
    with pytest.raises(UserError, match=f"kernels: {kernels}"):
        export(tmp_path / "run", tmp_path / "exported", overrides)


def test_an_exported_model_knows_its_end_token(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    config = ModelConfig.from_json(VOXTRAL)

    def written(stored: dict[str, Any]) -> dict[str, Any]:
        file.write_text(json.dumps(stored))
        model, tokenizer = SimpleNamespace(file=lambda name: file), SimpleNamespace(eos_id=2)
        return _generation_config(model, config, tokenizer)  # type: ignore[arg-type]

    assert written({}) == {"eos_token_id": 2}
    assert written({"eos_token_id": [3, 4], "top_p": 0.5}) == {"eos_token_id": [3, 4], "top_p": 0.5}


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")])
def test_every_tensor_is_rounded_once_to_the_type_asked_for(
    full: Path, tmp_path: Path, dtype: str, stored: str
) -> None:
    target = tmp_path / "exported"
    export(full, target, ("max_shard_size=2e-5",), dtype=dtype)
    files = open_weight_files(target)
    assert {file.stored(name).dtype for name, file in files.items()} == {stored}
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == dtype
    for name, values in weights(full).items():
        content = b"".join(files[name].blocks(name))
        expected = {"F32": values, "F16": values.astype(np.float16), "BF16": round_to_bfloat16(values)}[stored]
        assert content == np.ascontiguousarray(expected).tobytes()
    for shard in target.glob("model-*.safetensors"):
        held = [name for name, file in files.items() if file.path == shard]
        assert len(held) == 1 or sum(files[name].stored(name).nbytes for name in held) <= 20_000


def test_merging_adds_the_update_in_float32_and_rounds_once(adapters: Path, base: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    said = export(adapters, target)
    assert f"dtype: bfloat16, as {base} is stored" in said
    lora, before = weights_of_adapters(adapters), weights(base)
    stored = open_weight_files(target)
    changed = 0
    for name, file in stored.items():
        a, b = (lora.get(f"base_model.model.{name[:-7]}.lora_{letter}.weight") for letter in "AB")
        expected = before[name]
        if a is not None and b is not None:
            expected = before[name].astype(np.float64) + 2.0 * (b.astype(np.float64) @ a)  # alpha / r = 8 / 4
            changed += 1
        found = file.read(name)
        ulp = np.maximum(np.abs(expected), 1e-30) * 2**-8  # half a step of bfloat16, and a little for float32's sum
        assert (np.abs(found - expected) <= ulp * 1.001).all(), name
    assert changed == 14
    exact = tmp_path / "float32"
    export(adapters, exact, dtype="float32")
    model = find_trained_model(adapters, Config.load(None, verb="export"))
    beside = prompt_logits(open_trained_decoder(model, ModelConfig.from_folder(base)), PROMPTS)
    for ours, theirs in zip(prompt_logits(load(exact), PROMPTS), beside, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    plain = prompt_logits(load(base), PROMPTS)
    assert max(np.abs(ours - theirs).max() for ours, theirs in zip(plain, beside, strict=True)) > 1e-2


def weights_of_adapters(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_the_dialogue_format_goes_along(full: Path, tmp_path: Path) -> None:
    """transformers and servers read it from a file; ERNIEKit knows ERNIE's without one."""
    export(full, tmp_path / "exported")
    assert (tmp_path / "exported/chat_template.jinja").is_file()
    model, exported = ChatModel.load(full), ChatModel.load(tmp_path / "exported")
    asked = Conversation((Turn(USER, "Hello"), Turn(ASSISTANT, "Hi"), Turn(USER, "What is 1 + 1?")), "Be brief.")
    assert exported.encode(asked) == model.encode(asked)


def test_the_card_tells_what_the_model_is(adapters: Path, base: Path, tmp_path: Path) -> None:
    target = tmp_path / "my-model"
    said = export(adapters, target)
    card = (target / "README.md").read_text(encoding="utf-8")
    _, front, body = card.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["library_name"] == "transformers"
    assert fields["license"] == "apache-2.0" and fields["tags"] == ["erniekit", "lora", "sft"]
    assert "base_model" not in fields  # a folder of this machine is none of the hub's ids
    measured = next(line for line in said.splitlines() if line.startswith("logits")).split(": ", 1)[1]
    assert "largest difference" in measured and f"| {measured} |" in body
    assert "# my-model" in body and str(base) in body
    parameters = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert parameters == yaml.safe_load((adapters / "training_config.yaml").read_text())
    assert f"`{parameters['train_dataset_path'][0]}`" in body
    loss = json.loads((adapters / "train_results.json").read_text())["train_loss"]
    assert f"| train_loss | {loss:.6g} |" in body


def test_the_card_tells_of_held_out_records() -> None:
    def card(**parameters: Any) -> str:
        named = {"name": "n", "base": "b", "base_folder": None, "is_adapter_merged": False, "library": None}
        return model_card(**named, parameters=parameters, results={}, facts={}, use="u")  # type: ignore[arg-type]

    told = "`eval_split`: 0.1 of the records of each file were held out"
    assert told in card(train_dataset_path=["a.jsonl"], eval_split=0.1)
    assert "were held out" not in card(train_dataset_path=["a.jsonl"], eval_split=0.0)


def test_configurations_checkpoints_and_folders_name_the_same_model(
    full: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(save_strategy="steps", save_steps=4)
    assert config.path is not None
    for number, named in enumerate((config.path, full, full / "checkpoint-4")):
        export(named, tmp_path / str(number))
        assert (tmp_path / str(number) / "model.safetensors").read_bytes() == (full / "model.safetensors").read_bytes()
    assert "| step | 4 |" in (tmp_path / "2/README.md").read_text()


def test_a_program_generates_what_the_model_generates(adapters: Path, tmp_path: Path) -> None:
    target = tmp_path / "program"
    said = export(adapters, target, form="inference")
    assert "largest difference" in said
    export(adapters, tmp_path / "merged", dtype="float32")
    description = ProgramDescription.read(target)
    expected = generate(load(tmp_path / "merged"), PROMPTS, Sampling(max_new_tokens=24))
    assert generate_greedily(open_program(target), description, PROMPTS, 24) == expected
    stop = expected[1][10]
    stopped = generate(load(tmp_path / "merged"), PROMPTS, Sampling(max_new_tokens=24, stop_token_ids=(stop,)))
    assert generate_greedily(open_program(target), description, PROMPTS, 24, [stop]) == stopped
    card = (target / "README.md").read_text()
    assert (target / "tokenizer.json").is_file() and "Paddle inference program" in card and "library_name" not in card


def test_onnx_generates_what_the_model_generates(full: Path, tmp_path: Path) -> None:
    from erniekit.export.onnx import open_onnx

    target = tmp_path / "onnx"
    assert "largest difference" in export(full, target, form="onnx")
    assert not list(target.glob("*.pdiparams"))
    expected = generate(load(full), PROMPTS, Sampling(max_new_tokens=24))
    assert generate_greedily(open_onnx(target), ProgramDescription.read(target), PROMPTS, 24) == expected


@pytest.mark.parametrize("form", ["inference", "onnx"])
def test_an_exported_program_answers_as_its_model_does(
    form: str, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "program"
    export(full, target, form=form)
    prompts = ["What is 1 + 1?", "Hello", "Sort 3, 2, 1 in ascending order."]
    model, program = ChatModel.load(full), ChatModel.load(target)
    for sampling in (Sampling(max_new_tokens=12), Sampling(max_new_tokens=12, temperature=1.5, seed=3)):
        assert program.answer(prompts, sampling) == model.answer(prompts, sampling)
    tokens = model.encode_text("Hello")
    assert list(program.stream(tokens, Sampling(max_new_tokens=5))) == list(
        model.stream(tokens, Sampling(max_new_tokens=5))
    )
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    with captured_log() as said:
        ChatModel.load(target)
    assert "programs run on the CPU" in said[0]
    with pytest.raises(UserError, match="takes no adapters"):
        ChatModel.load(target, adapters=full)


def test_a_program_that_computes_something_else_is_not_exported(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.export import static_program

    def changed(decoder: Any, folder: Path) -> None:
        weight = named_weights(decoder)["model.norm.weight"]
        weight.set_value(weight.numpy() * 1.01)
        original(decoder, folder)

    original = static_program.save_program
    monkeypatch.setattr(static_program, "save_program", changed)
    with pytest.raises(UserError, match="computes other logits"):
        export(full, tmp_path / "program", form="inference")
    assert not (tmp_path / "program").exists() and not list(tmp_path.glob(".writing*"))


@pytest.mark.parametrize("form", ["hf", "inference"])
def test_a_full_disk_is_told_and_leaves_nothing(full: Path, tmp_path: Path, form: str) -> None:
    """Files may not grow beyond 50 kB, which the system reports as it does a full disk."""
    program = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
    program += "from erniekit.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["export", str(full), "--output", str(tmp_path / "exported"), "--format", form]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "File too large" in done.stderr or "is the disk full?" in done.stderr
    assert not (tmp_path / "exported").exists() and not list(tmp_path.glob(".writing*"))


def test_missing_packages_are_named(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    with pytest.raises(UserError, match=r"onnxruntime.*not installed.\n.*pip install 'erniekit\[onnx\]'"):
        export(full, tmp_path / "onnx", form="onnx")


def test_a_value_beyond_float16_is_named(full: Path, tmp_path: Path) -> None:
    decoder = load(full)
    values = named_weights(decoder)["model.norm.weight"].numpy()
    values[3] = 7e4
    named_weights(decoder)["model.norm.weight"].set_value(values)
    from erniekit.model.weights import save_model_folder

    save_model_folder(decoder, tmp_path / "large", [full / "tokenizer.json", full / "tokenizer_config.json"])
    with pytest.raises(UserError, match=r"model\.norm\.weight contains 70000, beyond the range of float16"):
        export(tmp_path / "large", tmp_path / "exported", dtype="float16")
    assert not (tmp_path / "exported").exists()


def test_refusals_leave_nothing_behind(full: Path, tmp_path: Path, make_config: Any) -> None:
    target = tmp_path / "exported"

    def refused(named: Path, match: str, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            export(named, target, **options)
        assert not target.exists() and not list(tmp_path.glob(".writing*"))

    refused(tmp_path / "absent", "no such file or folder")
    untrained = make_config(output_dir=str(tmp_path / "untrained"))
    refused(untrained.path, r"has not been trained: .*untrained contains no model\.\n.*erniekit train")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(full / "checkpoint-4", unfinished / "checkpoint-4")
    refused(unfinished, r"has not finished.*\n.*unfinished/checkpoint-4")
    refused(tmp_path / "cache", "not a model folder")


def test_an_output_that_is_not_empty_is_refused(full: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not empty \(mine.txt\)"):
        export(full, target)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    own = tmp_path / "own.yaml"  # what a configuration allows is meant for its output_dir
    own.write_text(f"output_dir: {full}\noverwrite_output_dir: true\n")
    with pytest.raises(UserError, match=r"not empty \(mine.txt\)"):
        export(own, target)
    assert "overwrite_output_dir: replacing" in export(own, target, ("overwrite_output_dir=true",))
    assert (target / "mine.txt").read_text() == "mine" and problems(target, hashes=True) == []
    for wrong in (full, full.parent):
        before = sorted(full.rglob("*"))
        with pytest.raises(UserError, match="this command reads"):
            export(full, wrong, ("overwrite_output_dir=true",))
        assert sorted(full.rglob("*")) == before


def test_a_model_that_has_diverged_is_refused(full: Path, tmp_path: Path) -> None:
    diverged = tmp_path / "diverged"
    shutil.copytree(full, diverged)
    (diverged / "manifest.json").unlink()
    decoder = load(diverged)
    norm = named_weights(decoder)["model.norm.weight"]
    norm.set_value(np.full(norm.shape, 3e38, np.float32))  # finite, unlike what it computes
    save_weights(decoder, diverged)
    for form in ("hf", "inference"):
        with pytest.raises(UserError, match="diverged: the model computes logits that are not finite"):
            export(diverged, tmp_path / "exported", form=form)
    assert not (tmp_path / "exported").exists()


def test_adapters_of_another_base_are_refused(adapters: Path, base: Path, tmp_path: Path) -> None:
    decoder = load(base)
    for parameter in named_weights(decoder).values():
        parameter.set_value(parameter.numpy() * 1.5)
    save_weights(decoder, base)
    (base / "manifest.json").unlink()
    with pytest.raises(UserError, match="trained on top of other weights"):
        export(adapters, tmp_path / "exported")
    assert not (tmp_path / "exported").exists() and not list(tmp_path.glob(".writing*"))
    config = json.loads((adapters / "adapter_config.json").read_text())
    (adapters / "adapter_config.json").write_text(json.dumps(config | {"r": 7}))
    with pytest.raises(UserError, match=r"adapter_config\.json (has .* bytes instead of|does not have)"):
        export(adapters, tmp_path / "exported")
    (adapters / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"lora_A.*shape \[4, "):
        export(adapters, tmp_path / "exported")
    (adapters / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/absent/base"}))
    with pytest.raises(UserError, match="/absent/base"):
        export(adapters, tmp_path / "exported")


def test_damaged_weights_are_refused(full: Path, tmp_path: Path) -> None:
    content = bytearray((full / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (full / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors does not have the content that was written"):
        export(full, tmp_path / "exported")
    (full / "manifest.json").unlink()
    (full / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(UserError, match="truncated"):
        export(full, tmp_path / "exported")
    (full / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors"):
        export(full, tmp_path / "exported")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_midway_leaves_nothing(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    from erniekit.export import export as module

    def failing(folder: Path, *rest: Any) -> Any:
        (folder / "model.safetensors").write_bytes(b"half")
        raise failure

    monkeypatch.setattr(module, "write_weights", failing)
    expected = CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match=r"No space left|^$"):
        export(full, tmp_path / "exported")
    assert not (tmp_path / "exported").exists() and not list(tmp_path.glob(".writing*"))


def test_without_a_folder_it_is_written_inside_the_run(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run_export.yaml"
    file.write_text(f"output_dir: {full}\nmax_shard_size: 5\n")
    assert main(["export", str(file)]) == 0
    assert (full / "export" / "model.safetensors").is_file() and not problems(full / "export", hashes=True)
    assert main(["export", str(full / "checkpoint-4")]) == 2  # the same folder, which is not empty now
    assert f"{full / 'export'}: the folder is not empty" in capsys.readouterr().err
    assert find_trained_model(full, Config.load(file, verb="export")).folder == full
    file.write_text("max_shard_size: 5\n")
    assert main(["export", str(file)]) == 2
    assert "name the folder to write with --output DIR" in capsys.readouterr().err


def test_the_verb(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(full), "--output", str(tmp_path / "exported")]
    assert main([*words, "--format", "inference", "--dtype", "bfloat16"]) == 2
    assert "float32" in capsys.readouterr().err
    assert main([*words, "--dtype", "bfloat16", "max_shard_size=1e-5"]) == 0
    assert len(list((tmp_path / "exported").glob("model-*.safetensors"))) > 3
    assert main(words) == 2
    assert "not empty" in capsys.readouterr().err
    assert main([*words, "--push", "nonsense"]) == 2
    assert main([*words, "learning_rate=x"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_cards_recipe_for_a_program_runs(full: Path, tmp_path: Path) -> None:
    target = tmp_path / "program"
    export(full, target, form="inference")
    card = (target / "README.md").read_text(encoding="utf-8")
    recipe = card.split("## Use")[1].split("```python\n")[1].split("```")[0].replace("FOLDER", str(target))
    program = f"prompts_as_token_ids = {PROMPTS}\n{recipe}\nprint(answers)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == generate(load(full), PROMPTS, Sampling(max_new_tokens=100))


def test_a_hubs_id_becomes_the_base_of_the_card(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = full / "training_config.yaml"
    path.write_text(path.read_text() + "\nmodel_name_or_path: someone/some-model\nfrom_hf_hub: true\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    model = find_trained_model(full, Config.load(None, verb="export"))
    assert model.base is None and model.base_name == "someone/some-model"
    export(full, tmp_path / "exported")
    front = yaml.safe_load((tmp_path / "exported/README.md").read_text().split("---\n")[1])
    assert front["base_model"] == "someone/some-model" and front["license"] == "unknown"

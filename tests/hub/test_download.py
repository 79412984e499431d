"""Models of hubs: the hubs' own libraries against servers on this machine, and caches laid out as they lay them out."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from erniekit.cli import main
from erniekit.errors import ModelFileError
from erniekit.hub import download
from erniekit.hub.cache import AI_STUDIO, HUGGING_FACE, MODEL_SCOPE, cached_snapshot, parse_name
from erniekit.hub.download import find_model_folder
from tests.hub.fake_hubs import COMMIT, OLDER, FakeHub, serving

os.environ.setdefault("MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS", "1")  # read at import: no waiting between attempts
os.environ.setdefault("MODELSCOPE_API_MAX_RETRIES", "1")
ROOT = Path(__file__).parents[2]
REPO = "our-group/tiny.model"
WEIGHTS = save({"weight": np.arange(6, dtype=np.float32)})
SMALL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"text",
    "tokenizer.model": b"pieces",
}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
MODEL = {
    **SMALL,
    "model.safetensors.index.json": INDEX.encode(),
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS,
}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"code",
    "onnx/model.safetensors": WEIGHTS,
    "README.md": b"",
}
HUBS = (HUGGING_FACE, AI_STUDIO, MODEL_SCOPE)
EVERY_HUB = pytest.mark.parametrize("hub", HUBS, ids=lambda hub: hub.parameter)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library keeps its files in this test's folder, knows no account and finds no server."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # read by other processes; in this one the constants are set
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("AISTUDIO_CACHE_HOME", str(tmp_path / "aistudio"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
    point_at(f"http://127.0.0.1:{closed_port()}", monkeypatch)
    download._fetched_folders.clear()
    download._reported.clear()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "STUDIO_GIT_HOST", "STUDIO_MODEL_API_URL_PREFIX", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    with serving(FakeHub()) as hub:
        files = {**MODEL, **UNWANTED}
        hub.repositories[REPO] = {"main": files, "master": files, OLDER: {**files, "config.json": b'{"old": 1}'}}
        point_at(hub.url, monkeypatch)
        yield hub


@EVERY_HUB
def test_code_and_pickles_are_never_fetched_weights_only_if_wanted(hub, server, logged):
    logged.clear()
    folder = find_model_folder(REPO, hub, weights=False)
    assert {path.name for path in folder.iterdir() if path.is_file()} == {*SMALL, "model.safetensors.index.json"}
    assert find_model_folder(REPO, hub, weights=True) == folder
    for name, content in MODEL.items():
        assert (folder / name).read_bytes() == content
    assert not {path.name for path in folder.rglob("*")} & {Path(name).name for name in UNWANTED if "/" not in name}
    assert not (folder / "onnx").exists()
    origin = [line for line in logged if "in /" in line]
    assert len(origin) == 1 and REPO in origin[0] and hub.title in origin[0] and str(folder) in origin[0]
    before = len(server.requests)
    find_model_folder(REPO, hub, weights=True)
    assert len(server.requests) == before  # one process, one snapshot


@pytest.mark.parametrize("hub", [HUGGING_FACE, MODEL_SCOPE], ids=lambda hub: hub.parameter)  # these list files
def test_named_chat_templates_are_fetched(hub, server):
    for files in server.repositories[REPO].values():
        files["additional_chat_templates/tool_use.jinja"] = b"{{ tools }}"
    folder = find_model_folder(REPO, hub, weights=False)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"{{ tools }}"


@EVERY_HUB
def test_what_is_cached_needs_no_network_and_is_not_fetched_twice(hub, server, monkeypatch, logged):
    folder = find_model_folder(REPO, hub)
    download._fetched_folders.clear()
    sent = server.downloaded()
    assert find_model_folder(REPO, hub) == folder
    assert server.downloaded() == sent
    download._fetched_folders.clear()
    point_at(f"http://127.0.0.1:{closed_port()}", monkeypatch)
    logged.clear()
    assert find_model_folder(REPO, hub) == folder
    assert "from the cache of" in logged[-1] and "since" in logged[-1]


@EVERY_HUB
def test_the_offline_error_says_what_to_download_and_where_to(hub):
    with pytest.raises(ModelFileError) as caught:
        find_model_folder(REPO, hub)
    text = str(caught.value)
    assert "cached copy" not in text
    assert f"model_name_or_path: {REPO} (revision {hub.revision}) cannot be fetched from {hub.title}" in text
    assert f"download from {hub.page.format(repo=REPO)} into models/tiny.model" in text
    assert "use it as model_name_or_path" in text
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "model.safetensors"):
        assert name in text


@EVERY_HUB
def test_an_unknown_repository_is_told_as_such(hub, server):
    with pytest.raises(ModelFileError, match="there is no such repository"):
        find_model_folder("our-group/absent", hub)


@EVERY_HUB
def test_an_adapter_is_fetched_as_well(hub, server):
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
    server.repositories["our-group/adapter"] = {"main": files, "master": files}
    folder = find_model_folder("our-group/adapter", hub)
    assert {name: (folder / name).read_bytes() for name in files} == files


@EVERY_HUB
def test_a_repository_without_safetensors_is_refused(hub, server):
    files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    server.repositories["our-group/old"] = {"main": files, "master": files}
    with pytest.raises(ModelFileError, match=r"the repository holds no model\.safetensors"):
        find_model_folder("our-group/old", hub)
    assert "pytorch_model.bin" not in server.downloaded()


def test_a_commit_is_kept_and_named(server, logged):
    logged.clear()
    newest = find_model_folder(REPO, HUGGING_FACE)
    assert newest.name == COMMIT and f"(revision main, commit {COMMIT})" in logged[-1]
    older = find_model_folder(f"{REPO}@{OLDER}", HUGGING_FACE)
    assert older.name == OLDER and (older / "config.json").read_bytes() == b'{"old": 1}'
    with pytest.raises(ModelFileError, match="it has no revision absent"):
        find_model_folder(f"{REPO}@absent", HUGGING_FACE)


def test_gated_repositories_and_offline_mode_are_told(server, monkeypatch):
    server.gated.add("our-group/gated")
    with pytest.raises(ModelFileError, match="its terms must be accepted"):
        find_model_folder("our-group/gated", HUGGING_FACE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(server.requests)
    with pytest.raises(ModelFileError, match="HF_HUB_OFFLINE forbids"):
        find_model_folder(REPO, HUGGING_FACE)
    assert len(server.requests) == asked


@pytest.mark.parametrize("hub", [HUGGING_FACE, AI_STUDIO], ids=lambda hub: hub.parameter)
def test_a_hub_that_does_not_answer_is_not_waited_for(hub, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_at(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
        with pytest.raises(ModelFileError, match="it did not answer in time"):
            find_model_folder(REPO, hub)


def test_a_cache_that_cannot_be_written_is_named(server, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match=rf"cannot be fetched .*{tmp_path}/file"):
        find_model_folder(REPO, HUGGING_FACE)
    full = download._short_reason(OSError(errno.ENOSPC, "No space left on device"), HUGGING_FACE)
    assert full == f"no space is left for its cache {tmp_path}/file"


def test_an_incomplete_cached_copy_is_not_taken_for_the_model(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / f"hf/hub/models--our-group--tiny.model/snapshots/{COMMIT}"
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs/main").write_text(COMMIT)
    for name, content in MODEL.items():
        (folder / name).write_bytes(content)
    model = parse_name(REPO, HUGGING_FACE)
    assert cached_snapshot(model, weights=True) == folder
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert cached_snapshot(model, weights=True) is None
    assert find_model_folder(REPO, HUGGING_FACE, weights=False) == folder
    with pytest.raises(ModelFileError, match=r"cached copy in .* lacks model-00002-of-00002\.safetensors"):
        find_model_folder(REPO, HUGGING_FACE)


def test_a_download_that_is_cut_off_is_not_kept(server, monkeypatch):
    """AI Studio's library writes what it gets under the name of the whole file, and would not ask for it again."""
    server.cut.add("model-00002-of-00002.safetensors")
    with pytest.raises(ModelFileError, match=r"cannot be fetched from Baidu AI Studio"):
        find_model_folder(REPO, AI_STUDIO)
    server.cut.clear()
    folder = find_model_folder(REPO, AI_STUDIO)
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == WEIGHTS


def test_a_folder_comes_before_a_hub_and_says_so(tmp_path, monkeypatch, logged):
    monkeypatch.chdir(tmp_path)
    (tmp_path / REPO).mkdir(parents=True)
    logged.clear()
    assert find_model_folder(REPO, HUGGING_FACE) == Path(REPO)
    assert logged == [f"model: {REPO} is a local folder, so from_hf_hub is not used"]
    assert find_model_folder(REPO, None) == Path(REPO) and len(logged) == 1


def test_a_name_without_a_hub_is_told_which_parameters_choose_one():
    with pytest.raises(ModelFileError) as caught:
        find_model_folder(REPO, None)
    assert "from_hf_hub: true, from_aistudio: true, from_modelscope: true" in str(caught.value)
    with pytest.raises(ModelFileError) as caught:
        find_model_folder("/no/such/folder", None)
    assert "from_hf_hub" not in str(caught.value)


@pytest.mark.parametrize("name", ["name", "/etc/passwd", "../absent", "a/b/c", "a/..", "a b/c", "a/b@", "a/b@../x"])
def test_names_that_no_hub_knows_are_refused(name):
    with pytest.raises(ModelFileError, match="neither a folder here nor the name of a model"):
        find_model_folder(name, HUGGING_FACE)


def test_validate_downloads_nothing_and_stays_light(server, tmp_path, records, capsys):
    """The model may come later; a cached copy is read."""
    shape = {
        "model_type": "ernie4_5", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    }  # fmt: skip
    main_branch, shipped = server.repositories[REPO]["main"], ROOT / "examples/models/tiny-ernie"
    main_branch["config.json"] = json.dumps(shape).encode()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        main_branch[name] = (shipped / name).read_bytes()
    del main_branch["chat_template.jinja"], main_branch["tokenizer.model"]
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"model_name_or_path: {REPO}\nfrom_hf_hub: true\noutput_dir: {tmp_path}/run\ntrain_dataset_path: {records}\n"
        "max_steps: 2\nmax_seq_len: 128\n"
    )
    assert main(["validate", str(config)]) == 0
    assert f"{REPO} is not here yet" in capsys.readouterr().out
    assert server.requests == []
    find_model_folder(REPO, HUGGING_FACE, weights=False)
    assert main(["validate", str(config)]) == 0
    assert "not here yet" not in capsys.readouterr().out
    program = (
        "import sys; from erniekit.cli import main; code = main(['validate', sys.argv[1]]); "
        "assert not {'paddle', 'numpy'} & set(sys.modules), 'heavy'; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", program, str(config)], check=True, capture_output=True)


def test_train_without_a_network_ends_with_an_explanation_and_no_traceback(tmp_path, records, capsys):
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"model_name_or_path: {REPO}\nfrom_hf_hub: true\noutput_dir: {tmp_path}/run\ntrain_dataset_path: {records}\n"
    )
    assert main(["train", str(config)]) == 2
    printed = capsys.readouterr()
    assert "cannot be fetched from the Hugging Face Hub: there is no connection to it" in printed.err
    assert "Traceback" not in printed.err
    config.write_text(config.read_text().replace("from_hf_hub: true\n", ""))
    assert main(["validate", str(config)]) == 2
    assert "from_hf_hub: true" in capsys.readouterr().err


@pytest.mark.proves("from_hf_hub", "from_aistudio", "from_modelscope")
@EVERY_HUB
def test_each_parameter_makes_preview_and_train_use_its_hub(hub, server, tiny_model, make_config, logged):
    from erniekit.runners.preview import preview
    from erniekit.runners.train import run_training

    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    server.repositories["our-group/tiny"] = {"main": files, "master": files}
    config = make_config(model_name_or_path="our-group/tiny", max_steps=1, **{hub.parameter: True})
    assert "packs" in preview(config)
    assert any(line.startswith(f"model: our-group/tiny (revision {hub.revision}") for line in logged)
    run_training(config)
    output = Path(config.basic.output_dir)
    assert (output / "model.safetensors").is_file()
    assert (output / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    assert not (output / "tokenizer.json").is_symlink()
    with pytest.raises(ModelFileError, match="cannot be fetched"):  # there are no weights to continue from
        run_training(make_config(model_name_or_path="our-group/tiny", overwrite_output_dir=True, continue_training=True,
                            **{hub.parameter: True}))  # fmt: skip


def test_generate_fetches_its_model_and_prints_only_the_answer(server, tiny_model, train, capsys, tmp_path):
    output = train(max_steps=1).output
    files = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    server.repositories["our-group/trained"] = {"main": files}
    words = ["--prompt", "What is 2 + 3?", "--temperature", "0", "--max-new-tokens", "4"]
    capsys.readouterr()
    assert main(["generate", str(output), *words]) == 0
    answer = capsys.readouterr().out
    assert main(["generate", "our-group/trained", "--from-hf-hub", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == answer
    assert f"model: our-group/trained (revision main, commit {COMMIT}) from the Hugging Face Hub" in printed.err
    assert "training_log.jsonl" not in server.downloaded()
    (tmp_path / "prompts.txt").write_text("What is 2 + 3?\n")
    words[:2] = ["--prompts", str(tmp_path / "prompts.txt")]
    assert main(["generate", "our-group/trained", "--from-hf-hub", *words]) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == answer.rstrip("\n")
    assert main(["generate", "our-group/trained", *words]) == 2
    assert "--from-hf-hub" in capsys.readouterr().err


def test_adapters_name_their_base_and_its_revision_as_peft_does(server, train):
    from erniekit.inference.engine import ChatModel

    base = train(max_steps=1).output
    files = {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()}
    server.repositories["our-group/base"] = {OLDER: files}
    name = f"our-group/base@{OLDER}"
    run = train(model_name_or_path=name, from_hf_hub=True, lora=True, continue_training=True, max_steps=1)
    written = json.loads((run.output / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == ("our-group/base", OLDER)
    download._fetched_folders.clear()
    server.requests.clear()
    assert ChatModel.load(run.output).decoder
    assert f"GET /api/models/our-group/base/revision/{OLDER}" in server.requests


@pytest.mark.proves("from_aistudio", "from_modelscope")
@pytest.mark.parametrize(
    ("library", "option"), [("aistudio_sdk", "--from-aistudio"), ("modelscope_hub", "--from-modelscope")]
)
def test_a_library_that_is_not_installed_is_named(
    library: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # an earlier test may have imported the library's modules, which Python finds without their package
    for module in {library, *(name for name in sys.modules if name.startswith(f"{library}."))}:
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["generate", "maker/not-here", option, "--prompt", "x"]) == 2
    assert "its library is not installed (pip install " in capsys.readouterr().err

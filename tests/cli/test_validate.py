"""`erniekit validate`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.cli import main
from erniekit.cli.validate import derived_numbers, report
from erniekit.config import Config

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "configs" / "quickstart" / "sft.yaml")
DATA = str(ROOT / "examples" / "data" / "sft-eval.jsonl")
TINY = str(ROOT / "examples" / "models" / "tiny-ernie")


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_good_file_shows_values_origins_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(
        tmp_path / "sft.yaml",
        f"model_name_or_path: {TINY}\ncontinue_training: false\noutput_dir: out\ntrain_dataset_path: {DATA}\n"
        "max_seq_len: 512\n"
        "batch_size: 2\ngradient_accumulation_steps: 4\ncompute_type: fp16\n",
    )
    assert main(["validate", file, "max_steps=1200"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        f"{file}: valid for `erniekit train`",
        "max_steps 1200 command line",
        "per_device_train_batch_size 2 batch_size (sft.yaml:6)",
        "fp16 true compute_type (sft.yaml:8)",
        "learning_rate 3e-05 default for SFT",
        "global batch 8 packs of up to 512 tokens, at most 4,096 tokens",
        "steps 1,200",
        "`fp16: true` (compute_type (sft.yaml:8)) has no effect on a CPU: fp32 runs",
    ):
        assert line in lines
    parameters = next(line for line in lines if line.startswith("parameters"))
    assert int(parameters.split()[1].replace(",", "")) > 100_000
    assert any(line.startswith("memory about ") and "optimizer" in line for line in lines)
    assert not any(line.startswith("weight_decay") for line in lines)


def test_urls_are_checked_without_a_network_and_without_their_libraries(tmp_path: Path) -> None:
    """The values are shown as they were written, and nothing of fsspec is imported."""
    file = _write(
        tmp_path / "sft.yaml",
        f"model_name_or_path: {TINY}\ncontinue_training: false\noutput_dir: file:///bucket/run\nmax_steps: 2\n"
        "max_seq_len: 128\n"
        "train_dataset_path: file:///bucket/train.jsonl\nresume_from_checkpoint: file:///bucket/run/checkpoint-4\n",
    )
    program = (
        "import sys; from erniekit.cli import main; code = main(sys.argv[1:]); "
        "print(code, {'fsspec', 's3fs', 'numpy', 'paddle'} & set(sys.modules))"
    )
    environment = {**os.environ, "ERNIEKIT_CACHE": str(tmp_path / "cache")}
    for verb in ("train", "eval"):
        words = [sys.executable, "-c", program, "validate", file, "do_eval=true", f"eval_dataset_path={DATA}"]
        done = subprocess.run([*words, "--verb", verb], capture_output=True, text=True, cwd=ROOT, env=environment)
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert lines[-1] == "0 set()", done.stderr
        assert "output_dir file:///bucket/run sft.yaml:3" in lines
        assert "train_dataset_path [file:///bucket/train.jsonl] sft.yaml:6" in lines
        assert not (tmp_path / "cache/object-storage").exists() and not Path("/bucket").exists()


def test_the_package_of_a_store_is_missed_before_a_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("erniekit.hub.object_store.is_importable", lambda module: module == "fsspec")
    file = _write(
        tmp_path / "sft.yaml",
        f"model_name_or_path: gs://b/model\noutput_dir: s3://b/run\ntrain_dataset_path: {DATA}\nmax_steps: 2\n",
    )
    for verb in ("validate", "train"):
        assert main([verb, file]) == 2
        told = capsys.readouterr().err
        assert f"{file}:2: `output_dir`: s3://b/run: URLs of Amazon S3" in told
        assert "need s3fs: pip install 'erniekit[storage]' s3fs" in told
        assert f"{file}:1: `model_name_or_path`: gs://b/model: URLs of Google Cloud Storage need gcsfs" in told


def test_all_shows_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    from erniekit.config.registry import PARAMETERS

    assert main(["validate", QUICKSTART, "--all"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(PARAMETERS) <= words


def test_every_problem_of_every_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _write(tmp_path / "a.yaml", "max_steps: many\n")
    second = _write(tmp_path / "b.yaml", "lerning_rate: 1\n")
    assert main(["validate", first, second, QUICKSTART, str(tmp_path / "c.yaml")]) == 2
    captured = capsys.readouterr()
    assert f"{first}:1: `max_steps`: expected an integer, got many" in captured.err
    assert f"{second}:1: `lerning_rate`: unknown parameter; did you mean `learning_rate`?" in captured.err
    assert f"{tmp_path}/c.yaml: no such file" in captured.err
    assert f"{QUICKSTART}: valid" in captured.out


def test_what_has_no_effect_depends_on_the_device() -> None:
    own = {"output_dir": "o", "train_dataset_path": "t", "model_name_or_path": "m", "cpu_kernels": "paddle"}
    told = [report(Config.from_mapping(own | {"device": device})) for device in ("cpu", "gpu")]
    assert ["cpu_kernels" in text.partition("\nnotes")[2] for text in told] == [False, True]


def test_numbers_that_cannot_be_known_say_why() -> None:
    values = {"model_name_or_path": "absent", "output_dir": "o", "train_dataset_path": "t"}
    text = report(Config.from_mapping(values))
    assert "unknown: absent/config.json: no such file" in " ".join(text.split())
    assert "depend on the data; --data counts them" in text


def test_dense_mask_and_fused_head_change_the_estimate() -> None:
    values = {"model_name_or_path": TINY, "output_dir": "o", "train_dataset_path": "t"}
    shapes = [{}, {"use_sparse_flash_attn": False}, {"use_fused_head_and_loss_fn": True}]
    estimates = {report(Config.from_mapping(values | shape)).partition("memory")[2].splitlines()[0] for shape in shapes}
    assert len(estimates) == 3


def test_data_is_read_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["validate", QUICKSTART, "--data", f"data_cache_dir={tmp_path}", "num_train_epochs=2"]
    words += ["per_device_train_batch_size=2", "gradient_accumulation_steps=2"]
    assert main(words) == 0
    steps = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("steps:"))
    assert "in total" in steps and "4 packs each" in steps
    assert main([*words, "train_dataset_path=absent.jsonl"]) == 2
    assert "absent.jsonl" in capsys.readouterr().err


def test_other_verbs_need_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(tmp_path / "chat.yaml", "max_new_tokens: 16\n")
    assert main(["validate", file, "--verb", "chat"]) == 0
    assert "global batch" not in capsys.readouterr().out
    assert main(["validate", file, "--verb", "train"]) == 2


def test_no_file_is_a_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "seed=3"]) == 2
    assert "name at least one configuration file" in capsys.readouterr().err


def test_a_home_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(TINY).parent))
    text = report(
        Config.from_mapping({"model_name_or_path": "~/tiny-ernie", "output_dir": "o", "train_dataset_path": "t"})
    )
    assert "unknown" not in text


def test_positions_that_the_model_does_not_have_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = f"model_name_or_path: {TINY}\ncontinue_training: false\ntrain_dataset_path: {DATA}\n"
    file = _write(tmp_path / "a.yaml", f"{inputs}output_dir: o\n")
    assert main(["validate", file, "max_seq_len=4096"]) == 0
    assert main(["validate", file, "max_seq_len=4097"]) == 2
    error = capsys.readouterr().err
    assert "max_seq_len 4,097 (command line)" in error and "max_position_embeddings 4,096" in error


def test_what_is_not_there_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(
        tmp_path / "a.yaml",
        f"model_name_or_path: {TINY}/absent\noutput_dir: o\ntrain_dataset_path: {DATA}, t.jsonl\n"
        "do_eval: true\neval_dataset_path: e.jsonl\ncontinue_training: false\n",
    )
    assert main(["validate", file, "resume_from_checkpoint=checkpoint-9"]) == 2
    error = capsys.readouterr().err
    for line in (
        f"a.yaml:1: `model_name_or_path`: {TINY}/absent does not exist",
        "a.yaml:3: `train_dataset_path`: t.jsonl does not exist",
        "a.yaml:5: `eval_dataset_path`: e.jsonl does not exist",
        "command line: `resume_from_checkpoint`: checkpoint-9 does not exist",
    ):
        assert line in error
    assert f"{DATA} does not" not in error
    there = [f"model_name_or_path={TINY}", f"train_dataset_path={DATA}", "max_seq_len=512"]
    assert main(["validate", file, *there, "do_eval=false"]) == 0
    assert main(["validate", file, *there, "--verb", "preview"]) == 0
    assert main(["validate", file, *there]) == 2


def test_an_evaluation_on_its_own_reads_no_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(
        tmp_path / "a.yaml",
        f"model_name_or_path: {TINY}\noutput_dir: o\ndo_train: false\ndo_eval: true\neval_dataset_path: {DATA}\n"
        f"continue_training: false\ndata_cache_dir: {tmp_path}\nmax_seq_len: 512\n",
    )
    assert main(["validate", file, "--data"]) == 0
    text = capsys.readouterr().out
    assert "none: do_train is false" in text and "evaluation: " in text and "in total" not in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--learning_rate", "1e-4"], "learning_rate=1e-4"),
        (["--learning-rate=1e-4"], "learning_rate=1e-4"),
        (["--do_eval"], "do_eval=VALUE"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "preview", "validate"])
def test_a_parameter_written_as_an_option_is_explained(
    verb: str, words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, QUICKSTART, *words]) == 2
    error = capsys.readouterr().err
    assert f"unrecognized arguments: {words[0]}" in error
    assert error.endswith(f"; parameters are written name=value: {hint}\n")


def test_an_unknown_option_is_not_taken_for_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", QUICKSTART, "--fast"]) == 2
    assert capsys.readouterr().err.endswith("unrecognized arguments: --fast\n")


@pytest.mark.parametrize("option", ["--rows", "--documents"])
@pytest.mark.parametrize("count", ["-1", "0", "many"])
def test_preview_shows_at_least_one(option: str, count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", QUICKSTART, option, count]) == 2
    assert f"expected an integer of at least 1, got {count}" in capsys.readouterr().err


def _layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """`erniekit validate --world-size` of a published model that is not here."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    file = _write(
        tmp_path / "plan.yaml",
        f"model_name_or_path: baidu/ERNIE-4.5-21B-A3B-PT\nfrom_hf_hub: true\noutput_dir: o\n"
        f"train_dataset_path: {DATA}\nrecompute: true\nuse_fused_head_and_loss_fn: true\n",
    )
    return main(["validate", file, *words])


def test_a_layout_for_a_cluster_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tensor_parallel_degree=2", "pipeline_parallel_degree=2", "moe_group=mp", "gradient_accumulation_steps=3"]
    assert _layout(tmp_path, monkeypatch, "--world-size", "8", *words) == 0
    text = capsys.readouterr().out
    assert "6 packs of up to" in text  # two parts of three
    assert "layout of 8 ranks: data 2 x pipeline 2 x tensor 2\n  rank  batch           layers        matrices" in text
    assert "  3     dp rank 0 of 2  stage 1 of 2  shard 1 of 2  shard 1 of 2" in text
    # the head is on one stage
    assert re.search(r"pipeline bubble: [23]\d% of a step .* \(25% if all stages took equally long\)", text)
    assert re.search(
        r"sends in a step, computed: tensor [\d.]+ GB, experts [\d.]+ GB, pipeline .* data [\d.]+ GB", text
    )
    table = [line.split() for line in text.partition("memory of each rank in GB")[2].splitlines()[1:4]]
    assert [row[:4] for row in table[1:]] == [["0", "0-1,", "4-5", "0-13"], ["1", "2-3,", "6-7", "14-27"]]
    assert sum(float(row[4]) for row in table[1:]) == pytest.approx(44.2, abs=0.1)  # half of 21.8e9 weights, and a bit
    header, stages = table[0], [dict(zip(table[0][2:], row[4 - 1 :], strict=True)) for row in table[1:]]
    assert header[:3] == ["stage", "ranks", "layers"]
    for stage in stages:
        parts = [float(size.replace(",", "")) for name, size in stage.items() if name not in ("layers", "total")]
        assert sum(parts) == pytest.approx(float(stage["total"]), rel=0.02)


def test_large_layouts_show_groups_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _layout(tmp_path, monkeypatch, "--world-size", "112", "tensor_parallel_degree=4") == 0
    text = capsys.readouterr().out
    assert "4-7 dp rank 1 of 28 shards 0-3, one each" in " ".join(text.split())
    assert "... and 4 more groups of ranks" in text
    assert _layout(tmp_path, monkeypatch, "--world-size", "96") == 0
    text = capsys.readouterr().out
    assert "layout of 96 ranks: data 96\n  ranks  batch\n  0-95   dp ranks 0-95 of 96, one each\n" in text


def test_a_layout_is_shown_before_the_model_is_known() -> None:
    values = {"model_name_or_path": "absent", "output_dir": "o", "train_dataset_path": "t"}
    values |= {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 3}
    text = report(Config.from_mapping(values), 4)
    assert "layout of 4 ranks: data 2 x pipeline 2\n  rank  batch           layers\n" in text
    assert "pipeline bubble: 25% of a step with gradient_accumulation_steps 3" in text
    assert "memory of each rank" not in text


def test_number_formats_decide_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def optimizer_and_title(*words: str) -> tuple[float, str]:
        assert _layout(tmp_path, monkeypatch, "--world-size", "1", *words) == 0
        title, names, row = capsys.readouterr().out.partition("memory of each rank in GB, ")[2].splitlines()[:3]
        return float(row.split()[names.split().index("optimizer")]), title

    sixteen = ["bf16=true", "fp16_opt_level=O2"]
    assert optimizer_and_title() == (175, "computed for full rows: float32 on a CPU")
    assert optimizer_and_title("device=gpu") == (175, "computed for full rows: float32 on a GPU")
    size, title = optimizer_and_title(*sixteen, "amp_master_grad=true")
    assert size == 262 and title.endswith("16 bits with float32 copies, 32-bit gradients, on a GPU")
    assert optimizer_and_title(*sixteen, "use_lowprecision_moment=true")[0] == 175
    assert optimizer_and_title("use_lowprecision_moment=true")[0] == 87.3
    rounds = "float32 with products in bfloat16 on a CPU"
    assert optimizer_and_title(*sixteen, "device=cpu", "cpu_bf16=always")[1].endswith(rounds)
    monkeypatch.setattr("erniekit.build.layout.processor_paths", lambda: ["avx2"])
    assert optimizer_and_title(*sixteen, "device=cpu")[1].endswith("float32 on a CPU")


def test_the_verb_is_what_the_file_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_base: Path) -> None:
    model = f"model_name_or_path: {tiny_base}\n"
    chat = _write(tmp_path / "run_chat.yaml", f"{model}max_model_len: 512\noutput_dir: None\n")
    export = _write(tmp_path / "run_export.yaml", f"{model}max_shard_size: 5\noutput_dir: {tiny_base}\n")
    assert main(["validate", chat]) == 0
    assert "valid for `erniekit chat`" in capsys.readouterr().out
    assert main(["validate", export]) == 0
    assert "valid for `erniekit export`" in capsys.readouterr().out
    assert main(["validate", chat, "--verb", "train"]) == 2
    assert "`train_dataset_path`: is required" in capsys.readouterr().err


def test_sharding_without_a_degree_takes_all_ranks_that_train_on_different_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("sharding=stage1", "tensor_parallel_degree=2", "--world-size", "8")
    assert _layout(tmp_path, monkeypatch, *words) == 0
    text = capsys.readouterr().out
    assert "layout of 8 ranks: sharding 4 x tensor 2" in text
    assert "all ranks that train on different data, for sharding: stage1" in text
    assert _layout(tmp_path, monkeypatch, *words, "sharding_parallel_degree=1") == 0
    assert "layout of 8 ranks: data 4 x tensor 2" in capsys.readouterr().out


def test_wide_values_keep_apart_from_their_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = "amp_custom_white_list: [lookup_table, lookup_table_v2, flash_attn, matmul]\n"
    file = _write(
        tmp_path / "a.yaml",
        f"model_name_or_path: {TINY}\noutput_dir: o\ntrain_dataset_path: {DATA}\nbf16: true\n{lists}"
        "continue_training: false\n",
    )
    assert main(["validate", file, "device=cpu", "max_seq_len=512"]) == 0
    assert "matmul]  a.yaml:5" in capsys.readouterr().out


def test_a_layout_that_does_not_fit_the_model_or_the_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _layout(tmp_path, monkeypatch, "--world-size", "6", "tensor_parallel_degree=4") == 2
    assert "6 ranks cannot be divided by the layout" in capsys.readouterr().err
    assert _layout(tmp_path, monkeypatch, "--world-size", "8", "tensor_parallel_degree=8") == 2
    assert "does not divide num_attention_heads 20, num_key_value_heads 4" in capsys.readouterr().err
    words = ("pipeline_parallel_degree=3", "virtual_pp_degree=2", "gradient_accumulation_steps=6")
    assert _layout(tmp_path, monkeypatch, *words) == 2  # without --world-size, too
    assert "28 layers cannot be divided equally" in capsys.readouterr().err
    assert _layout(tmp_path, monkeypatch, "pipeline_parallel_degree=3") == 0
    told = "`pp_seg_method: layer:DecoderLayer` is read as uniform: 28 layers cannot be divided equally into 3 model"
    assert told in capsys.readouterr().out
    assert _layout(tmp_path, monkeypatch, "--world-size", "none") == 2
    assert "expected an integer of at least 1" in capsys.readouterr().err
    assert _layout(tmp_path, monkeypatch, "--world-size", "2", "--verb", "preview") == 2
    assert "--world-size applies to training" in capsys.readouterr().err


def test_ranks_that_divide_the_data_make_fewer_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["validate", QUICKSTART, f"data_cache_dir={tmp_path}", "model_name_or_path=" + TINY, "max_seq_len=512"]

    def steps(*more: str) -> str:
        assert main([*words, *more]) == 0
        return next(line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  steps "))

    alone, divided = int(steps("--data").replace(",", "")), int(steps("--data", "--world-size", "4").replace(",", ""))
    assert 3.5 < alone / divided < 4.1
    assert int(steps().replace(",", "")) == alone  # each is known from then on
    assert int(steps("--world-size", "4").replace(",", "")) == divided
    assert steps("--world-size", "2") == "depend"


def test_the_longest_sample_makes_the_estimate_closer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Paddle's operators keep attention scores, which depend on the lengths of samples.
    rows = ("max_seq_len=4096", "per_device_train_batch_size=2", "cpu_kernels=paddle")
    words = ["validate", QUICKSTART, f"data_cache_dir={tmp_path}", "model_name_or_path=" + TINY, *rows]

    def workspace(*more: str) -> float:
        assert main([*words, "--world-size", "1", *more]) == 0
        names, row = capsys.readouterr().out.partition("memory of each rank in")[2].splitlines()[1:3]
        return float(row.split()[names.split().index("workspace")].replace(",", ""))

    assert workspace("--data") < 0.8 * workspace()  # samples of at most 100 tokens, not of 4,096


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        ({}, "1 pack of up to 100 tokens, at most 100 tokens"),
        ({"per_device_train_batch_size": 3}, "3 packs of up to 100 tokens, at most 300 tokens"),
        ({"gradient_accumulation_steps": 2}, "2 packs of up to 100 tokens, at most 200 tokens"),
        ({"packing": False}, "1 sample of up to 100 tokens, at most 100 tokens"),
        (
            {"packing": False, "batch_tokens": 300, "gradient_accumulation_steps": 2},
            "2 x samples of similar length, at most 600 tokens with padding",
        ),
        (
            {"stage": "TTS", "batch_seconds": 40, "gradient_accumulation_steps": 3},
            "3 x samples of similar length, at most 120 seconds with padding",
        ),
    ],
    ids=str,
)
def test_the_global_batch_is_told(values: dict, batch: str) -> None:
    needed = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t", "max_seq_len": 100}
    config = Config.from_mapping(needed | values)
    assert dict(derived_numbers(config, 1, "unknown"))["global batch"] == batch


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({}, "depend on the data; --data counts them"),
        ({"max_steps": 1200}, "1,200"),
        ({"do_train": False, "do_eval": True, "eval_dataset_path": "e"}, "none: do_train is false"),
    ],
    ids=str,
)
def test_the_steps_are_told(values: dict, steps: str, tmp_path: Path) -> None:
    needed = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t", "data_cache_dir": str(tmp_path)}
    assert dict(derived_numbers(Config.from_mapping(needed | values), 1, "unknown"))["steps"] == steps

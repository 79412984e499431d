"""The parameters of stage DISTILL act, and what it refuses is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from erniekit.config import Config
from erniekit.errors import ConfigurationError, ModelFileError
from tests.tiny_runs import save_random_model

Train = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny_teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same tokens and another shape."""
    shape = tmp_path_factory.mktemp("teacher-shape")
    shutil.copytree(tiny_model, shape, dirs_exist_ok=True)
    config = json.loads((shape / "config.json").read_text())
    # a wide distribution, so that temperatures and divergences differ
    config |= {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "initializer_range": 0.5}
    (shape / "config.json").write_text(json.dumps(config))
    return save_random_model(shape, tmp_path_factory.mktemp("teacher"), seed=11)


@pytest.fixture
def distill(train: Train, tiny_teacher: Path) -> Train:
    """A short run towards the teacher."""

    def run(**parameters: Any) -> Any:
        values = {"stage": "DISTILL", "teacher_model_name_or_path": str(tiny_teacher), "max_steps": 3}
        return train(**{**values, **parameters})

    return run


@pytest.mark.proves("teacher_model_name_or_path", "stage")
def test_the_student_comes_closer_to_its_teacher(distill: Train, tiny_teacher: Path, tiny_base: Path) -> None:
    run = distill(max_steps=12, do_eval=True, eval_split=0.2, eval_steps=12, max_evaluate_steps=-1)
    assert f"teacher: {tiny_teacher}" in run.said
    assert run.losses[-1] < 0.9 * run.losses[0]
    entry = next(each for each in run.log if "divergence" in each)
    assert entry["loss"] == pytest.approx(entry["divergence"], rel=1e-5)
    evaluated = next(each for each in run.log if "eval_loss" in each)
    assert {"eval_divergence", "eval_teacher_agreement", "eval_token_accuracy", "eval_sft_loss"} <= evaluated.keys()
    other = distill(teacher_model_name_or_path=str(tiny_base))
    assert other.losses[0] != pytest.approx(run.losses[0], rel=1e-3)


@pytest.mark.proves("distill_divergence", "jsd_beta", "distill_temperature", "distill_sft_share")
def test_each_setting_of_the_loss_acts(distill: Train) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"distill_divergence": "reverse_kl"},
        {"distill_divergence": "jsd"},
        {"distill_divergence": "jsd", "jsd_beta": 0.2},
        {"distill_temperature": 2.0},
        {"distill_sft_share": 0.5},
    ]
    losses = [distill(max_steps=1, **each).losses[0] for each in settings]
    assert len({round(loss, 5) for loss in losses}) == len(losses), losses
    half = distill(max_steps=1, distill_sft_share=0.5)
    entry = next(each for each in half.log if "sft_loss" in each)
    assert entry["loss"] == pytest.approx((entry["divergence"] + entry["sft_loss"]) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher_model_name_or_path": ""}, "is required and not set"),
        ({"jsd_beta": 1.0, "distill_divergence": "jsd"}, "jsd_beta"),
        ({"distill_temperature": 0.0}, "distill_temperature"),
        ({"distill_sft_share": 1.5}, "distill_sft_share"),
        ({"pipeline_parallel_degree": 2}, "stage DISTILL has no pipelines"),
    ],
)
def test_what_cannot_work_is_refused(make_config: Callable[..., Config], values: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_config(**{"stage": "DISTILL", "teacher_model_name_or_path": "somewhere", **values})


@pytest.mark.parametrize("name", ["use_fused_head_and_loss_fn", "use_sparse_head_and_loss_fn"])
def test_heads_are_always_in_chunks(make_config: Callable[..., Config], tiny_teacher: Path, name: str) -> None:
    config = make_config(stage="DISTILL", teacher_model_name_or_path=str(tiny_teacher), **{name: True})
    assert any(name in line and "always computes chunks" in line for line in config.messages)


def with_rows(folder: Path, rows: int, target: Path) -> Path:
    """Copy a model with another number of rows of logits: fewer, or with rows that would be the likeliest by far."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*manifest*"))
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    for name, value in tensors.items():
        if value.shape[0] == config["vocab_size"]:
            more = np.full((max(0, rows - len(value)), *value.shape[1:]), 3.0, value.dtype)
            tensors[name] = np.concatenate([value[:rows], more])
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return target


@pytest.mark.proves("teacher_model_name_or_path")
def test_a_teacher_of_another_vocabulary_is_refused(distill: Train, tiny_teacher: Path, tmp_path: Path) -> None:
    swapped, fewer = tmp_path / "swapped", with_rows(tiny_teacher, 64, tmp_path / "fewer")
    with pytest.raises(ModelFileError, match=r"has 64 rows of logits and the trained model .* tokens, differ"):
        distill(teacher_model_name_or_path=str(fewer))
    shutil.copytree(tiny_teacher, swapped, ignore=shutil.ignore_patterns("*manifest*"))
    words = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    pairs = sorted(vocabulary.items(), key=lambda each: each[1])
    (one, first), (two, second) = pairs[-2:]
    vocabulary |= {one: second, two: first}
    (swapped / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ModelFileError, match="teaches nothing"):
        distill(teacher_model_name_or_path=str(swapped))


@pytest.mark.parametrize("of_student", [False, True])
def test_rows_without_a_token_change_nothing(
    distill: Train, tiny_teacher: Path, tiny_base: Path, tmp_path: Path, of_student: bool
) -> None:
    """Rows of the teacher that no token has; and of the student, to which the teacher gives no probability."""
    rows = json.loads((tiny_teacher / "config.json").read_text())["vocab_size"]
    if of_student:
        student = with_rows(tiny_base, rows + 64, tmp_path / "student")
        taken = {"model_name_or_path": str(student), "continue_training": True, "max_steps": 2}
        equal = with_rows(tiny_teacher, rows + 64, tmp_path / "equal")
        runs = [distill(**taken, teacher_model_name_or_path=str(each)) for each in (tiny_teacher, equal)]
        assert runs[0].losses[0] > 0 and runs[0].losses != runs[1].losses  # these rows of the other one are likely
        taken |= {"distill_divergence": "jsd"}
        whole, table = distill(**taken), distill(**taken, teacher_top_k=rows)
    else:
        teacher = with_rows(tiny_teacher, rows + 64, tmp_path / "teacher")
        taken = {"teacher_model_name_or_path": str(teacher), "distill_divergence": "reverse_kl"}
        assert distill(**taken).losses == pytest.approx(distill(distill_divergence="reverse_kl").losses, rel=1e-6)
        taken |= {"distill_divergence": "jsd"}
        whole, table = distill(), distill(teacher_top_k=rows, **taken)
        whole = distill(**taken)
    assert table.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.proves("teacher_top_k")
def test_no_more_tokens_than_there_are_can_be_kept(distill: Train, tiny_teacher: Path) -> None:
    rows = json.loads((tiny_teacher / "config.json").read_text())["vocab_size"]
    with pytest.raises(ConfigurationError, match=f"teacher_top_k: {rows + 1:,} of {rows:,} tokens"):
        distill(teacher_top_k=rows + 1)


@pytest.mark.proves("teacher_top_k", "teacher_top_k_dir", "teacher_model_name_or_path")
def test_the_likeliest_tokens_are_written_once_and_read(
    distill: Train, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.build import teacher_table

    folder = tmp_path / "table"
    held_out = {"do_eval": True, "eval_split": 0.2, "eval_steps": 3, "max_evaluate_steps": -1}
    parameters = {"teacher_top_k_dir": str(folder), "distill_temperature": 1.5, **held_out}
    first = distill(teacher_top_k=4, **parameters)
    assert {each.name for each in folder.iterdir()} == {"training", "evaluation"}
    assert "samples asked" in first.said and "its 4 likeliest tokens (training)" in first.said

    def fail(*_: object) -> None:
        raise AssertionError("the teacher is not asked again")

    with monkeypatch.context() as patch:
        patch.setattr(teacher_table, "open_teacher", fail)
        again = distill(teacher_top_k=4, **parameters)
    assert again.losses == first.losses
    evaluated = [next(each["eval_loss"] for each in run.log if "eval_loss" in each) for run in (first, again)]
    assert evaluated[0] == evaluated[1]
    assert distill(teacher_top_k=16, teacher_top_k_dir="", max_steps=1).losses != first.losses[:1]
    with pytest.raises(ConfigurationError, match=r"teacher_top_k_dir: .* is not what this run needs: k 4 "):
        distill(teacher_top_k=5, **parameters)
    with pytest.raises(ConfigurationError, match="is not what this run needs: teacher "):
        distill(teacher_top_k=4, **{**parameters, "teacher_model_name_or_path": str(tiny_base)})
    with pytest.raises(ConfigurationError, match="is not what this run needs: data "):
        distill(teacher_top_k=4, **{**parameters, "eval_split": 0.3})


def test_all_tokens_on_disk_are_the_teacher_in_memory(distill: Train, tiny_model: Path) -> None:
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    parameters = {"distill_divergence": "jsd", "distill_temperature": 1.5, "distill_sft_share": 0.2}
    in_memory = distill(**parameters)
    on_disk = distill(**parameters, teacher_top_k=vocabulary)
    assert on_disk.losses == pytest.approx(in_memory.losses, rel=1e-5)
    for name in ("divergence", "teacher_agreement", "token_accuracy", "sft_loss"):
        values = [[entry[name] for entry in run.log if name in entry] for run in (on_disk, in_memory)]
        assert values[0] == pytest.approx(values[1], rel=1e-5), name


@pytest.mark.proves("on_policy_ratio", "on_policy_max_new_tokens", "on_policy_temperature")
def test_the_student_trains_on_its_own_answers(distill: Train) -> None:
    def tokens(run: Any) -> list[int]:
        return [entry["tokens"] for entry in run.log if "loss" in entry]

    settings = {"on_policy_ratio": 1.0, "on_policy_max_new_tokens": 8, "max_steps": 2}
    data, own = distill(max_steps=2), distill(**settings)
    assert tokens(own) != tokens(data)
    assert tokens(distill(**{**settings, "on_policy_max_new_tokens": 2}))[-1] < tokens(own)[-1]
    assert distill(**settings, on_policy_temperature=0).losses != own.losses


def test_own_answers_are_the_same_after_a_resume(distill: Train) -> None:
    parameters = {"on_policy_ratio": 0.5, "on_policy_max_new_tokens": 4, "max_steps": 6, "seed": 3}
    whole = distill(**parameters, save_steps=3, save_strategy="steps")
    weights = (whole.output / "model.safetensors").read_bytes()
    shutil.rmtree(whole.output / "checkpoint-6")
    again = distill(**parameters, save_strategy="no", resume_from_checkpoint=str(whole.output / "checkpoint-3"))
    assert again.losses[-3:] == whole.losses[-3:]
    assert (again.output / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher_top_k": 8, "distill_divergence": "reverse_kl"}, "`reverse_kl` is infinite"),
        ({"teacher_top_k": 8, "on_policy_ratio": 0.5}, "is not known before the first step"),
        ({"teacher_top_k": 8, "distributed_dataloader": True}, "every rank reads the samples"),
        ({"on_policy_ratio": 0.5, "distill_sft_share": 0.5}, "teaches it what it does anyway"),
        ({"on_policy_ratio": 0.5, "sharding": "stage3"}, "answers differ in length"),
        ({"on_policy_ratio": 0.5, "moe_group": "data"}, "answers differ in length"),
        ({"on_policy_ratio": 0.5, "distributed_dataloader": True}, "every rank reads the samples"),
    ],
)
def test_tables_and_own_answers_that_cannot_be_are_refused(
    make_config: Callable[..., Config], values: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_config(**{"stage": "DISTILL", "teacher_model_name_or_path": "somewhere", **values})

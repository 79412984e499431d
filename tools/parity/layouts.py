"""How far every parallel layout is from a single process after 5 AdamW steps with clipping, as a Markdown table.

    python tools/parity/layouts.py [--layouts tp2 pp2 ...] [--models dense moe] [--tasks sft lora dpo]
                                   [--at-once 1] [--write]

Every cell is training as `erniekit train` does it, on the shipped data, with evaluation and a checkpoint at every step,
from the same random weights and over the same global batches, in float32 and in float64. It holds three differences:

  losses    the largest of all steps and of the evaluation, in float32; at most 1e-5
  gradient  of the first step, in float32, relative to the largest value of its tensor; at most 1e-5
  weights   the largest after the last step, in float64; at most 1e-9

float32 weights are not compared: AdamW divides by the size of a gradient, so the rounding of one near zero becomes a
step. A layout that the project refuses has its reason under the table. `--write` puts the tables into
docs/exactness.md. Exit code 1: a difference is larger than it may be, or a rank has failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.ranks import run_ranks
from tests.runners.coded_speech import coded_speech
from tools.bench.marked import EXACTNESS, with_table
from tools.parity.layout_run import ROOT, Refused, Run, make_model, run

STEPS = 5
MICRO_BATCHES = 8  # of a step, over all ranks; pp4 x vpp2 needs as many on one
MAY_DIFFER = {"losses": 1e-5, "gradient": 1e-5, "weights": 1e-9}


@dataclass(frozen=True)
class Layout:
    """How ranks divide a run.

    Attributes:
        parameters: what a user would write.
        data: whole copies of the model that read different data, beside those of sharding.
        experts: whether it makes sense for mixtures of experts only.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    data: int = 1
    experts: bool = False

    @property
    def dp_world_size(self) -> int:
        """Ranks that read different data."""
        return self.data * self.parameters.get("sharding_parallel_degree", 1)

    @property
    def ranks(self) -> int:
        degrees = (self.parameters.get(f"{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline"))
        return self.dp_world_size * int(np.prod(list(degrees)))


def tensor(degree: int, *, sequence: bool = False) -> dict[str, Any]:
    return {"tensor_parallel_degree": degree, "sequence_parallel": sequence}


def pipeline(degree: int, virtual: int = 1) -> dict[str, Any]:
    return {"pipeline_parallel_degree": degree, "virtual_pp_degree": virtual}


def sharding(level: int, *words: str) -> dict[str, Any]:
    return {"sharding_parallel_degree": 2, "sharding": f"stage{level}", "sharding_parallel_config": words}


LAYOUTS = (
    Layout("dp2", data=2),
    Layout("tp2", tensor(2)),
    Layout("tp4", tensor(4)),
    Layout("tp2 + sp", tensor(2, sequence=True)),
    Layout("pp2", pipeline(2)),
    Layout("pp4 x vpp2", pipeline(4, virtual=2)),
    Layout("sharding1 x 2", sharding(1)),
    Layout("sharding1 x 2, split_param", sharding(1, "split_param")),
    Layout("sharding2 x 2", sharding(2)),
    Layout("sharding3 x 2", sharding(3)),
    Layout("ep2 over mp", tensor(2) | {"moe_group": "mp"}, experts=True),
    Layout("ep2 over mp + sp", tensor(2, sequence=True) | {"moe_group": "mp"}, experts=True),
    Layout("ep2 over data", {"moe_group": "data"}, data=2, experts=True),
    Layout("tp2 x pp2", tensor(2) | pipeline(2)),
    Layout("tp2 x sharding2", tensor(2) | sharding(1)),
    Layout("tp2 x sharding2, split_param", tensor(2) | sharding(1, "split_param")),
    Layout("pp2 x sharding2", pipeline(2) | sharding(1)),
    Layout("pp2 x sharding2, split_param", pipeline(2) | sharding(1, "split_param")),
    Layout("sharding2 x 2 x dp2", sharding(2), data=2),
    Layout("sharding3 x 2 x dp2", sharding(3), data=2),
    Layout("ep2 over data x sharding2", {"moe_group": "data"} | sharding(1), data=2, experts=True),
    Layout("pp2 x dp2", pipeline(2), data=2),
    Layout("tp2 x pp2 + sp", tensor(2, sequence=True) | pipeline(2)),
    Layout("tp2 x pp2 + sp, recompute", tensor(2, sequence=True) | pipeline(2) | {"recompute": True}),
)

ERNIE = {
    "model_type": "ernie4_5", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "initializer_range": 0.06, "use_bias": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense": ERNIE,
    "moe": ERNIE | {
        "model_type": "ernie4_5_moe", "tie_word_embeddings": False, "moe_num_experts": 4, "moe_k": 2,
        "moe_intermediate_size": 32, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip
MOE_PARAMETERS = {  # all that balances experts, strong enough to be seen, and a layer of multi-token prediction
    "moe_aux_loss_lambda": 0.01, "moe_z_loss_lambda": 0.01, "moe_orthogonal_loss_lambda": 0.01,
    "moe_router_bias_update_rate": 0.001, "num_nextn_predict_layers": 1,
}  # fmt: skip

COMMON = {
    "continue_training": True, "max_seq_len": 192, "packing": True, "per_device_train_batch_size": 1,
    "max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.01,
    "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "eval_steps": STEPS,
    "max_evaluate_steps": 5, "report_to": "none", "seed": 7,
}  # fmt: skip
DIALOGUES = {
    "stage": "SFT",
    "train_dataset_path": str(ROOT / "examples/data/sft-train.jsonl"),
    "eval_dataset_path": str(ROOT / "examples/data/sft-eval.jsonl"),
}
PAIRS = {
    "stage": "DPO",
    "train_dataset_path": str(ROOT / "examples/data/preference-train.jsonl"),
    "eval_dataset_path": str(ROOT / "examples/data/preference-eval.jsonl"),
    "max_prompt_len": 96,
    "sft_loss_ratio": 0.1,
}
RANKED = {
    "stage": "RM",
    "train_dataset_path": str(ROOT / "examples/data/preference-train.jsonl"),
    "eval_dataset_path": str(ROOT / "examples/data/preference-eval.jsonl"),
    "max_prompt_len": 96,
    "margin_scale": 0.5,
    "center_rewards_coefficient": 0.1,
}
VERDICTS = {
    "stage": "KTO",
    "train_dataset_path": str(ROOT / "examples/data/verdict-train.jsonl"),
    "eval_dataset_path": str(ROOT / "examples/data/verdict-eval.jsonl"),
    "max_prompt_len": 96,
    "undesirable_weight": 1.5,
}
CODES = {  # of recordings that `Comparison` writes
    "stage": "TTS",
    "train_dataset_type": "codes",
    "eval_dataset_type": "codes",
    "audio_codebook_weights": "3,1",
}
DISTILL = {"stage": "DISTILL", "distill_divergence": "jsd", "distill_sft_share": 0.25}  # a teacher is written, too
NUMBERS = {"added_token_ranges": ["{10..599}"]}  # which the records hold; two of two ranks have rows for them
TASKS: Mapping[str, Mapping[str, Any]] = {
    "sft": DIALOGUES,
    "lora": DIALOGUES | {"fine_tuning": "LoRA", "lora_rank": 4},
    "dpo": PAIRS,
    "dpo-lora": PAIRS | {"fine_tuning": "LoRA", "lora_rank": 4},
    "dpo-copy": PAIRS | {"reference_model": "copy", "ref_model_update_steps": 2},
    "kto": PAIRS | {"loss_type": "kto_pair"},
    "verdicts": VERDICTS,
    "reward-model": RANKED,
    "reward-model-lora": RANKED | {"fine_tuning": "LoRA", "lora_rank": 4},
    "new-tokens": DIALOGUES | NUMBERS,
    "new-tokens-lora": DIALOGUES | NUMBERS | {"fine_tuning": "LoRA", "lora_rank": 4},
    "new-tokens-dpo-lora": PAIRS | NUMBERS | {"fine_tuning": "LoRA", "lora_rank": 4},
    "distill": DIALOGUES | DISTILL,
    "distill-top-k": DIALOGUES | DISTILL | {"teacher_top_k": 8, "distill_temperature": 1.5},
    "distill-on-policy": DIALOGUES
    | DISTILL
    | {"distill_sft_share": 0, "on_policy_ratio": 1, "on_policy_max_new_tokens": 8, "on_policy_temperature": 0},
    "tts": CODES,
    "tts-ar-nar": CODES
    | {
        "tts_objective": "ar_nar",
        "tts_tasks": "tts continuation stt",
        "loss_factors": "0.1,0.1,1",
        "prompt_seconds": "0.05,0.1",
    },
}
IN_TABLE = ("sft", "lora", "dpo")  # others: references of other kinds, a divergence of the step, new tokens, codes


@dataclass(frozen=True)
class Differences:
    """The largest differences between two runs; see the top of this file."""

    losses: float
    gradient: float
    weights: float

    def too_large(self) -> list[str]:
        return [f"{name} {value:.1e}" for name, value in vars(self).items() if not value <= MAY_DIFFER[name]]

    def __str__(self) -> str:
        return " / ".join(f"{value:.0e}" for value in vars(self).values())


@dataclass(frozen=True)
class Failed:
    """A rank of a layout has failed, or has left other weights than the single process."""

    reason: str


Results = Mapping[tuple[str, str], Differences | Refused | Failed]  # (layout, task) -> what came out


class Comparison:
    """A model and a task on one process, against which layouts are compared.

    Args:
        folder: where models and runs are written.
        layers: of the model.
        steps: of every run.
    """

    def __init__(
        self, model: str, task: str, folder: Path, *, layers: int = 8, steps: int = STEPS, timeout: float = 240.0
    ) -> None:
        self.model, self.task, self._folder, self._steps, self._timeout = model, task, folder, steps, timeout
        if not (folder / model).exists():
            settings = {**MODELS[model], "num_hidden_layers": layers}
            run_ranks(make_model, 1, model_folder=str(folder / model), settings=settings)
        self._data: dict[str, Any] = {}
        if TASKS[task]["stage"] == "DISTILL":
            teacher = folder / "teacher"
            if not teacher.exists():
                settings = {**ERNIE, "hidden_size": 48, "num_hidden_layers": 2}
                run_ranks(make_model, 1, model_folder=str(teacher), settings=settings, seed=2)
            self._data = {"teacher_model_name_or_path": str(teacher)}
        if "train_dataset_path" not in TASKS[task]:
            codes = folder / f"codes-{task}"
            coded_speech(codes, 60)
            self._data = {"train_dataset_path": str(codes), "eval_dataset_path": str(codes)}

    def run_single_process(self) -> None:
        """Run the single process now; otherwise it runs when it is first needed."""
        _ = self._reference_float32, self._reference_float64

    def run_layout(self, layout: Layout) -> Differences | Refused:
        """Run a layout in both precisions."""
        in_float32 = self._run(layout, "float32")
        in_float64 = self._run(layout, "float64")
        for refused in (in_float32, in_float64):
            if isinstance(refused, Refused):
                return refused
        assert isinstance(in_float32, Run) and isinstance(in_float64, Run)
        return Differences(
            losses=float(np.abs(in_float32.losses - self._reference_float32.losses).max()),
            gradient=relative_difference(in_float32.gradients, self._reference_float32.gradients),
            weights=difference(in_float64.weights, self._reference_float64.weights),
        )

    @cached_property
    def _reference_float32(self) -> Run:
        return self._run_single_process("float32")

    @cached_property
    def _reference_float64(self) -> Run:
        return self._run_single_process("float64")

    def _run_single_process(self, precision: str) -> Run:
        result = self._run(Layout("one process"), precision)
        assert isinstance(result, Run), result
        return result

    def _run(self, layout: Layout, precision: str) -> Run | Refused:
        parameters = {
            **COMMON,
            "max_steps": self._steps,
            "eval_steps": self._steps,
            **TASKS[self.task],
            **self._data,
            **(MOE_PARAMETERS if self.model == "moe" else {}),
            **layout.parameters,
            "model_name_or_path": str(self._folder / self.model),
            "output_dir": str(self._folder / f"{self.model} {self.task} {layout.name} {precision}"),
            "gradient_accumulation_steps": MICRO_BATCHES // layout.dp_world_size,
        }
        return run(parameters, layout.ranks, precision, timeout=self._timeout)


def difference(own: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """The largest of all values; both must hold the same names, in float64."""
    assert own.keys() == other.keys(), sorted(own.keys() ^ other.keys())
    assert all(values.dtype == np.float64 for values in own.values()), "weights that were rounded"
    return max(float(np.abs(own[name] - other[name]).max()) for name in own)


def relative_difference(own: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """The largest of all tensors, each relative to the largest value of the tensor.

    Tensors that are zero but for rounding are measured by a millionth of the largest value of all.
    """
    assert own.keys() == other.keys(), sorted(own.keys() ^ other.keys())
    smallest_scale = 1e-6 * max(float(np.abs(values).max()) for values in other.values())
    return max(
        float(np.abs(own[name] - values).max()) / max(float(np.abs(values).max()), smallest_scale)
        for name, values in other.items()
    )


def table(model: str, tasks: Sequence[str], results: Results) -> str:
    """A row for each layout of `results`, whose keys are (layout, task), and the reasons of those refused below it."""
    reasons: list[str] = []

    def cell(result: Differences | Refused | Failed) -> str:
        if isinstance(result, Differences):
            return f"**{result}**" if result.too_large() else str(result)
        if result.reason not in reasons:
            reasons.append(result.reason)
        return f"{'refused' if isinstance(result, Refused) else '**failed**'} ({reasons.index(result.reason) + 1})"

    lines = [f"| {model} | " + " | ".join(tasks) + " |", "|---|" + "---|" * len(tasks)]
    for layout in dict.fromkeys(name for name, _ in results):
        lines.append(f"| {layout} | " + " | ".join(cell(results[layout, task]) for task in tasks) + " |")
    notes = [f"({number}) {' '.join(reason.split())}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def compare(layouts: Iterable[Layout], model: str, tasks: Sequence[str], at_once: int = 1) -> Results:
    """Every task on every layout that makes sense for the model, `at_once` of them at the same time."""
    work = [(layout, task) for layout in layouts if model == "moe" or not layout.experts for task in tasks]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        comparisons = {task: Comparison(model, task, Path(folder)) for task in tasks}
        for _ in pool.map(Comparison.run_single_process, comparisons.values()):
            pass

        def one(layout: Layout, task: str) -> Differences | Refused | Failed:
            result: Differences | Refused | Failed
            try:
                result = comparisons[task].run_layout(layout)
            except AssertionError as error:  # a rank has failed, or what runs have left does not fit together
                result = Failed(str(error))
            shown = result if isinstance(result, Differences) else result.reason
            print(f"{model}, {task}, {layout.name}: {shown}", file=sys.stderr, flush=True)
            return result

        found = pool.map(one, *zip(*work, strict=True))
        return {(layout.name, task): result for (layout, task), result in zip(work, found, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layout.name for layout in LAYOUTS]
    parser.add_argument("--layouts", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=IN_TABLE)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {EXACTNESS.relative_to(ROOT)}")
    parser.add_argument("--at-once", type=int, default=1, help="comparisons that run at the same time")
    args = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if layout.name in args.layouts]
    results = {model: compare(layouts, model, args.tasks, args.at_once) for model in args.models}
    tables = "\n\n".join(table(model, args.tasks, found) for model, found in results.items())
    print(tables)
    if args.write:
        EXACTNESS.write_text(with_table("layouts", f"\n{tables}\n", EXACTNESS), encoding="utf-8")
    wrong = [
        f"{model}, {task}, {layout}: {'failed' if isinstance(result, Failed) else ', '.join(result.too_large())}"
        for model, found in results.items()
        for (layout, task), result in found.items()
        if isinstance(result, Failed) or (isinstance(result, Differences) and result.too_large())
    ]
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()

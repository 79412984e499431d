"""Patches that let fleet's sharding (stages 1 to 3) run on CPU ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import paddle
from paddle.base import core

ALIGNMENT = 256  # bytes, as fleet uses on GPUs


class ModuleOverlay:
    """A module with some names replaced, for importers of this object only."""

    def __init__(self, module: ModuleType | ModuleOverlay, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def allow_group_sharding_on_cpu() -> None:
    """Make the CPU a custom device. Cause: stages 2 and 3 assert a GPU, an XPU or a "custom device" and copy to its
    place.

    Only in their modules is the CPU a custom device, whose place is the CPU.
    """
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 as optimizer_stage2
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 as stage2
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 as stage3
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage as storage
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_utils as utils
    import paddle.distributed.sharding.group_sharded as entry

    device = ModuleOverlay(paddle.device, get_all_custom_device_type=lambda: ["cpu"])
    paddle_here = ModuleOverlay(
        paddle, device=device, get_device=lambda: "cpu:0", CustomPlace=lambda *kind_and_number: paddle.CPUPlace()
    )
    library = ModuleOverlay(core.libpaddle, _get_device_min_chunk_size=lambda kind: ALIGNMENT)
    core_here = ModuleOverlay(core, get_all_custom_device_type=lambda: ["cpu"], libpaddle=library)
    for module in (entry, storage, optimizer_stage2, stage2, stage3, utils):
        for name, replacement in (
            ("paddle", paddle_here),
            ("core", core_here),
            ("cvt_to_device", lambda tensor, device_id, blocking=True: tensor),
        ):
            if hasattr(module, name):
                setattr(module, name, replacement)


def keep_parameters_in_their_buffer() -> None:
    """Do not convert parameters. Cause: `ParamStorage.add_rank_params` fills its buffer from `param.cpu()`, which on a
    CPU shares the parameter's memory, and then clears the parameter."""
    from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage import ParamStorage

    original = ParamStorage.add_rank_params
    ParamStorage.add_rank_params = lambda self, parameters, alignments, convert_gpu=True: original(
        self, parameters, alignments, False
    )


def align_fused_tensors() -> None:
    """Set an alignment. Cause: the buffers of stage 1 (`split_param`, `tensor_fusion`) have none for a CPU."""
    from paddle.distributed.fleet.utils import tensor_fusion_helper

    tensor_fusion_helper.alignment["cpu"] = ALIGNMENT
    tensor_fusion_helper.__dict__["__current_device_type__"] = "cpu"  # a class body would mangle the dotted name


def allow_float64_buffers() -> None:
    """Support float64. Cause: sharding's buffers know the sizes of float32 and narrower types, and start as float32 on
    a CPU.

    CPU ranks compute in float64 when tests compare layouts to more digits than float32 has.
    """
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 as optimizer_stage2
    import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 as stage3
    from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage import ParamStorage
    from paddle.distributed.fleet.utils import tensor_fusion_helper

    for module in (optimizer_stage2, stage3, tensor_fusion_helper):
        module.align[paddle.float64] = 8

    def zeros(shape: int, dtype: type) -> np.ndarray:
        return np.zeros(shape, paddle.get_default_dtype() if dtype is np.float32 else dtype)

    stage3.np = ModuleOverlay(np, zeros=zeros)
    original = ParamStorage.__init__

    def with_its_dtype(self: Any, size: int, dtype: Any, device: str) -> None:
        original(self, size, dtype, device)
        self.buffer = self.buffer.astype(dtype)

    ParamStorage.__init__ = with_its_dtype


SHARDING_PATCHES = (
    allow_group_sharding_on_cpu,
    keep_parameters_in_their_buffer,
    align_fused_tensors,
    allow_float64_buffers,
)

"""Every collective against NumPy, in every dtype, contiguous or not; each rank knows the inputs of all."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

from erniekit.distributed import cpu_backend

REDUCTIONS = {
    dist.ReduceOp.SUM: np.add.reduce,
    dist.ReduceOp.AVG: lambda parts: np.add.reduce(parts) / len(parts),
    dist.ReduceOp.MAX: np.maximum.reduce,
    dist.ReduceOp.MIN: np.minimum.reduce,
    dist.ReduceOp.PROD: np.multiply.reduce,
}
ROWS = {"few": 2, "many": 4099}  # with 4 ranks and 5 columns, below and above the size that changes the algorithm


def _inputs(size: int, rows: int, dtype: str = "float32") -> list[np.ndarray]:
    random = np.random.default_rng(rows)
    return [random.integers(-8, 9, [size * rows, 5]).astype(dtype) for _ in range(size)]


def _same(tensor: paddle.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(tensor.astype("float64").numpy(), np.asarray(expected, "float64"))


def check_all() -> list[str]:
    cpu_backend.apply()
    dist.init_parallel_env()
    group = dist.new_group(list(range(dist.get_world_size())))
    checked = []
    for check in (
        check_reductions,
        check_half_precision,
        check_gathering,
        check_spreading,
        check_all_to_all,
        check_point_to_point,
        check_strided,
        check_empty,
        check_objects,
        check_same_bits,
    ):
        check(group, dist.get_rank(), dist.get_world_size())
        checked.append(check.__name__)
    return checked


def check_reductions(group: dist.collective.Group, rank: int, size: int) -> None:
    for dtype in ("float32", "float64", "int32", "int64"):
        for rows in ROWS.values():
            parts = _inputs(size, rows, dtype)
            for op, reduction in REDUCTIONS.items():
                if op == dist.ReduceOp.AVG and dtype.startswith("int"):
                    continue
                expected = reduction(np.stack(parts))
                tensor = paddle.to_tensor(parts[rank])
                dist.all_reduce(tensor, op=op, group=group)
                _same(tensor, expected)

                piece = paddle.empty([rows, 5], dtype=dtype)
                dist.reduce_scatter(piece, list(paddle.split(paddle.to_tensor(parts[rank]), size)), op=op, group=group)
                _same(piece, expected[rank * rows : (rank + 1) * rows])
                dist.stream.reduce_scatter(piece, paddle.to_tensor(parts[rank]), op=op, group=group)
                _same(piece, expected[rank * rows : (rank + 1) * rows])

                tensor = paddle.to_tensor(parts[rank])
                dist.reduce(tensor, dst=size - 1, op=op, group=group)
                if rank == size - 1:
                    _same(tensor, expected)
                elif op != dist.ReduceOp.AVG:  # without NCCL, dist.reduce scales every rank's tensor before it adds
                    _same(tensor, parts[rank])


def check_half_precision(group: dist.collective.Group, rank: int, size: int) -> None:
    for dtype in ("float16", "bfloat16"):
        for rows in ROWS.values():
            parts = _inputs(size, rows)
            tensor = paddle.to_tensor(parts[rank]).astype(dtype)
            dist.all_reduce(tensor, group=group)
            _same(tensor, np.add.reduce(parts))  # small integers are exact in both
            assert str(tensor.dtype) == f"paddle.{dtype}"
            out = paddle.empty([size * rows * size, 5], dtype=dtype)
            dist.stream.all_gather(out, paddle.to_tensor(parts[rank]).astype(dtype), group=group)
            _same(out, np.concatenate(parts))


def check_gathering(group: dist.collective.Group, rank: int, size: int) -> None:
    for dtype in ("float32", "int64", "bool"):
        for rows in ROWS.values():
            parts = [part.astype(dtype) for part in _inputs(size, rows)]
            own = paddle.to_tensor(parts[rank])
            outs: list[paddle.Tensor] = []
            dist.all_gather(outs, own, group=group)
            for out, part in zip(outs, parts, strict=True):
                _same(out, part)
            outs = [paddle.zeros_like(own) for _ in parts]
            dist.stream.all_gather(outs, own, group=group, use_calc_stream=True)
            for out, part in zip(outs, parts, strict=True):
                _same(out, part)
            together = paddle.zeros([len(parts) * own.shape[0], 5], dtype=dtype)
            group.process_group.all_gather(own, together).wait()  # the form of fleet's sequence parallelism
            _same(together, np.concatenate(parts))
            if dtype != "bool":
                outs = []
                dist.gather(own, outs, dst=1, group=group)
                assert len(outs) == (size if rank == 1 else 0)
                for out, part in zip(outs, parts, strict=False):
                    _same(out, part)

            whole = paddle.zeros_like(own)
            start = rank * rows
            whole[start : start + rows] = own[start : start + rows]
            group.process_group.all_gather_partial(whole, whole, size, rank).wait()
            _same(whole, np.concatenate([part[i * rows : (i + 1) * rows] for i, part in enumerate(parts)]))


def check_spreading(group: dist.collective.Group, rank: int, size: int) -> None:
    for src in range(size):
        for rows in ROWS.values():
            parts = _inputs(size, rows)
            tensor = paddle.to_tensor(parts[rank])
            dist.broadcast(tensor, src=src, group=group)
            _same(tensor, parts[src])
            piece = paddle.zeros([rows, 5])
            pieces = list(paddle.split(paddle.to_tensor(parts[src]), size)) if rank == src else None
            dist.scatter(piece, pieces, src=src, group=group)
            _same(piece, parts[src][rank * rows : (rank + 1) * rows])
            dist.stream.scatter(piece, paddle.to_tensor(parts[src]), src=src, group=group)
            _same(piece, parts[src][rank * rows : (rank + 1) * rows])


def check_all_to_all(group: dist.collective.Group, rank: int, size: int) -> None:
    for rows in ROWS.values():
        parts = _inputs(size, rows)
        expected = np.concatenate([part[rank * rows : (rank + 1) * rows] for part in parts])
        outs: list[paddle.Tensor] = []
        dist.alltoall(outs, list(paddle.split(paddle.to_tensor(parts[rank]), size)), group=group)
        _same(paddle.concat(outs), expected)
        out = paddle.zeros([size * rows, 5])
        dist.stream.alltoall(out, paddle.to_tensor(parts[rank]), group=group)
        _same(out, expected)
    # rank r sends r + c rows to rank c, so every size differs, and one is 0
    sends = [[r + c for c in range(size)] for r in range(size)]
    parts = [np.arange(sum(counts) * 3).reshape(-1, 3) + 1000 * r for r, counts in enumerate(sends)]
    takes = [sends[r][rank] for r in range(size)]
    starts = [sum(sends[r][:rank]) for r in range(size)]
    out = paddle.zeros([sum(takes), 3], dtype="int64")
    dist.alltoall_single(out, paddle.to_tensor(parts[rank]), sends[rank], takes, group=group)
    expected = np.concatenate([p[s : s + t] for p, s, t in zip(parts, starts, takes, strict=True)])
    _same(out, expected)


def check_point_to_point(group: dist.collective.Group, rank: int, size: int) -> None:
    following, preceding = (rank + 1) % size, (rank - 1) % size
    for rows in ROWS.values():
        parts = _inputs(size, rows)
        out = paddle.zeros_like(paddle.to_tensor(parts[0]))
        dist.send(paddle.to_tensor(parts[rank]), dst=following, group=group)  # everyone sends first: no rendezvous
        dist.recv(out, src=preceding, group=group)
        _same(out, parts[preceding])

        # receives posted before sends, waited for in the opposite order, and a batch that starts with a receive
        first, second = paddle.zeros_like(out), paddle.zeros_like(out)
        tasks = [dist.irecv(first, preceding, group), dist.irecv(second, preceding, group)]
        dist.isend(paddle.to_tensor(parts[rank]), following, group)
        dist.isend(paddle.to_tensor(parts[rank] + 1), following, group)
        for task in reversed(tasks):
            task.wait()
        _same(first, parts[preceding])
        _same(second, parts[preceding] + 1)
        out = paddle.zeros_like(out)
        batch = [
            dist.P2POp(dist.irecv, out, preceding, group),
            dist.P2POp(dist.isend, paddle.to_tensor(parts[rank] * 2), following, group),
        ]
        for task in dist.batch_isend_irecv(batch):
            task.wait()
        _same(out, parts[preceding] * 2)

        out = paddle.zeros_like(out)
        process_group = group.process_group
        process_group.send_partial(paddle.to_tensor(parts[rank]), following, size, 1)
        process_group.recv_partial(out, preceding, size, 1)
        expected = np.zeros_like(parts[0])
        expected[rows : 2 * rows] = parts[preceding][rows : 2 * rows]
        _same(out, expected)


def check_strided(group: dist.collective.Group, rank: int, size: int) -> None:
    parts = _inputs(size, ROWS["many"])
    tensor = paddle.to_tensor(parts[rank]).transpose([1, 0])
    assert not tensor.is_contiguous()
    dist.all_reduce(tensor, group=group)
    _same(tensor, np.add.reduce(parts).T)
    whole = paddle.zeros([7, size * ROWS["many"], 9])
    view = whole[2, :, 3:8]  # a strided view with an offset, when Paddle makes views
    assert not view.is_contiguous()
    paddle.assign(paddle.to_tensor(parts[rank]), view)
    dist.broadcast(view, src=1, group=group)
    _same(view, parts[1])


def check_empty(group: dist.collective.Group, rank: int, size: int) -> None:
    tensor = paddle.zeros([0, 5])
    dist.all_reduce(tensor, group=group)
    out = paddle.zeros([0, 5])
    dist.alltoall_single(out, tensor, [0] * size, [0] * size, group=group)
    assert out.shape == [0, 5]
    dist.barrier(group)


def check_objects(group: dist.collective.Group, rank: int, size: int) -> None:
    outs: list = []
    dist.all_gather_object(outs, {"rank": rank, "text": "x" * rank}, group=group)
    assert outs == [{"rank": r, "text": "x" * r} for r in range(size)]


def check_same_bits(group: dist.collective.Group, rank: int, size: int) -> None:
    """Sums of fractions, whose last bits depend on the order, are equal on all ranks, and equal to the sum in order."""
    for rows in ROWS.values():
        random = np.random.default_rng(7)
        parts = [random.standard_normal([rows * size, 5]).astype("float32") for _ in range(size)]
        tensor = paddle.to_tensor(parts[rank])
        dist.all_reduce(tensor, group=group)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        np.testing.assert_array_equal(tensor.numpy(), total)

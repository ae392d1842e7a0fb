"""Tensors that an engine reduces on their own devices; on GPUs that is NCCL, which takes one rank per GPU."""

from multiprocess import launching


def test_the_engines_own_all_reduce_gives_the_same_results(tmp_path):
    found = launching.launch(launching.ranks("device_rank.py", size=2), tmp_path, 600.0)
    assert set(found.codes) == {0}, found.output
    expected = {
        "sum": [[[6.0, 6.0]] * 3] * 2,
        "mean of integers": [0.5, 7.0],
        "max in place": [[[3.0, 3.0]] * 3] * 2,
        "is written": True,
        "by way of the host too": [[[2.0, 2.0]] * 3, [2] * 4],
        "explained": "1 value by NCCL all-reduce: the engine's own all-reduce, on the devices they are on",
        "ring": "pack 0 (1 value of float32): sends one partial result in float32 to every other process, "
        "24 bytes",
        "shards": {
            "same bits": True,
            "compared": 2 * (4 * 7 - 1) * 8,
            "integers": {
                "mean": ["torch.float64", True],
                "min": ["torch.int64", True],
                "max": ["torch.int64", True],
            },
            "in out": [True, [1.0, 3.0, 5.0, 7.0, 9.0]],
            "several replicas": [2.0, 6.0, 10.0, 14.0, 18.0],
            "all-to-alls": 2 * (4 * 7 - 1) * (1 + 4) + (2 + 1 + 1) + 1,
            "explained": "1 value by NCCL shards: the engine's all-to-all of shards, one fused pass on the "
            "devices they are on, and the engine's all-gather",
        },
    }
    assert found.reports == {0: expected, 1: expected}

import pytest


def test_accumulation_is_measured(benchmark, capsys):
    benchmark.measure_accumulation(32, rounds=1)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("a micro-batch of 13,216 parameters in 16 tensors")
    assert "ns a parameter" in line


@pytest.mark.more("one more launch")
def test_a_step_of_one_worker_is_measured(benchmark, capsys):
    benchmark.measure_steps([1], rounds=1, texts=2)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("a step on 1 workers, 383,232 parameters")

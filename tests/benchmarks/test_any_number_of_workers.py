def test_accumulation_and_a_step_of_one_worker_are_measured(benchmark, capsys):
    benchmark.measure_accumulation(32, rounds=1)
    benchmark.measure_steps([1], rounds=1, texts=2)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a micro-batch of 13,216 parameters in 16 tensors")
    assert "ns a parameter" in first
    assert second.startswith("a step on 1 workers, 383,232 parameters")

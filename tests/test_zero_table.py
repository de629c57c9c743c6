"""The ZeRO paper's table: its memory from shapes alone, the rest from programs for H100s."""

import dataclasses
import json
import math

import jax
import pytest
from example_runs import assert_refused, load
from jax.sharding import AbstractMesh

import zerojax


@pytest.fixture(scope="module")
def example():
    return load("zero_table")


@pytest.mark.parametrize("stage, gigabytes", list(enumerate([120, 31.4, 16.6, 1.9])))
def test_the_paper(example, stage, gigabytes):
    plan = example.STAGES[stage]
    part, tx = example.sharded(plan, AbstractMesh((64, 1), ("data", "model")))
    report = zerojax.memory(part, tx)
    assert report.elements == pytest.approx(7.5e9, rel=0.01)
    assert report.bytes("model states") == pytest.approx(gigabytes * 1e9, rel=0.03)
    # For each parameter: itself and its gradient in bfloat16, float32 master, mean and variance.
    cut = {
        "parameters": stage == 3,
        "gradients": stage >= 2,
        "master": stage >= 1,
        "mu": stage >= 1,
    }
    for name, sharded in cut.items():
        size = 4 if name in ("master", "mu") else 2
        assert report.bytes(name) == size * report.elements // (64 if sharded else 1)
    assert example.paper_bytes(plan) == pytest.approx(gigabytes * 1e9, rel=0.015)  # 1.9 is 1.875


def test_models_have_the_parameters_that_they_are_called_by(example):
    for model in (example.GPT_7B, example.GPT_175B, example.GPT_2M):
        size = sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes()))
        assert size == pytest.approx(model.parameters, rel=0.01)


@pytest.mark.gpu_compile
def test_two_programs(example, tmp_path, capsys):
    numbers, picture = tmp_path / "table.json", tmp_path / "table.png"
    example.main(["--quick", "--batch", "1", "--json", str(numbers), "--plot", str(picture)])
    out, err = capsys.readouterr()
    assert out.count("| on each device") == 2 and max(map(len, out.splitlines())) <= 100
    assert "\ncompiling 2 of 2: 1.7 M on 8, tensor 2, stage 3\n" in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    data, tensor = json.loads(numbers.read_text())["columns"]
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(example.GPT_2M.shapes()))
    batch = 4 * example.LENGTH
    # Parameters, master and moments, Adam's count, tokens.
    assert data["arguments"] == (2 + 3 * 4) * size // 8 + 4 + batch
    assert data["states"] == 16 * size // 8 + 4
    assert data["peak"] >= data["arguments"] + data["temporary"] and data["fits"]
    # Gathered by layer, again in the backward pass (the embedding once), reduce-scattered.
    embed = example.GPT_2M.words * example.GPT_2M.width
    ends = embed + example.GPT_2M.width  # and the last norm
    assert data["theory"] == 2 * (3 * size - ends) * 7 // 8
    assert 0 < data["hidden"] <= 1 and 0 <= data["waiting"] < data["step"]
    assert (data["tensor"], tensor["tensor"] > 0) == (0, True)
    assert tensor["sent"] < data["sent"] / 2  # of half a model, between 4


@pytest.mark.gpu_compile
def test_a_model_that_is_not_what_it_is_called(example):
    model = dataclasses.replace(example.GPT_2M, parameters=1.8e6)
    with pytest.raises(AssertionError, match=r"1\.7 M on 8: .* bytes, by the paper 3,600,000"):
        example.measure(example.Plan(model, 8, 3), 1)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--batch 0", "--batch 0: expected at least 1"),
        ("--batch many", "--batch: invalid int value: 'many'"),
        ("--json nowhere/table.json", "nowhere/table.json: there is no folder nowhere"),
        ("--plot nowhere/table.png", "nowhere/table.png: there is no folder nowhere"),
        ("--plot table.doc", "--plot table.doc: expected a picture's name, such as table.png"),
        ("--plot table", "--plot table: expected a picture's name"),
        ("", "topology: needs jax's CUDA compiler"),
    ],
)
def test_wrong_argument(flags, message, example, monkeypatch, capsys):
    def topology(chip):
        raise ImportError("topology: needs jax's CUDA compiler")

    monkeypatch.setattr(zerojax, "topology", topology)
    assert_refused(example, flags.split(), message, capsys)

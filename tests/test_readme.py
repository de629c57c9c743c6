"""The README's examples, which `make test` runs as they stand, on the other kind of mesh too.

And what it says of a flax script: applied to the script, the change shards it.
"""

import doctest
import pathlib

import jax
import numpy as np

from tests.conftest import compilations

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_quick_start_works_on_auto_axes():
    text = README.read_text()
    explicit = 'jax.make_mesh((8,), ("data",))'
    auto = 'jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))'
    assert explicit in text
    example = doctest.DocTestParser().get_doctest(
        text.replace(explicit, auto), {}, "README.md on Auto axes", str(README), 0
    )
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example).failed == 0


def test_quick_start_is_short():
    start = README.read_text().partition("## Quick start")[2].partition("```python")[2]
    lines = start.partition("```")[0].strip().splitlines()
    assert len([line for line in lines if line.startswith((">>>", "..."))]) <= 15


def flax_section(language):
    section = README.read_text().partition("## In a flax training script")[2]
    return section.partition(f"```{language}\n")[2].partition("```")[0]


def patched(script, diff):
    """The script with a diff applied: its lines in their order, added ones where they stand."""
    done, rest = [], script.splitlines()
    for line in diff.splitlines():
        sign, text = line[0], line[2:]
        if sign != "+":
            at = rest.index(text)
            done, rest = done + rest[:at], rest[at + 1 :]
        if sign != "-":
            done.append(text)
    return "\n".join(done + rest)


def run_flax_script(script, capsys):
    names = {}
    with compilations() as compiled:
        exec(compile(script, str(README), "exec"), names)
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    return names["state"], losses, [name for name in compiled if "train_step" in name]


def test_the_change_of_a_flax_script_shards_it_and_keeps_its_losses(capsys):
    script, diff = flax_section("python"), flax_section("diff")
    changes = [line for line in diff.splitlines() if "import" not in line]
    assert [line[0] for line in changes] == ["-", "+"]
    plain, expected, plain_compiled = run_flax_script(script, capsys)
    state, losses, compiled = run_flax_script(patched(script, diff), capsys)

    assert len(losses) == 10 and losses[-1] < losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # float32, added up in another order
    # The second time for the step, which flax makes a Python number.
    assert len(compiled) == len(plain_compiled) == 2
    for mine, whole in zip(*map(jax.tree.leaves, (state, plain)), strict=True):
        assert whole.addressable_shards[0].data.nbytes == whole.nbytes
        assert mine.shape == whole.shape
    held = [
        sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
        for tree in (state.params, plain.params, state.opt_state, plain.opt_state)
    ]
    assert held[0] == held[1]
    assert held[2] - 4 == (held[3] - 4) / 8  # the count is whole

"""The README's examples, which `make test` runs as they stand, on the other kind of mesh too."""

import doctest
import pathlib

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

"""Products of options in a test table: every pair by default, everything with `-m full`."""

import itertools

import pytest


def product(**options):
    """`pytest.param`s of all combinations; those that add no new pair are marked `full`.

    Args:
      **options: for each argument name its values.

    Returns:
      `(names, params)`, the two arguments of `pytest.mark.parametrize`.
    """
    names = list(options)
    combinations = list(itertools.product(*options.values()))

    def pairs(values):
        return set(itertools.combinations(enumerate(map(repr, values)), 2))

    open_ = set().union(*map(pairs, combinations))
    chosen = set()
    while open_:
        best = max(combinations, key=lambda values: len(pairs(values) & open_))
        chosen.add(best)
        open_ -= pairs(best)
    params = [
        pytest.param(*values, marks=[] if values in chosen else [pytest.mark.full])
        for values in combinations
    ]
    return ", ".join(names), params

"""The flax.linen example stops on eight devices and goes on on four as if it had not stopped."""

import numpy as np
import pytest
from example_runs import assert_refused, load


@pytest.fixture(scope="module")
def example():
    example = load("flax_linen_train_state")
    example.LAYERS, example.WIDTH = 2, 24
    return example


def test_a_resumed_run_takes_the_steps_of_one_that_never_stopped(example, tmp_path, capsys):
    whole = example.main(["--steps", "6"])
    there = ["--checkpoint", str(tmp_path / "run")]
    stopped = example.main(["--steps", "3", *there])
    resumed = example.main(["--steps", "6", "--resume", "--devices", "4", *there])
    assert len(stopped) == len(resumed) == 3
    assert stopped == whole[:3]  # the same program on the same devices: the same bits
    # Four devices add up in another order than eight: float32's rounding, which adam amplifies.
    np.testing.assert_allclose(resumed, whole[3:], rtol=1e-5)
    assert whole[-1] < whole[0]
    printed = capsys.readouterr().out
    assert printed.count("ZeRO stage 3 on mesh(data=8)") == 2
    assert printed.count("ZeRO stage 3 on mesh(data=4)") == 1
    assert printed.count("of 297 digits of other people are recognised") == 3


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--resume", "--resume: needs --checkpoint"),
        ("--resume --checkpoint {empty}", "--resume: there is no checkpoint in {empty}"),
        ("--devices 3", "--devices: invalid choice: 3"),
        ("--stage 4", "--stage: invalid choice: 4"),
        ("--steps two", "--steps: invalid int value: 'two'"),
    ],
)
def test_wrong_argument(flags, message, example, tmp_path, capsys):
    flags, message = (text.format(empty=tmp_path) for text in (flags, message))
    assert_refused(example, flags.split(), message, capsys)

"""StepSpec: what it accepts, and what `step=` and `optimizer=` mean together."""

import pytest

from nemo_like import StepSpec
from nemo_like.options import OPTIMIZERS


def test_the_defaults_are_the_plainest_loop():
    step = StepSpec.of(None)
    assert step == StepSpec(1, "every", True, "free", "adamw", None)
    assert not step.accumulates and step.changed == {}


def test_gradients_are_there_with_microbatches_and_where_they_are_zeroed():
    assert StepSpec(microbatches=2).accumulates and StepSpec(zero_grad="zero").accumulates


def test_the_optimizer_is_said_once():
    assert StepSpec.of(None, "sgd").optimizer == "sgd"
    assert StepSpec.of(StepSpec(microbatches=2), "sgd") == StepSpec(microbatches=2, optimizer="sgd")
    assert StepSpec.of(StepSpec(optimizer="sgd"), "sgd").optimizer == "sgd"
    with pytest.raises(ValueError, match="optimizer is 'adamw-fused' and step has 'sgd'"):
        StepSpec.of(StepSpec(optimizer="sgd"), "adamw-fused")


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_every_optimizer_is_accepted(word):
    assert StepSpec(optimizer=word).optimizer == word


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(microbatches=0), "microbatches is 0"),
        (dict(microbatches=True), "microbatches is True"),
        (dict(sync="first"), "sync is 'first'; it must be one of every, last"),
        (dict(keeps_output=1), "keeps_output is 1"),
        (dict(zero_grad=False), "zero_grad is False"),
        (dict(zero_grad="zeros"), "Did you mean 'zero'"),
        (dict(optimizer="adamm"), "optimizer is 'adamm'; it must be one of adamw, .* Did you mean 'adamw'"),
        (dict(loss_fn="mean"), "loss_fn is 'mean'"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        StepSpec(**arguments)


def test_something_else_is_no_step():
    with pytest.raises(TypeError, match="step is 4"):
        StepSpec.of(4)

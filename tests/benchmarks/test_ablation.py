"""`benchmarks/autocast_cost.py` leaves out what it says: it reaches into private tables."""

import autocast_cost
import jax
import jax.numpy as jnp
import models
import pytest

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")
CASES = (
    ("gpt_case", {"layers": 1, "batch": 2, "length": 16, "dim": 32, "heads": 2, "vocab": 64}),
    ("resnet_case", {"batch": 2, "size": 32, "blocks": (1, 1), "width": 8, "classes": 10}),
)


def traced():
    programs = []
    for name, sizes in CASES:
        loss_fn, shapes = getattr(models, name)(None, **sizes)
        programs.append(str(jax.make_jaxpr(jax.grad(amp.autocast(loss_fn, jnp.float16)))(*shapes)))
    return programs


@pytest.mark.parametrize("rule", [rule for rule in autocast_cost.WITHOUT if rule != "nothing" and "save" not in rule])
@pytest.mark.sweep(5)
def test_a_rule_that_is_left_out_changes_a_program(rule):
    with autocast_cost.WITHOUT[rule]():
        without = traced()
    assert without != traced()

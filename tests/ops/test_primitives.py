"""A primitive that is new to the package needs one line, in the table of primitives."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import jmp_amp as amp
from jmp_amp._autocast._api import planner_of
from jmp_amp._ops import RULES

X = jnp.linspace(0.5, 2, 64).reshape(8, 8)

toy_root_p = Primitive("toy_root")
toy_root_p.def_impl(lax.sqrt)
toy_root_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(toy_root_p, mlir.lower_fun(lax.sqrt, multiple_results=False))
ad.defjvp(toy_root_p, lambda t, x: lax.div(lax.mul(t, jnp.ones_like(x) / 2), toy_root_p.bind(x)))


@pytest.fixture
def toy_root(monkeypatch):
    monkeypatch.setitem(RULES, "toy_root", RULES["sqrt"])
    planner_of.cache_clear()
    yield toy_root_p.bind
    planner_of.cache_clear()


def follows(root, w):
    return root(X @ w)


def folds_a_constant(root, w):
    return (X @ w) * root(jnp.float32(1e10))


def reads_a_norm(root, w):
    h = X @ w
    return jnp.log(2 - h / root(jnp.sum(h * h, -1, keepdims=True)))


def cancels_squares(root, w):
    h = X @ w
    norms = jnp.sum(h * h, -1)
    return norms[:, None] + norms[None] - 2 * h @ h.T + root(norms)[None]


def takes_a_root_at_the_edge(root, w):
    return root(1 - X @ w)


PROGRAMS = [follows, folds_a_constant, reads_a_norm, cancels_squares, takes_a_root_at_the_edge]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_autocast_treats_it_by_its_line_alone(toy_root, program):
    def decisions(root, **options):
        jaxpr = jax.make_jaxpr(amp.autocast(lambda w: program(root, w), "bfloat16", **options))(X)
        return str(jaxpr).replace("toy_root", "sqrt").replace("[accuracy=None]", "")

    assert decisions(toy_root) == decisions(lax.sqrt)
    assert decisions(toy_root, residual_stream="low") == decisions(lax.sqrt, residual_stream="low")
    assert decisions(toy_root, rules={toy_root_p: "full"}) == decisions(lax.sqrt, rules={lax.sqrt_p: "full"})


def test_explain_and_the_check_of_loss_scaling_know_it(toy_root):
    (row,) = amp.explain(lambda w: toy_root(X @ w))(X).select(direction="forward", primitive="toy_root").rows
    assert (row.op_class, row.why) == ("follow", "readers")

    def step(root, state, w):
        _, grads = amp.value_and_grad(lambda w: jnp.sum(w**2), opt_state=state)(w)
        updates, state = tx.update(root(grads * grads), state, w)
        return w + updates, state

    tx = amp.dynamic_loss_scale(optax.sgd(0.1))
    amp.debug.check_loss_scaling(lambda state, w: step(toy_root, state, w))(tx.init(X), X)
    with pytest.raises(ValueError, match="scale"):
        amp.debug.check_loss_scaling(lambda state, w: step(lambda x: x, state, w))(tx.init(X), X)

"""A format that is added to the table can be named wherever a format can, and error messages list it."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxprs import products

import jmp_amp as amp
from jmp_amp._formats import FORMATS, Format

pytestmark = pytest.mark.usefixtures("toy")
W, X = {"w": jnp.ones((8, 2))}, jnp.ones((4, 8))
TOY, FLOAT16 = ({f"{d} {d} -> {d}"} for d in ("bfloat16", "float16"))


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(FORMATS, "toy", Format("toy", jnp.dtype("bfloat16")))


def loss_fn(params, x):
    with jax.named_scope("layer"):
        return jnp.mean(x @ params["w"])


def test_autocast_computes_in_it():
    assert products(amp.autocast(loss_fn, "toy"), W, X) == TOY
    assert amp.explain(loss_fn, "toy")(W, X).summary()["dtype"] == "toy"


def test_regions_and_rules_name_it():
    def in_region(params, x):
        with amp.precision("toy"):
            return loss_fn(params, x)

    assert products(amp.autocast(in_region), W, X) == TOY
    assert products(amp.autocast(loss_fn, rules={"layer": "toy"}), W, X) == TOY
    assert products(amp.autocast(loss_fn), W, X) == FLOAT16


@pytest.mark.parametrize("policy", ["p=f32,c=toy,o=f32", "params=float32,compute=toy,output=float32"])
def test_policies_name_it(policy):
    parsed = amp.get_policy(policy)
    assert parsed == amp.Policy("float32", "toy", "float32")
    assert (parsed.compute_dtype, parsed.compute_format) == (jnp.dtype("bfloat16"), "toy")
    assert amp.get_policy(str(parsed)) == parsed
    assert parsed.with_rules({"layer": "full"}).compute_format == "toy"
    assert dataclasses.replace(parsed, compute_dtype="float16") == amp.get_policy("mixed_float16")
    assert amp.get_policy("c=toy").output_dtype == jnp.bfloat16
    assert products(amp.autocast(loss_fn, policy), W, X) == TOY


@pytest.mark.parametrize(("level", "stored"), [("O1", "float32"), ("O2", "bfloat16")])
def test_initialize_takes_it(level, stored):
    fun, params, tx = amp.interop.apex.initialize(loss_fn, W, optax.sgd(0.1), level, dtype="toy")
    assert params["w"].dtype == stored
    assert products(fun, params, X) == TOY
    assert amp.get_loss_scale(tx.init(params)) == 1  # its range is that of float32


def test_the_tools_take_it():
    params = {"w": jnp.ones(4)}
    assert amp.debug.underflow(params, dtype="toy").rows
    assert "toy" in str(amp.debug.compare(loss_fn, ["toy"])(W, X))


ALLOWED = r"float16, bfloat16, float32, float8.*, toy"


@pytest.mark.parametrize(
    "call",
    [
        lambda: amp.autocast(loss_fn, "int8"),
        lambda: amp.precision("int8"),
        lambda: amp.autocast(loss_fn, rules={"layer": "int8"}),
        lambda: amp.Policy("float32", "int8", "float32"),
        lambda: amp.interop.apex.initialize(loss_fn, W, optax.sgd(0.1), dtype="int8"),
        lambda: amp.explain(loss_fn, "int8"),
        lambda: amp.debug.underflow(W, dtype="int8"),
    ],
    ids=["autocast", "precision", "rule", "policy", "initialize", "explain", "underflow"],
)
def test_errors_list_it(call):
    with pytest.raises(ValueError, match=ALLOWED):
        call()


def test_the_error_of_a_policy_string_lists_it():
    with pytest.raises(ValueError, match=r"For `compute` also .*`toy`"):
        amp.get_policy("c=int8")

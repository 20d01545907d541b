"""`autocast(attention=)`: which attention is found, what the kernel gets, and that the function stays the same."""

import functools

import attention_forms as forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._api import parse_settings, planner_of
from jmp_amp._autocast._attention import with_kernel
from jmp_amp._autocast._plan import Region

pytestmark = pytest.mark.usefixtures("users_code")


def arrays(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


class Kernel:
    """JAX's attention, which keeps the arguments of its calls."""

    def __init__(self, refuses=lambda **options: None):
        self.calls, self.refuses = [], refuses

    def __call__(self, query, key, value, **options):
        self.refuses(**options)
        self.calls.append({"query": query, "key": key, "value": value, **options})
        width = value.shape[-1]
        value = jnp.pad(value, [(0, 0)] * 3 + [(0, max(key.shape[-1] - width, 0))])
        wider = [(0, 0)] * 3 + [(0, value.shape[-1] - key.shape[-1])]
        return jax.nn.dot_product_attention(jnp.pad(query, wider), jnp.pad(key, wider), value, **options)[..., :width]

    @property
    def options(self):
        """The options of the last call that are set, arrays as their shapes."""
        named = {name: getattr(x, "shape", x) for name, x in self.calls[-1].items() if name not in ("scale", "value")}
        return {name: x for name, x in named.items() if x is not None and x is not False}


def in_float32(fun, kernel):
    """Returns `fun` with the kernel in place of its attention, in the dtypes of the program, and what was found."""
    options = parse_settings("float32", attention=kernel)

    def call(*args):
        closed, leaves, rebuild = jx.trace_call(fun, args, {})
        program, call.found = with_kernel(closed, planner_of(options.options), Region(options.format), kernel)
        return rebuild(jax.core.eval_jaxpr(*jx.open_jaxpr(program), *leaves))

    return call


def scalar(fun):
    """The loss: its gradients with respect to all arguments are read, each element by another factor."""

    def loss(*args):
        outs = [x for x in jax.tree.leaves(fun(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in outs)

    return loss


def assert_same(fun, other, *args, atol=2e-5):
    """Both have one value and one gradient, to rounding for the size of the largest gradient."""
    n = tuple(range(len(args)))
    run = jax.jit(lambda *args: [jax.value_and_grad(scalar(f), n, allow_int=True)(*args) for f in (fun, other)])
    (value, grads), (other_value, other_grads) = run(*args)
    np.testing.assert_allclose(value, other_value, rtol=1e-4, atol=1e-4)
    floats = [
        (x, y) for x, y in zip(*map(jax.tree.leaves, (grads, other_grads)), strict=True) if x.dtype == jnp.float32
    ]
    largest = max(float(jnp.max(jnp.abs(x))) for x, _ in floats)
    for x, y in floats:
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol * largest)


def check(fun, *args, calls=1, **expected):
    """Finds attention in `fun`, once, and compares the program with it; returns the options that the kernel got."""
    kernel = Kernel()
    fused = in_float32(fun, kernel)
    assert_same(fun, fused, *args)
    assert [each.why for each in fused.found if not each.kernel] == []
    assert len(fused.found) == calls
    assert {name: kernel.options.get(name) for name in expected} == expected
    return kernel.options


@pytest.mark.parametrize("variant", forms.variants(36), ids=forms.name_of)
def test_attention_is_found_however_it_is_written(variant):
    attend, shapes = forms.attention(**variant)
    _, said = forms.FLAGS[variant.get("flags", "none")]
    options = check(attend, *arrays(*shapes))
    if said is None:
        assert options["mask"] == (1, 1, forms.LENGTH, forms.KEYS)
    else:
        assert {name: x for name, x in options.items() if name not in ("query", "key")} == said


@pytest.mark.slow
@pytest.mark.parametrize("variant", forms.variants(236)[36:], ids=forms.name_of)
def test_attention_is_found_in_random_combinations(variant):
    test_attention_is_found_however_it_is_written(variant)


@pytest.mark.parametrize("name", forms.ALMOST)
def test_what_is_almost_attention_stays_as_it_is_written(name):
    kernel, shape = Kernel(), (forms.BATCH, forms.KEYS, forms.HEADS, forms.FEATURES)
    fused = in_float32(forms.ALMOST[name], kernel)
    jaxpr = jax.make_jaxpr(forms.ALMOST[name])(*arrays(shape, shape, shape))
    assert str(jax.make_jaxpr(fused)(*arrays(shape, shape, shape))) == str(jaxpr)
    assert not [each for each in fused.found if each.kernel]

"""`autocast(attention=)`: which attention is found, what the kernel gets, and that the function stays the same."""

import functools

import attention_forms as forms
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jaxprs import equations
from programs import PROGRAMS as ALL_PROGRAMS

import jmp_amp as amp
from jmp_amp import _jaxpr as jx
from jmp_amp._attention import Scope, _program, with_kernel

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

    def call(*args):
        closed, leaves, rebuild = jx.trace_call(fun, args, {})
        program, call.found = with_kernel(closed, kernel, jnp.float32, Scope())
        return rebuild(jax.core.eval_jaxpr(*jx.open_jaxpr(program), *leaves))

    return call


def scalar(fun):
    """The loss: its gradients with respect to all arguments are read, each element by another factor."""

    def loss(*args):
        outs = [x for x in jax.tree.leaves(fun(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in outs)

    return loss


def assert_same_value(fun, other, *args):
    for x, y in zip(*jax.jit(lambda *args: [jax.tree.leaves(f(*args)) for f in (fun, other)])(*args), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


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


def check(fun, *args, calls=1, same=assert_same, **expected):
    """Finds attention in `fun`, once, and compares the program with it; returns the options that the kernel got."""
    kernel = Kernel()
    fused = in_float32(fun, kernel)
    same(fun, fused, *args)
    assert [each.why for each in fused.found if not each.kernel] == []
    assert len(fused.found) == calls
    assert {name: kernel.options.get(name) for name in expected} == expected
    return kernel.options


@pytest.mark.sweep(6)
@pytest.mark.parametrize("variant", forms.variants(37), ids=forms.name_of)
def test_attention_is_found_however_it_is_written(variant):
    check_variant(variant, assert_same_value)


def check_variant(variant, same):
    attend, shapes = forms.attention(**variant)
    _, said = forms.FLAGS[variant.get("flags", "none")]
    options = check(attend, *arrays(*shapes), same=same)
    if said is None:
        assert options["mask"] == (1, 1, forms.LENGTH, forms.KEYS)
    else:
        assert {name: x for name, x in options.items() if name not in ("query", "key")} == said


@pytest.mark.slow
@pytest.mark.parametrize("variant", forms.variants(237), ids=forms.name_of)
def test_attention_is_found_in_random_combinations_with_its_gradients(variant):
    check_variant(variant, assert_same)


@pytest.mark.parametrize("name", forms.ALMOST)
def test_what_is_almost_attention_stays_as_it_is_written(name):
    kernel, shape = Kernel(), (forms.BATCH, forms.KEYS, forms.HEADS, forms.FEATURES)
    fused = in_float32(forms.ALMOST[name], kernel)
    jaxpr = jax.make_jaxpr(forms.ALMOST[name])(*arrays(shape, shape, shape))
    assert str(jax.make_jaxpr(fused)(*arrays(shape, shape, shape))) == str(jaxpr)
    assert not [each for each in fused.found if each.kernel]


PROGRAMS_OF_USERS = {name: each for name, each in ALL_PROGRAMS.items() if each.group != "frameworks"}

X = arrays((2, 6, 32))[0]
WEIGHTS = {name: 0.3 * w for name, w in zip("qkvo", arrays(*[(32, 32)] * 4), strict=True)}


def layer(p, x, flags=None):
    q, k, v = (jnp.reshape(x @ p[name], (*x.shape[:-1], 4, 8)) for name in "qkv")
    scores = jnp.einsum("...thd,...shd->...hts", q, k) / np.sqrt(8)
    flags = forms.causal(6, 6) if flags is None else flags
    weights = jax.nn.softmax(jnp.where(flags, scores, -1e9))
    return x + jnp.reshape(jnp.einsum("...hts,...shd->...thd", weights, v), x.shape) @ p["o"]


def stacked(p, n=3):
    return jax.tree.map(lambda w: jnp.stack([w * (1 + 0.1 * i) for i in range(n)]), p)


def scanned(p, x, wrap=lambda f: f):
    return lax.scan(wrap(lambda x, p: (layer(p, x), None)), x, stacked(p))[0]


def scanned_with_flags(p, x):
    flags = forms.causal(6, 6)
    return lax.scan(lambda x, p: (layer(p, x, flags), None), x, stacked(p))[0]


def scanned_with_additive_mask(p, x):
    added = jnp.where(forms.causal(6, 6), 0.0, forms.LOWEST)

    def body(x, p):
        q, k, v = (x @ p[name] for name in "qkv")
        return x + jax.nn.softmax(q @ k.mT / 6 + added) @ v @ p["o"], None

    return lax.scan(body, x, stacked(p))[0]


def repeated(p, x):
    return lax.fori_loop(0, 3, lambda i, x: layer(p, x), x)


def repeated_while(p, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(p, c[1])), (0, x))[1]


def branched(p, x):
    return lax.cond(x[0, 0, 0] > -9, layer, lambda p, x: x, p, x)


def jitted(p, x):
    f = jax.jit(layer)
    return f(p, f(p, x))


def core_jitted(p, x):
    """The softmax in a function of its own, and the products in two others."""
    q, k, v = (jnp.reshape(x @ p[name], (*x.shape[:-1], 4, 8)) for name in "qkv")
    scores = jax.jit(lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k))(q, k)
    weights = jax.jit(lambda s, flags: jax.nn.softmax(jnp.where(flags, s, -1e9)))(scores, forms.causal(6, 6))
    return jnp.reshape(jax.jit(lambda w, v: 2 * jnp.einsum("bhts,bshd->bthd", w, v))(weights, v), x.shape)


def named(p, x):
    from jax.ad_checkpoint import checkpoint_name

    def body(p, x):
        q, k, v = (x @ p[name] for name in "qkv")
        scores = checkpoint_name(q @ k.mT / 6, "scores")
        return checkpoint_name(jax.nn.softmax(scores), "weights") @ checkpoint_name(v, "values")

    policy = jax.checkpoint_policies.save_only_these_names("weights", "values")
    return jax.checkpoint(body, policy=policy)(p, x)


def mapped(p, x):
    return jax.vmap(layer, (None, 0))(p, x)


def mapped_over_heads(p, x):
    def head(q, k, v):
        return jax.nn.softmax(jnp.where(forms.causal(6, 6), q @ k.T / np.sqrt(8), -jnp.inf)) @ v

    q, k, v = (jnp.reshape(x @ p[name], (2, 6, 4, 8)) for name in "qkv")
    return jax.vmap(jax.vmap(head, 1, 1))(q, k, v)


def reversed_gradient(p, x):
    @jax.custom_vjp
    def f(p, x):
        return layer(p, x)

    f.defvjp(lambda p, x: jax.vjp(layer, p, x), lambda pull, g: pull(-g))
    return f(p, x)


def llama(p, x):
    """Grouped queries in bfloat16, in a scan of checkpoints whose carry has a sharding."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    def block(x, p):
        q, k, v = (jnp.reshape(x @ w, (*x.shape[:2], -1, 8)) for w in (p["q"], p["k"][:, :16], p["v"][:, :16]))
        x = x + jnp.reshape(jax.nn.dot_product_attention(q, k, v, is_causal=True), x.shape) @ p["o"]
        return lax.with_sharding_constraint(x, spread), None

    return lax.scan(block, x, stacked(p))[0]


def sharded(p, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    return jax.shard_map(layer, mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec), out_specs=spec)(p, x)


def sharded_with_a_bias_of_all(p, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, same = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def of_shard(p, x, bias):
        q, k, v = (jnp.reshape(x @ p[name], (*x.shape[:2], 4, -1)) for name in "qkv")
        scores = jnp.where(forms.causal(q.shape[1], q.shape[1]), forms.scores_of(q, k) + bias, -1e9)
        return forms.apply_to(jax.nn.softmax(scores), v)

    bias = jnp.outer(x[0, :, 0], x[0, :, 1])
    return jax.shard_map(of_shard, mesh=mesh, in_specs=(same, spec, same), out_specs=spec)(p, x, bias)


def dots(f):
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)


PROGRAMS = {
    "jit": (jitted, 2),
    "parts in jit": (core_jitted, 1),
    "checkpoint": (lambda p, x: jax.checkpoint(layer)(p, x), 1),
    "checkpoint with names": (named, 1),
    "scan": (scanned, 1),
    "scan of a checkpoint": (functools.partial(scanned, wrap=dots), 1),
    "scan, flags from outside": (scanned_with_flags, 1),
    "scan, additive mask from outside": (scanned_with_additive_mask, 1),
    "fori_loop": (repeated, 1),
    "cond": (branched, 1),
    "vmap": (mapped, 1),
    "vmap over batch and heads": (mapped_over_heads, 1),
    "shard_map": (sharded, 1),
    "shard_map, with a bias of all": (sharded_with_a_bias_of_all, 1),
    "Llama, sharded": (llama, 1),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_attention_is_found_wherever_it_stands(name):
    fun, calls = PROGRAMS[name]
    options = check(fun, WEIGHTS, X, calls=calls)
    assert options.get("is_causal", False) or name == "checkpoint with names"
    assert "mask" not in options


def test_a_bias_that_all_shards_have_is_differentiated():
    def loss(fun):
        return lambda x: jnp.sum(jnp.cos(fun(WEIGHTS, x)))

    fused = amp.autocast(sharded_with_a_bias_of_all, "bfloat16", attention="xla")
    got, want = (jax.jit(jax.grad(loss(fun)))(X) for fun in (fused, sharded_with_a_bias_of_all))
    assert jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)


def test_attention_in_a_loop_that_has_no_gradient_is_found():
    kernel = Kernel()
    fused = in_float32(repeated_while, kernel)
    np.testing.assert_allclose(jax.jit(fused)(WEIGHTS, X), jax.jit(repeated_while)(WEIGHTS, X), rtol=1e-5, atol=1e-5)
    assert [each.kernel for each in fused.found] == ["Kernel"]
    assert kernel.options["is_causal"]


def test_a_function_with_a_derivative_of_its_own_keeps_it():
    fused = in_float32(reversed_gradient, Kernel())
    assert_same(reversed_gradient, fused, WEIGHTS, X)
    assert [each.why for each in fused.found] == ["the function around it has a derivative of its own"]


def test_a_traced_temperature_multiplies_the_queries():
    def of_all(q, k, v, t):
        return forms.apply_to(jax.nn.softmax(jnp.where(forms.causal(6, 10), forms.scores_of(q, k) / t, -1e9)), v)

    def of_heads(q, k, v, t):
        return forms.apply_to(jax.nn.softmax(forms.scores_of(q, k) * jnp.exp(t)[:, None, None]), v)

    def of_keys(q, k, v, t):
        return forms.apply_to(jax.nn.softmax(forms.scores_of(q, k) * t), v)

    def of_masked_scores(q, k, v, t):
        return forms.apply_to(jax.nn.softmax(jnp.where(forms.causal(6, 10), forms.scores_of(q, k), -1e9) * t), v)

    check(of_all, Q, K, K, jnp.float32(1.7), is_causal=True)
    check(of_heads, Q, K, K, jnp.arange(4) / 4.0)
    for fun, temperature in ((of_keys, jnp.arange(10) / 4.0), (of_masked_scores, jnp.float32(1.7))):
        fused = in_float32(fun, Kernel())
        assert_same(fun, fused, Q, K, K, temperature)
        assert [each.kernel for each in fused.found] == [""]


def attend(q, k, v, flags):
    scores = jnp.where(flags, jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8), -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


Q, K = arrays((2, 6, 4, 8), (2, 10, 4, 8))
LENGTHS = jnp.array([3, 10])


def test_a_number_of_keys_is_said_as_such():
    def padded(q, k, v, lengths):
        return attend(q, k, v, (jnp.arange(10) < lengths[:, None])[:, None, None])

    def padded_causal(q, k, v, lengths):
        return attend(q, k, v, forms.causal(6, 10) & (lengths[:, None] > jnp.arange(10))[:, None, None])

    def decoded(q, k, v, position):
        return attend(q[:, :1], k, v, jnp.arange(10) <= position)

    for fun, args, expected in (
        (padded, (Q, K, K, LENGTHS), {"key_value_seq_lengths": (2,)}),
        (padded_causal, (Q, K, K, LENGTHS), {"key_value_seq_lengths": (2,), "is_causal": True}),
        (decoded, (Q, K, K, jnp.int32(4)), {"key_value_seq_lengths": (2,)}),
        (lambda *qkv: jax.nn.dot_product_attention(*qkv, key_value_seq_lengths=LENGTHS), (Q, K, K), {}),
    ):
        options = check(fun, *args, same=assert_same_value, **expected)
        assert "mask" not in options


def test_masks_and_biases_keep_the_axes_that_they_have():
    segments = jnp.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])
    slopes, distances = 2.0 ** -jnp.arange(1, 5), jnp.abs(jnp.arange(6)[:, None] - jnp.arange(6))

    def in_segments(q, k, v, segments):
        return attend(q, k, v, (segments[:, None] == segments[:, :, None])[:, None])

    def with_alibi(q, k, v, slopes):
        scores = scores_of(q, k) - slopes[:, None, None] * distances
        return forms.apply_to(jax.nn.softmax(jnp.where(forms.causal(6, 6), scores, -jnp.inf)), v)

    def with_table(q, k, v, table):
        return forms.apply_to(jax.nn.softmax(scores_of(q, k) + table[distances].transpose(2, 0, 1)[None]), v)

    def with_padding_added(q, k, v, mask):
        return forms.apply_to(jax.nn.softmax(scores_of(q, k) + ((1 - mask) * forms.LOWEST)[:, None, None]), v)

    scores_of = forms.scores_of
    check(in_segments, Q, Q, Q, segments, same=assert_same_value, mask=(2, 1, 6, 6))
    check(with_alibi, Q, Q, Q, slopes, bias=(1, 4, 6, 6), is_causal=True)
    check(with_table, Q, Q, Q, arrays((6, 4))[0], bias=(1, 4, 6, 6))
    padding = (jnp.arange(6) < 4).astype(jnp.int32)[None]
    check(with_padding_added, Q, Q, Q, padding, same=assert_same_value, bias=(1, 1, 1, 6))


def indices(t, s):
    return jnp.arange(t)[:, None], jnp.arange(s)


# Flags that depend on indices and constants alone, and the options that say them; "mask" where none do.
COMPUTED = {
    "strictly causal": (lambda i, j: i > j, "mask"),
    "from the key on": (lambda i, j: i <= j, {"local_window_size": (0, 10)}),
    "the key of the query": (lambda i, j: i == j, {"is_causal": True, "local_window_size": (0, 0)}),
    "steps of two": (lambda i, j: 2 * i >= 2 * j, {"is_causal": True}),
    "unlike steps": (lambda i, j: 2 * i >= j, "mask"),
    "a product of flags": (
        lambda i, j: (i >= j).astype(float) * (i - j < 3) > 0,
        {"is_causal": True, "local_window_size": (2, 0)},
    ),
    "a window by what it leaves out": (
        lambda i, j: ~((j > i) | (i - j >= 3)),
        {"is_causal": True, "local_window_size": (2, 0)},
    ),
    "all keys": (lambda i, j: (i - j < 99) & (j < 10), {}),
    "dilated": (lambda i, j: (i - j) % 2 == 0, "mask"),
    "blocks": (lambda i, j: i // 2 == j // 2, "mask"),
    "causal but for a prefix": (lambda i, j: (i >= j) | (j < 3), "mask"),
    "distances of NumPy": (
        lambda i, j: jnp.asarray(np.subtract.outer(np.arange(6), np.arange(10))) >= 0,
        {"is_causal": True},
    ),
    "rounded indices": (lambda i, j: (i + 256).astype(jnp.bfloat16) >= (j + 256).astype(jnp.bfloat16), "mask"),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", COMPUTED)
def test_masks_of_indices_and_constants_are_computed(name):
    flags, said = COMPUTED[name]
    options = check(lambda q, k, v: attend(q, k, v, flags(*indices(6, 10))), Q, K, K, same=assert_same_value)
    said = {"mask": (1, 1, 6, 10)} if said == "mask" else said
    assert {name: x for name, x in options.items() if name not in ("query", "key")} == said


def test_a_mask_between_two_axes_of_keys_is_no_window():
    def attend(q, k, v):
        scores = jnp.where(jnp.tri(5, dtype=bool), jnp.einsum("bhd,bijhd->bhij", q, k), -1e9)
        return jnp.einsum("bhij,bijhd->bhd", jax.nn.softmax(scores, (-2, -1)), v)

    shape = (2, 5, 5, 4, 8)
    assert check(attend, *arrays((2, 4, 8), shape, shape))["mask"] == (1, 1, 1, 25)


@pytest.mark.parametrize("length", [2**17, *jax.export.symbolic_shape("length")])
def test_masks_of_long_sequences_and_of_unknown_length_are_computed(length):
    q = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    kernel = Kernel()
    fused = in_float32(lambda q: attend(q, q, q, jnp.tril(jnp.ones((length, length), bool))), kernel)
    jax.eval_shape(fused, q)
    assert kernel.options["is_causal"]
    assert "mask" not in kernel.options


def test_a_kernel_that_takes_no_window_gets_a_mask():
    def refuses(local_window_size=None, **options):
        if local_window_size is not None:
            raise TypeError("no windows")

    kernel = Kernel(refuses)
    fused = in_float32(lambda q, k, v: attend(q, k, v, forms.window(6, 10)), kernel)
    fused(Q, K, K)
    assert kernel.options["mask"] == (1, 1, 6, 10)
    assert [each.why for each in fused.found] == ["mask"]


def model(p, x):
    with jax.named_scope("first"):
        x = layer(p, x)
    with jax.named_scope("second"):
        return jnp.mean(layer(p, x) ** 2)


def one_layer(p, x):
    return jnp.mean(layer(p, x) ** 2)


def primitives(fun, *args):
    return [eqn.primitive.name for eqn in equations(fun, *args)]


def test_autocast_calls_the_kernel_in_16_bits_in_both_passes():
    kernel = Kernel()
    fused = amp.autocast(model, "bfloat16", attention=kernel)
    value, grads = jax.jit(jax.value_and_grad(fused))(WEIGHTS, X)
    expected, expected_grads = jax.jit(jax.value_and_grad(model))(WEIGHTS, X)
    np.testing.assert_allclose(value, expected, rtol=2e-2)
    for name, x in expected_grads.items():
        assert grads[name].dtype == jnp.float32
        assert jnp.linalg.norm(grads[name] - x) < 6e-2 * jnp.linalg.norm(x)
    assert {str(x.dtype) for call in kernel.calls for name, x in call.items() if name in ("query", "key")} == {
        "bfloat16"
    }
    assert len(kernel.calls) <= 2  # for both passes of two equal layers
    assert primitives(fused, WEIGHTS, X).count("cast_inputs") == 2
    assert "cast_inputs" not in primitives(amp.autocast(model, "bfloat16"), WEIGHTS, X)


def test_regions_and_rules_keep_their_say():
    def of(fun=model, **options):
        fused = amp.autocast(fun, "bfloat16", attention=Kernel(), **options)
        return primitives(fused, WEIGHTS, X).count("cast_inputs")

    def with_region(p, x):
        with amp.full_precision():
            x = layer(p, x)
        return jnp.mean(layer(p, x))

    def with_softmax_region(p, x):
        q, k = x @ p["q"], x @ p["k"]
        with amp.precision("float16"):
            weights = jax.nn.softmax(q @ k.mT)
        return jnp.mean(weights @ x)

    assert of() == 2
    assert of(rules={"first": "full"}) == 1
    assert of(rules={"second": "float16"}) == 1
    assert of(rules={lax.dot_general_p: "full"}) == 0
    assert of(with_region) == 1
    assert of(with_softmax_region) == 0


def spanning(p, x, first=lambda f: f, second=lambda f: f):
    """The weights of an attention in one call, and all else in another."""

    def weights(p, x):
        with jax.named_scope("heads"):
            q, k = (jnp.reshape(x @ p[name], (*x.shape[:-1], 4, 8)) for name in "qk")
        return jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8))

    def rest(p, x, w):
        y = jnp.einsum("bhts,bshd->bthd", w, jnp.reshape(x, (*x.shape[:-1], 4, 8)))
        with jax.named_scope("mlp"):
            return x + jnp.reshape(y, x.shape) @ p["o"]

    with jax.named_scope("decoder"):
        w = first(weights)(p, x)
        with jax.named_scope("last"):
            return second(rest)(p, x, w)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(lambda *args: jax.jit(f)(*args))])
def test_ops_keep_their_scopes_where_attention_spans_calls(wrap):
    def products(attention):
        program = functools.partial(spanning, first=wrap, second=wrap)
        options = {"rules": {"decoder/heads": "float16", "decoder/last/mlp": "full"}, "attention": attention}
        amp.autocast(program, "bfloat16", **options)(WEIGHTS, X)  # it warns of rules that match no scope
        report = amp.explain(program, "bfloat16", **options)(WEIGHTS, X)
        assert [row.kernel for row in report.attention] == (["Kernel"] if attention else [])
        return {(row.module, row.compute) for row in report.rows if row.module.endswith(("heads", "mlp"))}

    assert products(Kernel()) == products(None)
    assert {("decoder/heads", "float16"), ("decoder/last/mlp", "float32")} <= products(None)


def test_a_jit_with_shardings_stays_a_call():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    on_devices = functools.partial(jax.jit, out_shardings=spread)

    def shardings_of(attention, **calls):
        fused = amp.autocast(functools.partial(spanning, **calls), "bfloat16", attention=attention)
        eqns = [eqn for eqn in equations(fused, WEIGHTS, X) if eqn.primitive.name == "jit"]
        return [eqn.params["out_shardings"] for eqn in eqns].count((spread,))

    for calls in ({"first": on_devices}, {"second": on_devices}, {"first": jax.jit, "second": on_devices}):
        assert shardings_of(Kernel(), **calls) == shardings_of(None, **calls) == 1
    assert check(on_devices(layer), WEIGHTS, X)["is_causal"]


def test_a_kernel_that_refuses_leaves_attention_as_it_is_written_and_warns_once():
    def refuses(**options):
        raise NotImplementedError("The head dim must be a multiple of 16, but got 8.\nmore")

    fused = amp.autocast(model, attention=Kernel(refuses))
    with pytest.warns(UserWarning, match=r"`Kernel` refuses .* must be a multiple of 16, but got 8\.$") as caught:
        out = jax.jit(fused)(WEIGHTS, X)
    assert len(caught) == 1
    assert out == jax.jit(amp.autocast(model))(WEIGHTS, X)
    with pytest.warns(UserWarning, match="cuDNN"):  # there is none on a CPU
        assert jax.jit(amp.autocast(model, attention="cudnn"))(WEIGHTS, X) == out
    no_attention = amp.autocast(lambda p, x: jnp.mean(x @ p["q"]), attention=Kernel(refuses))
    jax.jit(no_attention)(WEIGHTS, X)  # has no warning


def gpu_kernel(query, key, value, bias=None, mask=None, *, scale, is_causal):
    """Stands for a kernel of a GPU, which JAX does not lower for a CPU."""

    def kernel(q, k, v, out):
        scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q[...] @ k[...].T * scale, -1e9)
        out[...] = (jax.nn.softmax(scores) @ v[...]).astype(out.dtype)

    shape = jax.ShapeDtypeStruct((6, 8), query.dtype)
    heads = functools.partial(jax.vmap, in_axes=1, out_axes=1)
    return jax.vmap(heads(pl.pallas_call(kernel, out_shape=shape)))(query, key, value)


ON_A_CPU = {
    "outside jit": lambda f: f,
    "jit": jax.jit,
    "gradient outside jit": jax.grad,
    "gradient": lambda f: jax.jit(jax.grad(f)),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    "vmap": lambda f: jax.jit(jax.vmap(jax.grad(f), (None, 0))),
}


@pytest.mark.sweep(9)
@pytest.mark.filterwarnings("ignore:`gpu_kernel` refuses the derivative")
@pytest.mark.parametrize("wrap", ON_A_CPU.values(), ids=ON_A_CPU)
@pytest.mark.parametrize("kernel", ["xla", gpu_kernel])
def test_a_kernel_that_is_not_lowered_for_a_cpu_leaves_attention_there_as_it_is_written(kernel, wrap):
    fused = amp.autocast(one_layer, "float16", attention=kernel)
    words = "F16_F16_F32" if kernel == "xla" else "interpret mode"
    with pytest.warns(UserWarning, match=f"refuses attention on a CPU, which computes it as it is written: .*{words}"):
        outs = wrap(fused)(WEIGHTS, X)
    expected = wrap(amp.autocast(one_layer, "float16"))(WEIGHTS, X)
    for out, x in zip(jax.tree.leaves(outs), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(out, x, atol=2e-3 * float(jnp.max(jnp.abs(x))))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_cpu_refuses_is_as_written_wherever_it_stands(name):
    fun, _ = PROGRAMS[name]
    with pytest.warns(UserWarning, match="refuses attention on a CPU"):
        grads = jax.jit(jax.grad(scalar(amp.autocast(fun, "float16", attention="xla"))))(WEIGHTS, X)
    expected = jax.jit(jax.grad(scalar(amp.autocast(fun, "float16"))))(WEIGHTS, X)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-2 * float(jnp.max(jnp.abs(y))) + 1e-6)


def test_a_program_that_is_traced_on_a_cpu_has_the_kernel_on_a_gpu():
    fused = amp.autocast(model, "float16", attention="xla")
    with pytest.warns(UserWarning, match="refuses attention on a CPU"):
        traced = jax.jit(jax.grad(fused)).trace(WEIGHTS, X)
    on_gpu, on_cpu = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu"))
    assert on_gpu.count("algorithm = ") == 3  # of the scores, in both passes
    assert "algorithm = " not in on_cpu
    with pytest.warns(UserWarning, match="refuses attention on a CPU"):
        (first, _) = amp.explain(fused)(WEIGHTS, X).attention
    assert first.kernel == "xla"
    assert "; on a CPU as it is written: ValueError" in first.why


@jax.custom_vjp
def forward_only(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _no_derivative(residuals, cotangent):
    raise NotImplementedError("no backward pass for 8 features")


forward_only.defvjp(lambda *qkv: (forward_only(*qkv), None), _no_derivative)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "checkpoint"])
def test_a_derivative_that_the_kernel_refuses_is_that_of_the_program(wrap):
    def kernel(query, key, value, **options):
        return forward_only(query, key, value)

    fused = amp.autocast(one_layer, "bfloat16", attention=kernel)
    assert primitives(fused, WEIGHTS, X).count("cast_inputs") == 1  # without a warning
    with pytest.warns(UserWarning, match="`kernel` refuses the derivative of attention, .* no backward pass for 8"):
        grads = jax.jit(jax.grad(wrap(fused)))(WEIGHTS, X)
    expected = jax.jit(jax.grad(amp.autocast(one_layer, "bfloat16")))(WEIGHTS, X)  # compiled once for all
    for name, x in expected.items():
        np.testing.assert_allclose(grads[name], x, atol=2e-2 * float(jnp.max(jnp.abs(x))))


def test_what_is_no_kernel_is_an_error():
    allowed = r'`attention` must be None, an implementation .* \("xla", "cudnn"\), or a function .*'
    with pytest.raises(TypeError, match=f"{allowed} got 3"):
        amp.autocast(model, attention=3)
    for name in ("flash", "cuDNN"):  # whether or not the program has attention
        with pytest.raises(ValueError, match=f"{allowed} got '{name}'; .* `attention=kernel`"):
            amp.autocast(jnp.sin, attention=name)


def test_explain_lists_each_softmax_that_a_product_reads():
    def program(p, x):
        with jax.named_scope("good"):
            x = lax.scan(lambda x, p: (layer(p, x), None), x, stacked(p))[0]
        with jax.named_scope("capped"):
            return jnp.mean(jax.nn.softmax(jnp.tanh(x @ p["q"] @ x.mT)) @ x)

    report = amp.explain(program, "bfloat16", attention=Kernel())(WEIGHTS, X)
    found = [(row.module, row.kernel, row.why, row.runs) for row in report.attention]
    assert found == [
        ("good", "Kernel", "is_causal=True", 3),
        ("capped", "", "`tanh` between a product and the softmax", 1),
    ]
    assert "test_attention.py" in report.attention[1].source
    assert report.summary()["attention"] == {"Kernel": 1, "as written": 1}
    assert "`tanh` between a product and the softmax" in str(report)
    assert "is_causal=True" in report._repr_html_()
    assert amp.explain(program)(WEIGHTS, X).attention == ()


def test_explain_says_what_to_write_for_autocast_of_a_gradient():
    report = amp.explain(jax.grad(model), attention=Kernel())(WEIGHTS, X)
    assert {row.kernel for row in report.attention} == {""}
    assert "write `jax.grad(autocast(f))`" in report.attention[0].why


def test_a_second_call_outside_jit_traces_no_kernel_and_a_changed_closure_is_seen():
    kernel, shift = Kernel(), [0.0]
    fused = amp.autocast(lambda p, x: scanned(p, x + shift[0]), "bfloat16", attention=kernel)
    first = fused(WEIGHTS, X)
    n = len(kernel.calls)
    assert jnp.array_equal(fused(WEIGHTS, X), first)
    assert len(kernel.calls) == n
    shift[0] = 1.0
    assert not jnp.array_equal(fused(WEIGHTS, X), first)


def test_a_long_chain_of_ops_before_a_softmax_is_read_without_deep_recursion():
    def long(p, x):
        for _ in range(500):
            x = x + 0.001
        return jnp.mean(jax.nn.softmax(x @ p["q"] + jnp.exp(x)) @ p["k"])

    assert "cast_inputs" not in primitives(amp.autocast(long, attention=Kernel()), WEIGHTS, X)


@pytest.mark.sweep(25)
@pytest.mark.parametrize("name", PROGRAMS_OF_USERS)
def test_a_program_that_is_rewritten_without_attention_is_the_same(name, monkeypatch):
    """Every jaxpr in it is built anew."""
    monkeypatch.setattr(_program._Program, "is_changed", True)
    monkeypatch.setattr(_program, "_may_have_attention", lambda jaxpr: True)
    fun, args = PROGRAMS_OF_USERS[name].make()
    closed, leaves, _ = jx.trace_call(fun, args, {})
    rewritten, _ = with_kernel(closed, "xla", jnp.float32, Scope())
    assert list(map(str, rewritten.out_avals)) == list(map(str, closed.out_avals))
    outs = [jax.jit(lambda *xs, p=p: jax.core.eval_jaxpr(*jx.open_jaxpr(p), *xs))(*leaves) for p in (closed, rewritten)]
    for x, y in zip(*outs, strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(x, y)


def repeated(x, n):
    return jnp.repeat(x, n, axis=2)


REPEATS = {
    "repeat": repeated,
    "broadcast": lambda x, n: jnp.broadcast_to(x[:, :, :, None], (*x.shape[:3], n, x.shape[3])).reshape(
        *x.shape[:2], -1, x.shape[3]
    ),
}


def grouped(q, k, v, repeat_keys=repeated, repeat_values=None):
    n = q.shape[2] // k.shape[2]
    k, v = repeat_keys(k, n), (repeat_values or repeat_keys)(v, n)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


GROUPED = (2, 8, 6, 16), (2, 8, 2, 16), (2, 8, 2, 16)


@pytest.mark.parametrize("name", REPEATS)
def test_heads_that_are_repeated_are_handed_over_once(name):
    kernel, args = Kernel(), arrays(*GROUPED)
    fun = functools.partial(grouped, repeat_keys=REPEATS[name])
    assert_same(fun, in_float32(fun, kernel), *args)
    assert kernel.options == {"query": (2, 8, 6, 16), "key": (2, 8, 2, 16), "is_causal": True}


def tiled(x, n):
    return jnp.tile(x, (1, 1, n, 1))


OTHERWISE = {
    "tiled": functools.partial(grouped, repeat_keys=tiled),
    "keys alone": lambda q, k, v: grouped(q, k, repeated(v, 3) * 2, repeat_values=lambda v, n: v),
    "both ways": functools.partial(grouped, repeat_values=tiled),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_heads_that_are_repeated_otherwise_are_handed_over_as_they_are(name):
    kernel, args = Kernel(), arrays(*GROUPED)
    assert_same_value(OTHERWISE[name], in_float32(OTHERWISE[name], kernel), *args)
    assert kernel.options["key"] == (2, 8, 6, 16)


def test_a_kernel_without_grouped_heads_gets_them_repeated():
    kernel, args = Kernel(), arrays(*GROUPED)

    def as_many_heads(query, key, value, **options):
        if key.shape[2] != query.shape[2]:
            raise ValueError("as many heads of keys as of queries")
        return kernel(query, key, value, **options)

    assert_same_value(grouped, in_float32(grouped, as_many_heads), *args)
    assert kernel.options["key"] == (2, 8, 6, 16)

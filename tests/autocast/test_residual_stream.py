"""With `residual_stream="low"`, residual streams are low; states, losses and logits are not."""

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy_models import CASES
from jax import lax
from jaxprs import scoped_equations

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

DIM, BATCH, LENGTH = 8, 2, 4
LOW, FULL = "float16", "float32"


def sums(fun, *args, **options):
    """Returns the dtypes in which the sums of the scopes `sum` are stored, in order."""
    options = {"residual_stream": "low"} | options
    stored, last = [], None
    for scope, eqn in scoped_equations(amp.autocast(fun, **options), *args):
        if not scope.rstrip("/").endswith("sum"):
            continue
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0] is last:
            stored[-1] = eqn.outvars[0].aval.dtype.name
        if eqn.primitive.name == "add":
            last = eqn.outvars[0]
            stored.append(last.aval.dtype.name)
    return stored


def plus(x, y):
    with jax.named_scope("sum"):
        return x + y


def layer_norm(x, scale=1.0, bias=0.0):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * scale + bias


def rms_norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def fast_norm(x):
    mean = jnp.mean(x, -1, keepdims=True)
    scale = lax.rsqrt(jnp.maximum(jnp.mean(x**2, -1, keepdims=True) - mean**2, 0) + 1e-5)
    return (x - mean) * (scale * jnp.ones(DIM))


def library_norm(x):
    return (x - jnp.mean(x, -1, keepdims=True)) / (jnp.std(x, -1, keepdims=True) + 1e-5)


def group_norm(x):
    groups = x.reshape(BATCH, LENGTH, 2, DIM // 2)
    variance = jnp.var(groups, (1, 3), keepdims=True)
    return ((groups - jnp.mean(groups, (1, 3), keepdims=True)) * (variance + 1e-5) ** -0.5).reshape(x.shape)


NORMS = [layer_norm, rms_norm, fast_norm, library_norm, group_norm, jax.nn.standardize]

W = jnp.eye(DIM) / 4
WS = jnp.stack([W] * 3)
X = jnp.ones((BATCH, LENGTH, DIM)) / 3
TOKENS = jnp.zeros((BATCH, LENGTH), int)
TABLE, POSITION = jnp.ones((16, DIM)) / 3, jnp.ones((LENGTH, DIM)) / 7


def layer(w, x, norm=layer_norm):
    return plus(x, jax.nn.gelu(norm(x) @ w))


def head(w, x, norm=layer_norm):
    return norm(x) @ w


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_that_a_norm_reads_is_low(norm, dtype):
    def model(ws, x):
        for w in ws:
            x = layer(w, x, norm)
        return head(ws[0], x, norm)

    assert sums(model, list(WS), X, dtype=dtype) == [dtype] * 3
    assert sums(model, list(WS), X, dtype=dtype, residual_stream="float32") == [FULL] * 3


EMBEDDINGS = {
    "embedding": lambda table, position, tokens: table[tokens],
    "take": lambda table, position, tokens: jnp.take(table, tokens, axis=0),
    "scaled": lambda table, position, tokens: table[tokens] * DIM**0.5,
    "position": lambda table, position, tokens: plus(table[tokens], position),
    "one-hot": lambda table, position, tokens: plus(jax.nn.one_hot(tokens, 16) @ table, position),
    "normed": lambda table, position, tokens: layer_norm(table[tokens], position[0], position[1]),
    "dropout": lambda table, position, tokens: jnp.where(tokens[..., None] == 0, table[tokens] / 0.9, 0),
}


@pytest.mark.parametrize("embed", EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_embeddings_and_positions_do_not_widen_it(embed):
    def model(ws, table, position, tokens):
        x = embed(table, position, tokens)
        for w in ws:
            x = layer(w, x)
        return head(ws[0], x)

    assert set(sums(model, list(WS), TABLE, POSITION, TOKENS)) == {LOW}


def batch_norm(x, scale, bias):
    mean = jnp.mean(x, (0, 1))
    return (x - mean) * (scale * lax.rsqrt(jnp.mean(x * x, (0, 1)) - mean**2 + 1e-5)) + bias


def block(w, x, project=False):
    """A block of a ResNet: products read its result, norms do not."""
    skip = batch_norm(x @ w, w[0], w[1]) if project else x
    h = jax.nn.relu(batch_norm(x @ w, w[0], w[1]))
    return jax.nn.relu(plus(skip, batch_norm(h @ w, w[0], w[1])))


@pytest.mark.parametrize("call", [lambda block: block, jax.jit], ids=["inline", "jit"])
def test_a_sum_with_the_result_of_a_norm_is_low(call):
    def model(ws, x):
        x = block(ws[0], x, project=True)
        for w in ws:
            x = call(block)(w, x)
        return jnp.mean(x, 1) @ ws[0]

    def scanned(ws, x):
        x, _ = lax.scan(lambda x, w: (block(w, x), None), block(ws[0], x, project=True), ws)
        return jnp.mean(x, 1) @ ws[0]

    assert sums(model, list(WS), X) == [LOW] * 4
    assert sums(scanned, WS, X) == [LOW] * 2
    assert FULL in sums(model, list(WS), X, residual_stream="float32")


def test_a_sum_with_a_norm_that_a_product_reads_too_is_low_by_default():
    """The product stores the norm in low precision; for a float32 sum it would be stored twice."""

    def model(w, x):
        h = layer_norm(x @ w)
        return jnp.tanh(plus(h, h @ w)) @ w

    assert sums(model, W, X, residual_stream="float32") == [LOW]


def in_jit(layer):
    return jax.jit(layer)


def in_remat(layer):
    return jax.checkpoint(layer)


def in_custom_jvp(layer):
    f = jax.custom_jvp(lambda w, x: layer(w, x))
    f.defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))
    return f


@pytest.mark.parametrize("call", [in_jit, in_remat, in_custom_jvp], ids=lambda call: call.__name__)
def test_it_goes_through_calls(call):
    def model(ws, x):
        for w in ws:
            x = call(layer)(w, x)
        return head(ws[0], x)

    assert set(sums(model, list(WS), X)) == {LOW}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("save", ["matmuls", "all"])
def test_the_carry_of_a_scan_over_layers_is_low(remat, save):
    body = jax.checkpoint(layer) if remat else layer

    def model(ws, table, position, tokens):
        x, _ = lax.scan(lambda x, w: (body(w, x), None), plus(table[tokens], position), ws)
        return head(ws[0], x)

    def carries(**options):
        low = amp.autocast(model, save=save, **options)
        (scan,) = [e for _, e in scoped_equations(low, WS, TABLE, POSITION, TOKENS) if e.primitive.name == "scan"]
        return [scan.invars[i].aval.dtype.name for i in range(len(scan.invars)) if scan.invars[i].aval.shape == X.shape]

    assert carries(residual_stream="low") == [LOW]
    assert carries() == [FULL]
    assert set(sums(model, WS, TABLE, POSITION, TOKENS, save=save)[1:]) == {LOW}


def test_the_carry_of_layers_that_end_in_a_norm_is_low():
    def model(ws, x):
        x, _ = lax.scan(lambda x, w: (layer_norm(plus(x, jnp.tanh(x @ w))), None), x, ws)
        return x @ ws[0]

    assert sums(model, WS, X) == [LOW]
    low = amp.autocast(model, residual_stream="low")
    (scan,) = [eqn for _, eqn in scoped_equations(low, WS, X) if eqn.primitive.name == "scan"]
    assert LOW in {atom.aval.dtype.name for atom in scan.invars if atom.aval.shape == X.shape}


@pytest.mark.parametrize("name", ["GPT block", "ViT"])
def test_a_sum_is_as_low_in_a_program_that_differentiates_itself(name):
    loss, args = CASES[name](None)

    def dtypes(fun):
        rows = amp.explain(fun, residual_stream="low")(*args).select(direction="forward").rows
        return [row.compute for row in rows if row.primitive == "add"]

    assert dtypes(loss).count(LOW) > 4
    assert dtypes(jax.grad(loss))[: len(dtypes(loss))] == dtypes(loss)


def test_cotangents_are_low():
    def loss(ws, x):
        for w in ws:
            x = plus(x, layer_norm(x) @ w)
        return jnp.mean(head(ws[0], x) ** 2)

    def low_sums(**options):
        """Counts the low-precision sums of cotangents of the shape of the stream."""
        eqns = scoped_equations(jax.grad(amp.autocast(loss, **options)), list(WS), X)
        sums = [eqn.outvars[0].aval for _, eqn in eqns if eqn.primitive.name == "add_any"]
        return sum(aval.shape == X.shape and aval.dtype == LOW for aval in sums)

    assert low_sums(residual_stream="low") == len(WS) - 1  # the gradient of `x`, an input, is not computed
    assert low_sums() == 0


def _returned(ws, x):
    for w in ws:
        x = layer(w, x)
    return x


def _stacked(ws, x):
    def body(x, w):
        x = layer(w, x)
        return x, x

    x, hidden = lax.scan(body, x, ws)
    return head(ws[0], x), hidden


def _integrator(w, x):
    def step(x, _):
        return plus(x, 0.1 * jnp.tanh(layer_norm(x) @ w)), None

    return head(w, lax.scan(step, x, length=8)[0])


def _controlled(w, x, controls):
    def step(x, control):
        return plus(x, 0.1 * jnp.tanh(layer_norm(x) @ w + control @ w)), None

    return head(w, lax.scan(step, x, controls)[0])


def _integrator_without_norm(w, x):
    for _ in range(4):
        x = plus(x, 0.1 * jnp.tanh(x @ w))
    return x @ w


def _integrator_from_a_norm(w, x):
    x = layer_norm(x @ w)
    for _ in range(4):
        x = plus(x, 0.1 * jnp.tanh((2 * x) @ w))
    return x @ w


def _moving_average(w, x, average):
    h = x @ w
    average = plus(0.9 * average, 0.1 * h)
    return h * lax.rsqrt(jnp.mean(average**2)), average


def _batch_statistics(w, x, mean):
    h = x @ w
    batch_mean = jnp.mean(h, (0, 1))
    mean = plus(0.9 * mean, 0.1 * batch_mean)
    return (h - batch_mean) * lax.rsqrt(jnp.var(h, (0, 1)) + 1e-5), mean


def _inner_steps(w, x, batches):
    """MAML: the carry is the weight that the inner loop trains."""

    def step(w, batch):
        grad = jax.grad(lambda w: jnp.mean(layer_norm(batch @ w) ** 2))(w)
        return plus(w, -0.1 * grad), None

    w, _ = lax.scan(step, w, batches)
    return jnp.mean((layer_norm(x) @ w) ** 2)


def _clipped_steps(w, batches):
    """The same in an unrolled loop, with gradients of norm 1."""
    for batch in batches:
        grad = jax.grad(lambda w, batch=batch: jnp.mean(layer_norm(batch @ w) ** 2))(w)
        w = plus(w, -0.1 * grad * lax.rsqrt(jnp.sum(grad**2)))
    return jnp.mean(batches[0] @ w)


def _delta_rule(w, x):
    """Linear attention: the carry is a matrix that each token updates."""
    keys, values = layer_norm(x) @ w, x @ w

    def step(state, kv):
        k, v = kv
        return plus(state, jnp.einsum("bd,be->bde", v - jnp.einsum("bde,be->bd", state, k), k)), None

    state, _ = lax.scan(step, jnp.zeros((BATCH, DIM, DIM)), (keys.swapaxes(0, 1), values.swapaxes(0, 1)))
    return rms_norm(state)


def _loss_terms(w, x):
    logits = x @ w
    return jnp.mean(plus(logits, x**2)) * lax.rsqrt(jnp.mean(logits**2))


def _reparameterized(w, x):
    return layer_norm(plus(x @ w, jnp.exp(x)))


def _scores(w, x, bias):
    q = layer_norm(x) @ w
    return jax.nn.softmax(plus(q @ x.swapaxes(-1, -2), bias)) @ x


STATES = {
    "returned": (_returned, list(WS), X),
    "stacked and returned": (_stacked, WS, X),
    "an integrator": (_integrator, W, X),
    "an integrator with controls": (_controlled, W, X, jnp.stack([X] * 3)),
    "an integrator without a norm": (_integrator_without_norm, W, X),
    "an integrator that starts at the result of a norm": (_integrator_from_a_norm, W, X),
    "a moving average": (_moving_average, W, X, X),
    "batch statistics": (_batch_statistics, W, X, jnp.ones(DIM)),
    "weights that an inner loop trains": (_inner_steps, W, X, jnp.stack([X[0]] * 3)),
    "weights that an unrolled loop trains": (_clipped_steps, W, [X[0]] * 3),
    "the state of linear attention": (_delta_rule, W, X),
    "terms of a loss": (_loss_terms, W, X),
    "an exponential": (_reparameterized, W, X),
    "logits": (_scores, W, X, jnp.ones((LENGTH, LENGTH)) / 3),
}


@pytest.mark.parametrize("name", STATES)
def test_other_sums_stay_float32(name):
    stored = sums(*STATES[name])
    assert stored
    assert set(stored) == {FULL}


def test_a_sum_that_holds_a_large_constant_stays_float32():
    def model(w, x):
        x = plus(x @ w, jnp.where(jnp.arange(DIM) < 2, -1e9, 0.0))
        return layer_norm(x) @ w

    assert sums(model, W, X) == [FULL]


def test_a_region_takes_precedence():
    def model(w, x):
        x = layer(w, x)
        with amp.full_precision():
            x = layer(w, x)
        return head(w, x)

    assert sums(model, W, X) == [LOW, FULL]


@pytest.mark.slow
def test_is_more_accurate_than_casting_the_parameters():
    params = jax.jit(gpt.init, static_argnames="layers")(jax.random.key(0), layers=6)
    tokens = jax.random.randint(jax.random.key(1), (4, gpt.CONTEXT), 0, gpt.VOCAB)

    def loss(params, tokens):
        return -jnp.mean(jax.nn.log_softmax(gpt.logits(params, tokens, scan=True))[..., 3])

    def with_low_params(params, tokens):
        return loss(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokens)

    low = amp.autocast(loss, "bfloat16", residual_stream="low")
    exact, by_cast, by_autocast = (jax.jit(jax.grad(f))(params, tokens) for f in (loss, with_low_params, low))
    assert error(by_autocast, exact) < error(by_cast, exact)


def error(grads, exact):
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(float) for tree in (grads, exact)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


def test_a_wrong_value_is_named():
    with pytest.raises(ValueError, match='`residual_stream` must be "float32" or "low", got "float16"'):
        amp.autocast(lambda x: x, residual_stream="float16")

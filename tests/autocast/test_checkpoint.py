"""`jax.checkpoint` in the program decides what the backward pass keeps; `save` decides where there is none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import arrays_on_host, keeps_the_users_plan, residual_bytes
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import equations

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

LAYERS, DIM = 4, 8
KEYS = jax.random.split(jax.random.key(0), 4)
WS = jax.random.normal(KEYS[0], (LAYERS, DIM, 2 * DIM)) / 3, jax.random.normal(KEYS[1], (LAYERS, 2 * DIM, DIM)) / 4
X = jax.random.normal(KEYS[2], (16, DIM))
POLICIES = jax.checkpoint_policies
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
checkpoint = jax.checkpoint


def layer(x, ws):
    up, down = ws
    normed = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)
    return x + checkpoint_name(jax.nn.gelu(normed @ up), "hidden") @ down


def body(x, ws):
    return layer(x, ws), None


def scan(body, x=X):
    return lambda ws: jnp.mean(jnp.square(lax.scan(body, x, ws)[0]))


def loop(layer):
    return lambda ws: jnp.mean(
        jnp.square(functools.reduce(layer, [jax.tree.map(lambda w, i=i: w[i], ws) for i in range(LAYERS)], X))
    )


def nested(inner, outer, run=lax.scan):
    """Layers in groups of two: checkpoints of the square root of the number of layers."""

    def group(x, ws):
        return run(inner, x, ws)[0], None

    return lambda ws: scan(outer(group))(jax.tree.map(lambda w: w.reshape(-1, 2, *w.shape[1:]), ws))


def with_rule(inner):
    """A body whose function has a derivative rule, which differentiates `inner`."""

    @jax.custom_vjp
    def call(x, ws):
        return inner(x, ws)

    call.defvjp(lambda x, ws: jax.vjp(inner, x, ws), lambda pullback, g: pullback(g))
    return lambda x, ws: (call(x, ws), None)


def sharded(body):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    run = jax.shard_map(lambda ws, x: lax.scan(body, x, ws)[0], mesh=mesh, **specs)
    return lambda ws: jnp.mean(jnp.square(run(ws, X)))


def body_with_while(x, ws):
    steps = lax.while_loop(lambda i: i < 2, checkpoint(lambda i: i + 1), 0)
    return layer(x * lax.stop_gradient(steps).astype(x.dtype), ws), None


def attention(w):
    """Attention with linear memory, by a scan over chunks of keys (Rabe and Staats, 2021)."""
    q, k, v = (jnp.dot(X, each) for each in w)
    chunks = k.reshape(4, 4, DIM), v.reshape(4, 4, DIM)

    @functools.partial(checkpoint, prevent_cse=False)
    def chunk(carry, kv):
        largest, total, out = carry
        scores = q @ kv[0].T
        new = jnp.maximum(largest, scores.max(-1))
        weights, shrink = jnp.exp(scores - new[:, None]), jnp.exp(largest - new)
        return (new, total * shrink + weights.sum(-1), out * shrink[:, None] + weights @ kv[1]), None

    start = jnp.full(16, -1e4), jnp.zeros(16), jnp.zeros_like(X)
    (_, total, out), _ = lax.scan(chunk, start, chunks)
    return jnp.mean(jnp.square(out / total[:, None]))


def chunked_cross_entropy(w):
    @checkpoint
    def chunk(total, x):
        logits = x @ w
        return total + jnp.sum(jax.nn.logsumexp(logits, -1) - logits[:, 0]), None

    return lax.scan(chunk, jnp.float32(0), X.reshape(4, 4, DIM))[0] / 16


def low_rank(ws):
    """Frozen weights with trained low-rank updates."""
    frozen = jnp.ones((LAYERS, DIM, DIM)) / DIM

    @checkpoint
    def body(x, ws):
        w, (up, down) = ws
        return x + jnp.tanh(x @ lax.stop_gradient(w) + x @ up @ down), None

    return jnp.mean(jnp.square(lax.scan(body, X, (frozen, ws))[0]))


with_policy = {
    name: functools.partial(checkpoint, policy=policy, prevent_cse=False)
    for name, policy in {
        "nothing": POLICIES.nothing_saveable,
        "products": POLICIES.dots_saveable,
        "names": POLICIES.save_only_these_names("hidden"),
        "offloaded names": OFFLOAD,
    }.items()
}
DECIDED = {  # by the program
    "body": (scan(checkpoint(body)), WS),
    **{f"body, {name}": (scan(each(body)), WS) for name, each in with_policy.items()},
    "part of the body": (scan(lambda x, ws: body(checkpoint(jnp.sin)(x), ws)), WS),
    "jit in the body": (scan(jax.jit(lambda x, ws: checkpoint(body)(x, ws))), WS),
    "branch": (scan(lambda x, ws: (lax.cond(x[0, 0] > 0, checkpoint(layer), layer, x, ws), None)), WS),
    "while in the body": (scan(body_with_while), WS),
    "rule in the body": (scan(with_rule(checkpoint(layer))), WS),
    "scan": (checkpoint(scan(body)), WS),
    **{f"scan, {name}": (each(scan(body)), WS) for name, each in with_policy.items()},
    "scan of a checkpointed body": (checkpoint(scan(checkpoint(body))), WS),
    "jit of scan": (checkpoint(jax.jit(scan(body))), WS),
    "group of layers": (nested(body, checkpoint), WS),
    "layers of a group": (nested(checkpoint(body), lambda f: f), WS),
    "both": (nested(checkpoint(body), checkpoint), WS),
    "group, offloaded names": (nested(body, with_policy["offloaded names"]), WS),
    "shards": (sharded(checkpoint(body)), WS),
    "around shards": (checkpoint(sharded(body)), WS),
    "python loop": (loop(checkpoint(layer)), WS),
    "python loop, products": (loop(with_policy["products"](layer)), WS),
    "attention": (attention, jnp.stack([jnp.eye(DIM)] * 3)),
    "cross-entropy": (chunked_cross_entropy, jnp.ones((DIM, 64))),
    "low-rank updates": (low_rank, (jnp.ones((LAYERS, DIM, 2)), jnp.ones((LAYERS, 2, DIM)))),
}
UNDECIDED = {
    "scan": scan(body),
    "nested": nested(body, lambda f: f),
    "rule": scan(with_rule(layer)),
    "shards": sharded(body),
    "shards with a sum": sharded(lambda x, ws: (layer(x, ws) + lax.psum(jnp.sum(x), "data") * 1e-3, None)),
    "beside a checkpoint": lambda ws: scan(body)(ws) + checkpoint(loop(layer))(ws),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", DECIDED)
def test_the_program_decides_what_is_kept(name):
    assert keeps_the_users_plan(*DECIDED[name])


@pytest.mark.parametrize("name", UNDECIDED)
def test_save_decides_where_the_program_does_not(name):
    matmuls, everything = (amp.autocast(UNDECIDED[name], "bfloat16", save=save) for save in ("matmuls", "all"))
    assert residual_bytes(matmuls, WS) < residual_bytes(everything, WS)


@pytest.mark.parametrize("policy", with_policy)
def test_a_checkpoint_around_autocast_decides(policy):
    around, low = with_policy[policy], amp.autocast(scan(body), "bfloat16")
    assert residual_bytes(around(low), WS) == residual_bytes(
        around(amp.autocast(scan(body), "bfloat16", save="all")), WS
    )


def test_offloaded_names_are_found():
    assert arrays_on_host(scan(with_policy["offloaded names"](body)), WS) > 0 == arrays_on_host(scan(body), WS)


def test_a_checkpoint_changes_no_gradient():
    grads = [jax.jit(jax.grad(amp.autocast(scan(each), "bfloat16")))(WS) for each in (body, checkpoint(body))]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_a_checkpointed_body_keeps_low_carries():
    def cell(h, w):
        return jnp.tanh(h @ w), None

    grad = jax.grad(amp.autocast(scan(checkpoint(cell), jnp.zeros_like(X)), "bfloat16"))
    forward = next(e for e in equations(grad, jnp.stack([jnp.eye(DIM)] * 3)) if e.primitive.name == "scan")
    assert {str(var.aval.dtype) for var in forward.outvars} == {"bfloat16"}


def test_products_of_a_checkpointed_body_are_computed_again_once():
    def products(fun):
        return sum(e.primitive.name == "dot_general" for e in equations(jax.grad(fun), WS))

    assert products(amp.autocast(scan(checkpoint(body)))) == products(scan(checkpoint(body)))


def test_explain_says_who_decides():
    def deciders(fun, **options):
        report = amp.explain(fun, "bfloat16", **options)(WS)
        counts = {keeper: len(lines) for keeper, lines in report.summary()["scans"].items()}
        return counts, str(report).splitlines()[0]

    assert deciders(scan(body))[0] == {"autocast": 1}
    assert deciders(scan(body), save="all")[0] == {"JAX": 1}
    both, printed = deciders(lambda ws: nested(body, checkpoint)(ws) + scan(body)(ws))
    assert both == {"jax.checkpoint": 2, "autocast": 1}
    assert "What scans keep is decided by jax.checkpoint (2), autocast (1)." in printed
    assert "scans" not in deciders(loop(layer))[1]

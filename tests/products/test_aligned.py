"""Large products whose rows are not multiples of 16 bytes are padded where they are traced for an NVIDIA GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jmp_amp as amp
from jmp_amp import _jaxpr as jx
from jmp_amp._products import _aligned

BF16 = jnp.dtype(jnp.bfloat16)
PLAIN = {"precision": None, "preferred_element_type": BF16, "out_sharding": None}


def matmul(lhs, rhs, dtype=BF16, contracting=((1,), (0,)), batch=((), ())):
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs)]
    return avals, PLAIN | {"dimension_numbers": (contracting, batch)}


VOCABULARY = (8192, 768), (768, 50257)
ZEROS = {
    "a vocabulary": (matmul(*VOCABULARY), [{}, {1: 7}]),
    "its transpose": (matmul((8192, 768), (50257, 768), contracting=((1,), (1,))), [{}, {0: 7}]),
    "the gradient of the rows": (matmul((8192, 50257), (50257, 768)), [{1: 7}, {0: 7}]),
    "the gradient of the weight": (matmul((8192, 50257), (8192, 768), contracting=((0,), (0,))), [{1: 7}, {}]),
    "aligned": (matmul((8192, 768), (768, 50304)), None),
    "in float32": (matmul(*VOCABULARY, dtype=jnp.dtype(jnp.float32)), None),
    "rows that are not last": (matmul((8191, 768), (768, 3072)), None),
    "terms that are not last": (matmul((1021, 4096), (1021, 4096), contracting=((0,), (0,))), None),
    "terms that are last": (matmul((4096, 1021), (1021, 4096)), [{1: 3}, {0: 3}]),
    "ten classes": (matmul((8192, 512), (512, 10)), None),
    "three terms": (matmul((8192, 3), (3, 513)), None),
    "scores": (matmul((768, 196, 64), (768, 196, 64), contracting=((2,), (2,)), batch=((0,), (0,))), None),
    "heads that are aligned together": (matmul((8192, 1024), (1024, 16, 65)), None),
    "heads that are not": (matmul((8192, 1024), (1024, 15, 65)), [{}, {2: 7}]),
    "float8": (matmul((1000, 4096), (4096, 50257), jnp.dtype(jnp.float8_e4m3fn)), [{0: 8}, {1: 15}]),
}


@pytest.mark.parametrize("name", ZEROS)
def test_the_last_axes_of_large_products_are_padded(name):
    (avals, params), zeros = ZEROS[name]
    assert _aligned.padding(avals, params) == zeros


@pytest.mark.parametrize(("columns", "devices", "is_padded"), [(50257, 8, True), (50260, 4, False), (50260, 1, True)])
def test_an_axis_that_devices_may_split_stays_as_it_is(columns, devices, is_padded):
    avals, params = matmul((8192, 768), (768, columns))
    assert (_aligned.padding(avals, params, devices) is not None) == is_padded


def test_symbolic_sizes_stay_as_they_are():
    (n,) = export.symbolic_shape("n")
    avals, params = matmul((8192, n), (n, 50257))
    assert _aligned.padding(avals, params) is None


@pytest.fixture
def aligned(monkeypatch):
    """Pads products of any size, on every device."""
    monkeypatch.setattr(_aligned, "_LEAST_INTENSITY", 1e-9)
    monkeypatch.setattr(_aligned, "is_for_nvidia", lambda: True)
    monkeypatch.setattr(_aligned, "automatic_devices", lambda: 1)
    jax.clear_caches()
    yield
    jax.clear_caches()


def generated(seed):
    """Two arrays of small whole numbers, and the parameters of a product of them."""
    rng = np.random.default_rng(seed)
    kinds = [kind for kind, most in (("batch", 1), ("free", 2), ("summed", 2)) for _ in range(rng.integers(most + 1))]
    sizes = [(kind, i, int(rng.integers(1, 300 if len(kinds) < 3 else 40))) for i, kind in enumerate(kinds)]
    others = [("other", i, int(rng.integers(1, 40))) for i in range(rng.integers(3))]
    axes = [[*sizes], [x for x in sizes if x[0] != "free"] + others]
    for each in axes:
        rng.shuffle(each)
    axes = [[(str(kind), int(i), int(n)) for kind, i, n in each] for each in axes]

    def places(kind):
        numbers = [i for each, i, _ in sizes if each == kind]
        return tuple(tuple(next(k for k, x in enumerate(each) if x[:2] == (kind, i)) for i in numbers) for each in axes)

    args = [jnp.asarray(rng.integers(-2, 3, [n for *_, n in each]), BF16) for each in axes]
    return args, PLAIN | {"dimension_numbers": (places("summed"), places("batch"))}


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.slow)], ids=["few", "many"])
def test_generated_products_and_their_gradients_are_those_of_plain_products(seeds, aligned):
    padded = 0
    for seed in seeds:
        args, params = generated(seed)

        def with_gradients(bind, args=args):
            out, pullback = jax.vjp(bind, *args)
            return out, pullback(jnp.ones_like(out))

        got = with_gradients(lambda *args, params=params: _aligned.bind_product(args, params))
        want = with_gradients(lambda *args, params=params: lax.dot_general_p.bind(*args, **params))
        jax.tree.map(np.testing.assert_array_equal, got, want)  # sums of whole numbers are exact
        padded += _aligned.padding(list(map(jax.typeof, args)), params) is not None
    assert padded >= len(seeds) / 2


W, X = jnp.linspace(-1, 1, 24 * 37).reshape(24, 37), jnp.linspace(-1, 1, 5 * 24).reshape(5, 24)


def loss_fn(w, x):
    return jnp.sum(jnp.sin(jax.nn.logsumexp(x @ w, -1)))


MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
SPEC = PartitionSpec
FORMS = {
    "jit": lambda f: jax.jit(jax.grad(f, (0, 1)))(W, X),
    "outside jit": lambda f: jax.grad(f, (0, 1))(W, X),
    "vmap": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, jnp.stack([X, 2 * X])),
    "vmap of weights": lambda f: jax.vmap(jax.grad(f), (0, None))(jnp.stack([W, 2 * W]), X),
    "a loop": lambda f: jax.grad(lambda w: jnp.sum(lax.map(lambda x: f(w, x[None]), X)))(W),
    "a checkpoint": lambda f: jax.grad(jax.checkpoint(f))(W, X),
    "forward mode": lambda f: jax.jvp(lambda w: f(w, X), [W], [jnp.ones_like(W)]),
    "a second derivative": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2))(W),
    "shards": lambda f: jax.jit(
        jax.shard_map(
            lambda w, x: lax.psum(f(w, x), "data"), mesh=MESH, in_specs=(SPEC(), SPEC(None, None)), out_specs=SPEC()
        )
    )(W, X),
    "a mesh": lambda f: jax.jit(jax.grad(f))(W, jax.device_put(X[:4], NamedSharding(MESH, SPEC("data")))),
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize("options", [{}, {"weight_grad_dtype": "float32"}], ids=["", "float32 gradients"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_program_is_the_same(form, options, aligned, monkeypatch):
    if form == "forward mode" and options:
        pytest.skip("a `custom_vjp` has no forward mode")
    got = FORMS[form](amp.autocast(loss_fn, "bfloat16", **options))
    monkeypatch.setattr(_aligned, "padding", lambda *args: None)
    want = FORMS[form](amp.autocast(loss_fn, "bfloat16", **options))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-3), got, want)


def traced_for(platform, fun, *args, sizes=(), names=()):
    """Traces a function for a device that is not present, or for one of a mesh, and lowers it."""
    kinds = {"cuda": AbstractDevice("NVIDIA H200", 132, platform="gpu")}
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), abstract_device=kinds.get(platform))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def lowered(platform, dtype="bfloat16", **options):
    def vocabulary(w, x):
        return jnp.sum(jax.nn.logsumexp(x @ w, -1))

    args = jax.ShapeDtypeStruct((512, 5021), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    return traced_for(platform, jax.value_and_grad(amp.autocast(vocabulary, dtype, **options), (0, 1)), *args)


@pytest.mark.parametrize("options", [{}, {"weight_grad_dtype": "float32"}], ids=["", "float32 gradients"])
def test_no_product_for_a_cuda_device_has_rows_that_are_not_aligned(options):
    products = [line for line in lowered("cuda", **options).splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 3
    assert all("5024" in line and "5021" not in line for line in products)
    for platform in ("cpu", "tpu"):
        text = lowered(platform, **options)
        assert "5024" not in text
        assert "stablehlo.pad" not in text


def test_other_dtypes_are_not_padded():
    assert "5024" not in lowered("cuda", "float32")


def names(policy):
    def loss(w, x):
        h = jnp.sin(x @ w)
        return jnp.sum(jnp.sin(h @ w.T))

    low = amp.autocast(jax.checkpoint(loss, policy=policy), "bfloat16")
    args = jnp.ones((512, 5021)), jnp.ones((1024, 512))
    program = jax.make_jaxpr(jax.grad(low))(*args)
    return sum(eqns[-1].primitive.name == "dot_general" for eqns in jx.equations_in(program))


def test_a_policy_for_products_saves_them():
    # Two forward, three backward; without the policy, the first two are computed again.
    assert names(jax.checkpoint_policies.dots_saveable) == 5
    assert names(None) == 7


def test_explain_says_from_what_to_what():
    shapes = jax.ShapeDtypeStruct((512, 5021), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)

    def vocabulary(w, x):
        return jnp.sum(jax.nn.logsumexp(jnp.sin(x) @ w, -1))

    report = amp.explain(vocabulary, "bfloat16")(*shapes)
    assert {row.padding for row in report.rows if row.primitive == "dot_general"} == {"5021 to 5024"}
    assert "rule, padded from 5021 to 5024" in str(report)
    assert "padded: with zeros, on CUDA devices" in str(report)
    assert "padded" not in str(amp.explain(vocabulary, "float32")(*shapes))


@pytest.mark.parametrize(("columns", "is_padded"), [(5021, True), (5020, False)])
def test_a_program_for_a_mesh_pads_what_it_cannot_split(columns, is_padded):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))

    def vocabulary(w, x):
        return jnp.sum(jax.nn.logsumexp(x @ w, -1))

    split = NamedSharding(mesh, SPEC(None, None if is_padded else "model"))
    w = jax.ShapeDtypeStruct((512, columns), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=NamedSharding(mesh, SPEC()))
    fun = jax.grad(amp.autocast(vocabulary, "bfloat16"))
    assert ("5024" in traced_for("cuda", fun, w, x, sizes=(4,), names=("model",))) == is_padded


def test_a_shard_is_padded(monkeypatch):
    def vocabulary(w, x):
        return jnp.sum(jax.nn.logsumexp(x @ w, -1))[None]

    monkeypatch.setattr(_aligned, "is_for_nvidia", lambda: True)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    specs = SPEC(None, "model"), SPEC()
    sharded = jax.shard_map(amp.autocast(vocabulary, "bfloat16"), mesh=mesh, in_specs=specs, out_specs=SPEC("model"))
    args = jax.ShapeDtypeStruct((512, 4 * 5020), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    assert "1024x5024xbf16" in jax.jit(sharded).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_the_weight_is_padded_once_for_all_micro_batches(monkeypatch):
    def vocabulary(w, x):
        return jnp.mean(jax.nn.logsumexp(x @ w, -1))

    args = jax.ShapeDtypeStruct((512, 5021), jnp.float32), jax.ShapeDtypeStruct((4 * 1024, 512), jnp.float32)
    monkeypatch.setattr(_aligned, "is_for_nvidia", lambda: True)
    program = jax.make_jaxpr(amp.value_and_grad(amp.autocast(vocabulary, "bfloat16"), accumulate_steps=4))(*args)
    pads = [eqns for eqns in jx.equations_in(program) if eqns[-1].primitive is lax.pad_p]
    of_weight = [eqns for eqns in pads if eqns[-1].outvars[0].aval.shape == (512, 5024)]
    assert [[eqn.primitive.name for eqn in eqns] for eqns in of_weight] == [["pad"]]  # in no loop

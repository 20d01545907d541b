"""Where `attention=` finds attention: models and forms, value and gradient beside the program's own, and the costs.

    python benchmarks/attention.py [--only Swin] [--costs] [--out docs/benchmarks/attention.md]

`--costs` compiles models for an H200, which needs cuDNN and no GPU: see `gpu_aot.py`. It takes 10 minutes of CPU time.
"""

import functools
import os
import warnings

os.environ.setdefault("KERAS_BACKEND", "jax")

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
import models
import numpy as np
from report import arguments, head, report, row

import jmp_amp as amp
from jmp_amp import _jaxpr as jx
from jmp_amp._attention import Scope, with_kernel

B, T, D, H = 2, 16, 32, 4  # batch, length, features, heads
F = D // H
FORMS = {}


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def form(name, *shapes):
    """Registers a function of arrays of these shapes; by default queries, keys and values of (batch, length, heads)."""
    default = [(B, T, H, F)] * 3
    return lambda fun: FORMS.setdefault(name, lambda: (fun, arrays(*(shapes or default))))


def causal(t=T, s=T):
    return jnp.tril(jnp.ones((t, s), bool))


def scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])


def read(weights, v):
    return jnp.einsum("bhts,bshd->bthd", weights, v)


form("`jax.nn`, causal")(functools.partial(jax.nn.dot_product_attention, is_causal=True))
form("`jax.nn`, sliding window")(functools.partial(jax.nn.dot_product_attention, local_window_size=(3, 0)))
form("`jax.nn`, bias", *[(B, T, H, F)] * 3, (1, H, T, T))(jax.nn.dot_product_attention)
form("`jax.nn`, grouped queries", (B, T, H, F), *[(B, T, 2, F)] * 2)(jax.nn.dot_product_attention)
form("`jax.nn`, lengths")(functools.partial(jax.nn.dot_product_attention, key_value_seq_lengths=np.array([5, 9])))
form("softmax by hand")(
    lambda q, k, v: read((e := jnp.exp((s := scores(q, k)) - s.max(-1, keepdims=True))) / e.sum(-1, keepdims=True), v)
)
form("`exp(s - logsumexp(s))`")(
    lambda q, k, v: read(jnp.exp((s := scores(q, k)) - jax.nn.logsumexp(s, -1, keepdims=True)), v)
)
form("`exp2`")(
    lambda q, k, v: read(
        (e := jnp.exp2((s := scores(q, k) * np.log2(np.e).astype(np.float32)) - s.max(-1, keepdims=True)))
        / e.sum(-1, keepdims=True),
        v,
    )
)
form("a temperature that is learned", *[(B, T, H, F)] * 3, (H,))(
    lambda q, k, v, t: read(jax.nn.softmax(scores(q, k) * jnp.exp(t)[:, None, None]), v)
)
form("`softmax(where=)`")(lambda q, k, v: read(jax.nn.softmax(scores(q, k), where=causal()), v))
form("additive mask of `finfo.min`")(
    lambda q, k, v: read(jax.nn.softmax(scores(q, k) + jnp.where(causal(), 0, jnp.finfo(jnp.float32).min)), v)
)
form("one head, no batch", (T, D), (T, D), (T, D))(lambda q, k, v: jax.nn.softmax(q @ k.T / np.sqrt(D)) @ v)


@form("T5: bias of buckets", *[(B, T, H, F)] * 3, (8, H))
def t5(q, k, v, table):
    buckets = jnp.clip(jnp.arange(T) - jnp.arange(T)[:, None], -4, 3) + 4
    return read(jax.nn.softmax(scores(q, k) + jnp.moveaxis(table[buckets], 2, 0)[None]), v)


@form("ALiBi")
def alibi(q, k, v):
    distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))
    s = scores(q, k) - distance * 2.0 ** -jnp.arange(1, H + 1)[:, None, None]
    return read(jax.nn.softmax(jnp.where(causal(), s, -jnp.inf)), v)


@form("Mistral: sliding window of indices")
def mistral(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)
    return read(jax.nn.softmax(jnp.where((j <= i) & (i - j < 4), scores(q, k), -1e9)), v)


@form("Longformer: a band")
def longformer(q, k, v):
    return read(jax.nn.softmax(jnp.where(jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)) <= 3, scores(q, k), -1e9)), v)


@form("packed sequences: segments")
def packed(q, k, v):
    segments = jnp.array([[0] * 6 + [1] * 10, [0] * 9 + [1] * 7]) + jnp.int32(q[0, 0, 0, 0] * 0)
    same = segments[:, None, :, None] == segments[:, None, None]
    return read(jax.nn.softmax(jnp.where(same & causal(), scores(q, k), -1e9)), v)


@form("PaLM: one head of keys", (B, T, H, F), (B, T, F), (B, T, F))
def multi_query(q, k, v):
    s = jnp.where(causal(), jnp.einsum("bthd,bsd->bhts", q, k), -1e9)
    return jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(s / np.sqrt(F)), v)


@form("DeepSeek: MLA, keys of 24 and values of 16", (B, T, H, 24), (B, T, H, 24), (B, T, H, 16))
def mla(q, k, v):
    return read(jax.nn.softmax(jnp.where(causal(), scores(q, k), -jnp.inf)), v)


@form("Whisper: cross attention", (B, T, D), (B, 24, D), *[(D, D)] * 3)
def cross(x, y, w_q, w_k, w_v):
    q, k, v = (jnp.reshape(z @ w, (B, -1, H, F)).swapaxes(1, 2) for z, w in ((x, w_q), (y, w_k), (y, w_v)))
    weights = jax.nn.softmax(((q * F**-0.25) @ (k * F**-0.25).mT).astype(jnp.float32))
    return (weights @ v).swapaxes(1, 2).reshape(B, T, D)


@form("Perceiver: latents", (6, D), (B, T, D))
def perceiver(latents, x):
    return jax.vmap(lambda x: jax.nn.softmax(latents @ x.T / np.sqrt(D)) @ x)(x)


def windows(with_mask, q, k, v, table):
    n, windows = 8, T // 8
    q, k, v = (jnp.reshape(x, (B * windows, n, H, F)) for x in (q, k, v))
    s = scores(q, k) + table[None]
    if with_mask:
        regions = jnp.arange(windows)[:, None, None] * jnp.ones((n, n)) % 2
        s = jnp.reshape(jnp.reshape(s, (B, windows, H, n, n)) - 100.0 * regions[:, None], s.shape)
    return read(jax.nn.softmax(s), v)


form("Swin: windows", *[(B, T, H, F)] * 3, (H, 8, 8))(functools.partial(windows, False))
form("Swin: shifted windows", *[(B, T, H, F)] * 3, (H, 8, 8))(functools.partial(windows, True))


@form("Transformer-XL: relative positions", *[(B, T, H, F)] * 3, (T, H, F))
def relative(q, k, v, r):
    s = scores(q, k) + jnp.einsum("bthd,shd->bhts", q, r)
    return read(jax.nn.softmax(jnp.where(causal(), s, -1e9)), v)


@form("differential attention", *[(B, T, H, F)] * 5)
def differential(q, k, v, q2, k2):
    return read(jax.nn.softmax(scores(q, k)), v) - 0.5 * read(jax.nn.softmax(scores(q2, k2)), v)


@form("decoding, a cache and a position", (B, 1, H, F), (B, T, H, F), (B, T, H, F))
def cached(q, k, v):
    position = jnp.int32(q[0, 0, 0, 0] * 0) + 5
    return read(jax.nn.softmax(jnp.where(jnp.arange(T) <= position, scores(q, k), -1e9)), v)


@form("in `jax.checkpoint`, the scores named")
def checkpointed(q, k, v):
    def attend(q, k, v):
        named = jax.ad_checkpoint.checkpoint_name(scores(q, k), "scores")
        return read(jax.nn.softmax(jnp.where(causal(), named, -1e9)), v)

    return jax.checkpoint(attend, policy=jax.checkpoint_policies.save_only_these_names("scores"))(q, k, v)


form("dropout on the weights")(
    lambda q, k, v: read(
        jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, (B, H, T, T)), jax.nn.softmax(scores(q, k)) / 0.9, 0), v
    )
)
form("Gemma 2: a soft cap")(lambda q, k, v: read(jax.nn.softmax(5 * jnp.tanh(scores(q, k) / 5)), v))
form("gpt-oss: sinks")(
    lambda q, k, v: read(
        (e := jnp.exp((s := scores(q, k)) - s.max(-1, keepdims=True))) / (e.sum(-1, keepdims=True) + 1), v
    )
)
form("weights returned")(lambda q, k, v: (read(w := jax.nn.softmax(scores(q, k)), v), w))
form("talking heads", *[(B, T, H, F)] * 3, (H, H))(
    lambda q, k, v, p: read(jax.nn.softmax(jnp.einsum("bhts,hg->bgts", scores(q, k), p)), v)
)
form("linear attention")(
    lambda q, k, v: jnp.einsum(
        "bthd,bhde->bthe", jax.nn.softmax(q), jnp.einsum("bshd,bshe->bhde", jax.nn.softmax(k, 1), v)
    )
)


def layer(name):
    """Registers a layer of a library: a function that returns a function of the parameters and an input, and these."""

    def register(make):
        FORMS[name] = make
        return make

    return register


@layer("Flax Linen, causal mask")
def linen():
    import flax.linen as nn

    (x,) = arrays((B, T, D))
    module = nn.MultiHeadDotProductAttention(H)
    params = module.init(jax.random.key(0), x)
    return lambda p, x: module.apply(p, x, mask=nn.make_causal_mask(x[..., 0])), (params, x)


@layer("Flax Linen, padding mask")
def linen_padding():
    import flax.linen as nn

    _, (params, x) = linen()
    module = nn.MultiHeadDotProductAttention(H)
    return lambda p, x: module.apply(p, x, mask=nn.make_attention_mask(x[..., 0] > -1, x[..., 0] > -1)), (params, x)


@layer("Flax NNX, causal mask")
def nnx():
    from flax import nnx

    (x,) = arrays((B, T, D))
    graph, state = nnx.split(nnx.MultiHeadAttention(H, D, decode=False, rngs=nnx.Rngs(0)))
    return lambda s, x: nnx.merge(graph, s)(x, mask=nnx.make_causal_mask(x[..., 0])), (state, x)


@layer("Equinox, under `vmap`")
def equinox():
    import equinox as eqx

    (x,) = arrays((B, T, D))
    params, static = eqx.partition(eqx.nn.MultiheadAttention(H, D, key=jax.random.key(0)), eqx.is_inexact_array)
    return lambda p, x: jax.vmap(lambda x: eqx.combine(p, static)(x, x, x, mask=causal()))(x), (params, x)


@layer("Haiku, causal mask")
def haiku():
    import haiku as hk

    (x,) = arrays((B, T, D))
    call = hk.without_apply_rng(
        hk.transform(lambda x: hk.MultiHeadAttention(H, F, w_init_scale=1.0)(x, x, x, causal()[None, None]))
    )
    return call.apply, (call.init(jax.random.key(0), x), x)


@layer("Keras, causal mask")
def keras():
    import keras

    (x,) = arrays((B, T, D))
    module = keras.layers.MultiHeadAttention(H, F)
    module(x, x)
    variables = [v.value for v in module.trainable_variables]
    return lambda p, x: module.stateless_call(p, [], x, x, use_causal_mask=True)[0], (variables, x)


def model(case, **sizes):
    def make():
        loss_fn, shapes = case(None, **sizes)
        rng = np.random.default_rng(0)

        def one(shape):
            if jnp.issubdtype(shape.dtype, jnp.integer):
                return jnp.asarray(rng.integers(0, 5, shape.shape), shape.dtype)
            return jnp.asarray(0.1 * rng.normal(size=shape.shape), shape.dtype)

        return loss_fn, jax.tree.map(one, shapes)

    return make


GPT = {"layers": 2, "batch": 2, "length": 16, "dim": 32, "heads": 4, "vocab": 64}
FORMS |= {
    "GPT": model(models.gpt_case, **GPT),
    "GPT, scanned": model(models.gpt_case, scan=True, **GPT),
    "GPT, scanned, remat": model(models.gpt_case, scan=True, remat="dots_saveable", **GPT),
    "GPT, decoding": model(models.decoding_case, **GPT),
    "Llama": model(models.llama_case, layers=2, batch=2, length=16, dim=32, hidden=64, heads=4, kv_heads=2),
    "ViT": model(models.vit_case, layers=2, batch=2, size=32, patch=8, dim=32, heads=4, classes=8),
}


def compared(make):
    """Returns what was found, and how far value and gradient are from those of the program, in float32."""
    fun, args = make()
    found = []

    def fused(*args):
        closed, leaves, rebuild = jx.trace_call(fun, args, {})
        program, each = with_kernel(closed, "xla", jnp.float32, Scope())
        found[:] = each
        return rebuild(jax.core.eval_jaxpr(*jx.open_jaxpr(program), *leaves))

    def loss(fun):
        return lambda *args: sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(fun(*args)))

    def run(fun):
        return jax.jit(jax.value_and_grad(loss(fun), tuple(range(len(args))), allow_int=True))(*args)

    (value, grads), (other, others) = run(fun), run(fused)
    pairs = [(x, y) for x, y in zip(*map(jax.tree.leaves, (grads, others)), strict=True) if x.dtype == jnp.float32]
    # Gradients that are 0 in theory, such as those of the biases of keys, are compared with the largest one.
    largest = max(float(jnp.max(jnp.abs(x))) for x, _ in pairs)
    errors = float(abs(value - other) / abs(value)), max(float(jnp.max(jnp.abs(x - y))) / largest for x, y in pairs)
    return found, errors


def forms(only):
    yield from head("model or form", "found", "how, or why not", "value, off by", "gradient, off by")
    for name, make in FORMS.items():
        if only not in name:
            continue
        found, errors = compared(make)
        kernels = [each for each in found if each.kernel]
        what = f"{len(kernels)} of {len(found)}" if found else "no softmax of a product"
        whys = ", ".join(dict.fromkeys(each.why.partition(" at ")[0] for each in found if each.why))
        yield row(name, what, whys, *(f"{error:.0e}" if kernels else "" for error in errors))
    yield ""


LOW = "float16"
COSTS = {
    "GPT-2 small": models.gpt_case,
    "GPT-2 small, scanned": functools.partial(models.gpt_case, scan=True),
    "GPT-2 small, scanned, remat": functools.partial(models.gpt_case, scan=True, remat="dots_saveable"),
    "ViT-B/16": models.vit_case,
    "Llama, scanned, remat": functools.partial(models.small_llama, layers=4, scan=True),
    "encoder, dropout off": functools.partial(models.encoder_case, rate=0.0),
}
ATTENTION = {
    "as written": {},
    'attention="cudnn"': {"attention": "cudnn"},
    'attention="cudnn", residual_stream="low"': {"attention": "cudnn", "residual_stream": "low"},
}


def costs(only):
    mesh = gpu_aot.h200_mesh()
    warnings.filterwarnings("error", ".* refuses attention")
    for name, case in COSTS.items():
        if only not in name:
            continue
        yield from head(name, "GB moved", "GB temporary", "kernels")
        loss_fn, shapes = case(None)
        programs = {each: amp.autocast(loss_fn, LOW, **options) for each, options in ATTENTION.items()}
        if name.startswith("GPT"):
            kernel = models.fused_attention("cudnn", LOW)
            programs["`cast_inputs` around cuDNN's attention in the model"] = amp.autocast(
                case(None, kernel=kernel)[0], LOW
            )
            programs["by hand, cuDNN's attention"] = case(jnp.float16, kernel=kernel)[0]
        for each, fun in programs.items():
            cost = gpu_aot.cost(gpu_aot.compile_for(jax.value_and_grad(fun), *gpu_aot.struct(mesh, shapes)))
            moved, temporary = cost["bytes_moved"] / 1e9, cost["temp_bytes"] / 1e9
            yield row(each, f"{moved:.1f}", f"{temporary:.2f}", cost["kernels"])
        yield ""


WHY = """Where `autocast(attention=)` finds attention in programs that do not know of it, and what that saves."""
NOTES = """
The first table has each model or form in float32, with `jax.nn.dot_product_attention` of XLA in place of what is found;
`python benchmarks/attention.py`. "Found" counts the softmaxes that a product reads. The value is off by the relative
difference, the gradient by the largest difference for the size of the largest gradient. A reason that names an op says
what stands between the products.

A temperature that the program computes multiplies the queries, unless it differs from key to key, or multiplies scores
that are masked or have a bias: a negative one would turn a mask around. Shifted windows of Swin stay as they are
written: they split the batch into images and windows to add the mask.

The other tables are loss and gradients compiled for an H200 in float16, with cuDNN, without a GPU;
`python benchmarks/attention.py --costs`. The head of `benchmarks/gpu_aot.py` says how cuDNN gets there.
"""


def main():
    parser = arguments(__doc__, "the models that have this in their name")
    parser.add_argument("--costs", action="store_true", help="also compile models for an H200, with cuDNN")
    options = parser.parse_args()

    def tables():
        yield from forms(options.only)
        if options.costs:
            yield from costs(options.only)

    opening = f"{WHY}\n\nWith JAX {jax.__version__}, by `benchmarks/attention.py`."
    report("Attention in one kernel", opening, tables(), NOTES, options.out)


if __name__ == "__main__":
    main()

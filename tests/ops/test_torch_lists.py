"""PyTorch's autocast lists, name by name: the JAX counterpart computes in the dtype that the list promises.

Where JAX has no such function, the counterpart is what users write instead. `DIFFERENCES` are the names whose result
has another dtype than in PyTorch, with the reason.
"""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.ndimage
import numpy as np
import optax
import pytest
from jax import lax
from jaxprs import read_low

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)

# The lists as registered in torch 2.15, and those of the page of `torch.amp` that came before it.
LOWER = """
    __matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d GRUCell linear LSTMCell matmul mm mv prelu RNNCell
    convolution _convolution _convolution.deprecated cudnn_convolution conv_tbc conv_transpose2d.input
    conv_transpose3d.input cudnn_convolution_transpose einsum linalg_vecdot linalg_multi_dot
    scaled_dot_product_attention _scaled_dot_product_flash_attention lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _thnn_fused_lstm_cell _thnn_fused_gru_cell
"""
FULL = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist
    cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss
    layer_norm log log_softmax log10 log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss
    nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss
    softmax softmin softplus sum renorm tan triplet_margin_loss
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar native_layer_norm rms_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim nll_loss2d huber_loss logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa sum.dim_IntList prod.dim_int
    softmax.int log_softmax.int linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord norm.Scalar
    norm.ScalarOpt_dim
"""
PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot vdot grid_sampler
"""
BANNED = "binary_cross_entropy"


class Dtypes(NamedTuple):
    """The dtype of a result, as an op reads it, before it is cast back for the caller."""

    float32: np.dtype  # of float32 inputs
    low: np.dtype  # of what low-precision products computed
    mixed: np.dtype  # of these, but for the last input, which is float32


PROMISED = {
    **{name: Dtypes(F16, F16, F16) for name in LOWER.split()},
    **{name: Dtypes(F32, F32, F32) for name in FULL.split()},
    **{name: Dtypes(F32, F16, F32) for name in PROMOTE.split()},
}

# Where it is not so: what is computed instead, and why.
DIFFERENCES = {
    name: row
    for names, *row in [
        (
            "addmm addbmm baddbmm",
            "JAX has no fused product and sum. A bias, which varies along the features of the weight alone, counts as "
            "part of the product; any other float32 array that is added to the product makes the sum float32.",
            Dtypes(F32, F16, F16),
        ),
        (
            "addr",
            "An outer product sums nothing and no matrix unit computes it, so it takes the widest operand.",
            Dtypes(F32, F16, F32),
        ),
        (
            "prelu",
            "JAX has no primitive for it: a multiplication and a selection, which take the widest operand.",
            Dtypes(F32, F16, F32),
        ),
        (
            "GRUCell gru_cell _thnn_fused_gru_cell LSTMCell lstm_cell _thnn_fused_lstm_cell",
            "The products and gates are float16. A state that adds up (the cell of an LSTM, the state of a GRU) is "
            "float32, as it is in a cell that is written by hand under torch; the output of an LSTM is float16.",
            Dtypes(F32, F16, F16),
        ),
        (
            "pow.Tensor_Scalar",
            "A square or a cube is a product or two. In float32 only if a float32 op reads it, as in a loss or a norm: "
            "the cube in GELU would store more otherwise. Any other power is float32.",
            Dtypes(F32, F16, F32),
        ),
        (
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
            "_upsample_nearest_exact2d _upsample_nearest_exact3d",
            "Values are copied, which is exact in any dtype.",
            Dtypes(F32, F16, F32),
        ),
        (
            "bilinear tensordot",
            "All products of arrays are one primitive in JAX, `dot_general`, and it is low precision.",
            Dtypes(F16, F16, F16),
        ),
        (
            "grid_sample grid_sampler",
            "Coordinates become indices, and a product that is converted to integers is computed as it was traced.",
            Dtypes(F32, F32, F32),
        ),
        (
            "dot vdot linalg_vecdot",
            "A product of two vectors, or of rows, is a sum over many terms that no matrix unit computes: float32, as "
            "`sum` is. In float16 a squared norm would be inf from 256 on.",
            Dtypes(F32, F32, F32),
        ),
        (
            "scatter_add",
            "A sum of many terms, so it is accumulated in float32, as `sum` is: bfloat16 stops counting at 256.",
            Dtypes(F32, F32, F32),
        ),
        (
            "binary_cross_entropy",
            "PyTorch raises an error. Written out on probabilities it cannot be told from other products: logarithms "
            "are float32, but probabilities that were rounded to float16 are 1 from 0.9998 on. Use "
            "`optax.sigmoid_binary_cross_entropy` on logits.",
            Dtypes(F32, F32, F32),
        ),
    ]
    for name in names.split()
}

X, Y = np.ones((6, 6), np.float32) * 2, np.ones((6, 6), np.float32) / 2
B = np.ones(6, np.float32)
STACK = np.ones((2, 6, 6), np.float32)
LABELS = np.array([0, 1, 2] * 2)
INDEX = np.array([0, 2])
SIGN = np.array([1, -1, 1] * 2)


def convolution(dims, transpose=False):
    """A convolution of `dims` dimensions with a bias, and its operands."""

    def conv(x, w, b):
        b = b.reshape(1, 6, *[1] * dims)
        if transpose:
            spec = ("NC" + "DHW"[-dims:], "OI" + "DHW"[-dims:], "NC" + "DHW"[-dims:])
            return lax.conv_transpose(x, w, (2,) * dims, "SAME", dimension_numbers=spec) + b
        return lax.conv_general_dilated(x, w, (1,) * dims, "SAME") + b

    return conv, np.ones((1, 6) + (4,) * dims, np.float32), np.ones((6, 6) + (2,) * dims, np.float32), B


def conv_tbc(x, w, b):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("WNC", "WIO", "WNC")) + b


def rnn(activation):
    return lambda x, h, w, u, b: activation(x @ w + b + h @ u)


def gru(x, h, w, u, b):
    reset, update = jax.nn.sigmoid(x @ w + b + h @ u), jax.nn.sigmoid(x @ u + b + h @ w)
    new = jnp.tanh(x @ w + b + reset * (h @ u))
    return (1 - update) * new + update * h


def lstm(x, h, c, w, u, b):
    gates = [x @ w + b + h @ u for _ in range(4)]
    c = jax.nn.sigmoid(gates[0]) * c + jax.nn.sigmoid(gates[1]) * jnp.tanh(gates[2])
    return jax.nn.sigmoid(gates[3]) * jnp.tanh(c)


def prelu(x, a):
    return jnp.where(x > 0, x, a * x)


def attention(q, k, v):
    return jax.nn.dot_product_attention(*[a[None, :, None] for a in (q, k, v)])


def layer_norm(x, scale, bias):
    return jax.nn.standardize(x, axis=-1) * scale + bias


def group_norm(x, scale, bias):
    return jax.nn.standardize(x.reshape(6, 1, 6), axis=-1).reshape(x.shape) * scale + bias


def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def nuclear_norm(x):
    return jnp.linalg.matrix_norm(x.astype(F32), ord="nuc")  # JAX decomposes no 16-bit matrix


def normalize(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


def renorm(x):
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.where(norm > 1, x / norm, x)


def distances(x, y):
    return jnp.linalg.norm(x[:, None] - y[None], axis=-1)


def multilabel_margin(x):
    return jnp.mean(jnp.sum(jnp.maximum(0, 1 - (x[:, :1] - x[:, 1:])), -1))


def nll(log_probs):
    return -jnp.mean(log_probs[np.arange(6), LABELS])


def resized(method, dims, antialias=False):
    shape = (1, 1) + (6,) * dims
    x = np.ones((1, 1) + (5,) * dims, np.float32)
    return lambda x: jax.image.resize(x, shape, method, antialias=antialias), x


def grid_sample(x, grid):
    return jax.scipy.ndimage.map_coordinates(x, [grid, grid], 1)


def bilinear(x, w, y):
    return jnp.einsum("bi,oij,bj->bo", x, w, y)


def binary_cross_entropy(p, y):
    return -jnp.mean(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))


def counterparts(rows):
    return {name: row for names, row in rows.items() for name in names.split()}


COUNTERPARTS = counterparts(
    {
        # lower
        "__matmul__ matmul mm": (jnp.matmul, X, Y),
        "mv": (jnp.matmul, X, B),
        "bmm": (jnp.matmul, STACK, STACK),
        "einsum": (lambda x, y: jnp.einsum("ij,jk->ik", x, y), X, Y),
        "linalg_vecdot": (jnp.linalg.vecdot, X, Y),
        "chain_matmul multi_dot linalg_multi_dot": (lambda *xs: jnp.linalg.multi_dot(xs), X, Y, X),
        "linear": (lambda x, w, b: x @ w.T + b, X, Y, B),
        "addmm": (lambda b, x, y: b + x @ y, X, X, Y),
        "addmv": (lambda b, x, y: b + x @ y, B, X, B),
        "addbmm": (lambda b, x, y: b + jnp.einsum("bij,bjk->ik", x, y), X, STACK, STACK),
        "baddbmm": (lambda b, x, y: b + x @ y, STACK, STACK, STACK),
        "addr": (lambda b, x, y: b + jnp.outer(x, y), X, B, B),
        "conv1d": convolution(1),
        "conv2d convolution _convolution _convolution.deprecated cudnn_convolution": convolution(2),
        "conv3d": convolution(3),
        "conv_tbc": (conv_tbc, STACK, STACK, B),
        "conv_transpose1d": convolution(1, transpose=True),
        "conv_transpose2d conv_transpose2d.input cudnn_convolution_transpose": convolution(2, transpose=True),
        "conv_transpose3d conv_transpose3d.input": convolution(3, transpose=True),
        "prelu": (prelu, X, B),
        "scaled_dot_product_attention _scaled_dot_product_flash_attention": (attention, X, Y, X),
        "RNNCell rnn_tanh_cell": (rnn(jnp.tanh), X, Y, X, Y, B),
        "rnn_relu_cell": (rnn(jax.nn.relu), X, Y, X, Y, B),
        "GRUCell gru_cell _thnn_fused_gru_cell": (gru, X, Y, X, Y, B),
        "LSTMCell lstm_cell _thnn_fused_lstm_cell": (lstm, X, Y, X, X, Y, B),
        # fp32
        "__pow__ pow pow.Tensor_Tensor": (jnp.power, X, Y),
        "pow.Tensor_Scalar": (lambda x: x**2, X),
        "__rpow__ pow.Scalar": (lambda x: 2.0**x, X),
        "__rdiv__ __rtruediv__": (lambda x: 1 / x, X),
        "acos": (jnp.arccos, Y),
        "asin": (jnp.arcsin, Y),
        "cosh": (jnp.cosh, X),
        "sinh": (jnp.sinh, X),
        "tan": (jnp.tan, X),
        "erfinv": (jax.scipy.special.erfinv, Y),
        "exp": (jnp.exp, X),
        "expm1": (jnp.expm1, X),
        "log": (jnp.log, X),
        "log1p": (jnp.log1p, X),
        "log2": (jnp.log2, X),
        "log10": (jnp.log10, X),
        "reciprocal": (jnp.reciprocal, X),
        "rsqrt": (lax.rsqrt, X),
        "softplus": (jax.nn.softplus, X),
        "layer_norm native_layer_norm": (layer_norm, X, B, B),
        "group_norm": (group_norm, X, B, B),
        "rms_norm": (rms_norm, X, B),
        "norm norm.Scalar": (jnp.linalg.norm, X),
        "norm.ScalarOpt_dim": (lambda x: jnp.linalg.norm(x, axis=-1), X),
        "frobenius_norm.dim linalg_matrix_norm.str_ord": (lambda x: jnp.linalg.matrix_norm(x, ord="fro"), X),
        "linalg_matrix_norm": (lambda x: jnp.linalg.matrix_norm(x, ord=1), X),
        "nuclear_norm nuclear_norm.dim": (nuclear_norm, X),
        "linalg_vector_norm": (lambda x: jnp.linalg.vector_norm(x, ord=3), X),
        "normalize": (normalize, X),
        "renorm": (renorm, X),
        "dist": (lambda x, y: jnp.linalg.norm(x - y), X, Y),
        "cdist": (distances, X, Y),
        "pdist": (lambda x: distances(x, x)[np.triu_indices(3, 1)], X),
        "cosine_similarity": (optax.cosine_similarity, X, Y),
        "cosine_embedding_loss": (lambda x, y: jnp.mean(1 - optax.cosine_similarity(x, y)), X, Y),
        "sum": (jnp.sum, X),
        "sum.dim_IntList": (lambda x: jnp.sum(x, 0), X),
        "prod": (jnp.prod, X),
        "prod.dim_int": (lambda x: jnp.prod(x, 0), X),
        "cumsum": (lambda x: jnp.cumsum(x, 0), X),
        "cumprod": (lambda x: jnp.cumprod(x, 0), X),
        "softmax softmax.int": (jax.nn.softmax, X),
        "softmin": (lambda x: jax.nn.softmax(-x), X),
        "log_softmax log_softmax.int": (jax.nn.log_softmax, X),
        "logsumexp": (lambda x: jax.nn.logsumexp(x, 0), X),
        "cross_entropy": (lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS), X),
        "nll_loss nll_loss2d": (nll, X),
        "kl_div": (optax.kl_divergence, Y, Y),
        "binary_cross_entropy_with_logits": (optax.sigmoid_binary_cross_entropy, X, Y),
        "soft_margin_loss": (lambda x: jnp.mean(jnp.log1p(jnp.exp(-SIGN * x))), X),
        "hinge_embedding_loss": (lambda x: jnp.mean(jnp.where(SIGN == 1, x, jnp.maximum(0, 1 - x))), X),
        "margin_ranking_loss": (lambda x, y: jnp.mean(jnp.maximum(0, -SIGN * (x - y))), X, Y),
        "multilabel_margin_loss": (multilabel_margin, X),
        "multi_margin_loss": (lambda x: jnp.mean(optax.losses.multiclass_hinge_loss(x, LABELS)), X),
        "poisson_nll_loss": (lambda x, y: jnp.mean(jnp.exp(x) - y * x), X, Y),
        "l1_loss": (lambda x, y: jnp.mean(jnp.abs(x - y)), X, Y),
        "mse_loss": (lambda x, y: jnp.mean((x - y) ** 2), X, Y),
        "smooth_l1_loss huber_loss": (lambda x, y: jnp.mean(optax.huber_loss(x, y)), X, Y),
        "triplet_margin_loss": (optax.losses.triplet_margin_loss, X, Y, Y),
        "upsample_nearest1d _upsample_nearest_exact1d": resized("nearest", 1),
        "upsample_nearest2d _upsample_nearest_exact2d": resized("nearest", 2),
        "upsample_nearest3d _upsample_nearest_exact3d": resized("nearest", 3),
        "upsample_linear1d": resized("linear", 1),
        "upsample_bilinear2d": resized("linear", 2),
        "_upsample_bilinear2d_aa": resized("linear", 2, antialias=True),
        "upsample_trilinear3d": resized("linear", 3),
        "upsample_bicubic2d": resized("cubic", 2),
        "_upsample_bicubic2d_aa": resized("cubic", 2, antialias=True),
        # promote
        "addcdiv": (lambda a, x, y: a + 0.5 * x / y, X, X, Y),
        "addcmul": (lambda a, x, y: a + 0.5 * x * y, X, X, Y),
        "atan2": (jnp.arctan2, X, Y),
        "bilinear": (bilinear, X, np.ones((2, 6, 6), np.float32), Y),
        "cross": (jnp.cross, X[:, :3], Y[:, :3]),
        "dot vdot": (jnp.vdot, X, Y),
        "tensordot": (lambda x, y: jnp.tensordot(x, y, 1), X, Y),
        "grid_sample grid_sampler": (grid_sample, X, Y),
        "index_put": (lambda x, y: x.at[INDEX].set(y[:2]), X, Y),
        "scatter_add": (lambda x, y: x.at[INDEX].add(y[:2]), X, Y),
        # banned
        "binary_cross_entropy": (binary_cross_entropy, Y, Y),
    }
)


def result_dtype(fun, *inputs):
    """The dtype of what `fun` computes under autocast, as an op reads it, before it is cast back for the caller."""
    last = jax.make_jaxpr(amp.autocast(read_low(fun)))(*inputs).eqns[-1]
    return (last.invars if last.primitive.name == "convert_element_type" else last.outvars)[0].aval.dtype


def of_computed(fun, mixed=False):
    """`fun` of what a product computes from the inputs, of the last input itself where they are `mixed`."""

    def computed(*inputs):
        low = [jnp.matmul(x.reshape(1, -1), jnp.eye(x.size)).reshape(x.shape) for x in inputs]
        return fun(*low[:-1], inputs[-1]) if mixed else fun(*low)

    return computed


def test_every_name_of_the_lists_has_a_counterpart():
    assert set(COUNTERPARTS) == {*PROMISED, BANNED}
    assert set(DIFFERENCES) <= set(COUNTERPARTS)
    assert [name for name, (_, dtypes) in DIFFERENCES.items() if PROMISED.get(name) == dtypes] == []


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_computes_in_the_dtype_of_its_list(name):
    fun, *inputs = COUNTERPARTS[name]
    dtypes = Dtypes(
        float32=result_dtype(fun, *inputs),
        low=result_dtype(of_computed(fun), *inputs),
        mixed=result_dtype(of_computed(fun, mixed=True), *inputs),
    )
    assert dtypes == (DIFFERENCES[name][1] if name in DIFFERENCES else PROMISED[name])


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_leaves_float16_inputs_to_the_function(name):
    fun, *inputs = COUNTERPARTS[name]
    half = [x.astype(F16) for x in inputs]
    assert jax.eval_shape(amp.autocast(fun), *half) == jax.eval_shape(fun, *half)


def test_every_difference_is_on_the_docs_page():
    page = (pathlib.Path(__file__).parents[2] / "docs/migrating.md").read_text()
    for name, (reason, expected) in DIFFERENCES.items():
        assert f"`{name}`" in page
        assert f"| {reason} | {' | '.join(map(str, expected))} |" in page

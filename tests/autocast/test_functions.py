"""Where plain works, autocast works: hundreds of public functions, fed with what low-precision products computed.

A row is a function and its inputs. Every finite float32 input goes through a product with the identity, so that the
function meets it in the compute dtype; all inputs are exact there, so plain and autocast start from the same numbers.
"""

import math
from operator import attrgetter

import jax
import jax.experimental
import jax.flatten_util
import jax.scipy.cluster.vq
import jax.scipy.fft
import jax.scipy.ndimage
import jax.scipy.optimize
import jax.scipy.signal
import jax.scipy.sparse.linalg
import jax.scipy.stats
import numpy as np
import optax
import pytest
from jax import lax, random
from jax import numpy as jnp

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def floats(values):
    return np.array(values, np.float32)


# A few bits each, so that float16 and bfloat16 hold them exactly.
X = floats([[0.5, -1.25, 2], [-0.75, 1.5, 0.25]])
Y = floats([[1.75, 0.625, -0.5], [-1.5, 2.25, 1.125]])
P = floats([[0.5, 1.25, 2], [0.75, 1.5, 3]])  # positive
Q = floats([[1.5, 0.625, 3], [2.5, 1.125, 0.875]])  # positive
G = floats([[1.5, 2.25, 3], [1.75, 4.5, 2.5]])  # greater than 1
U = floats([[0.5, -0.25, 0.75], [-0.625, 0.125, 0.375]])  # between -1 and 1
C = floats([[0.5, 0.25, 0.75], [0.625, 0.125, 0.375]])  # between 0 and 1
N = floats([[0.5, -1.25, np.inf], [np.nan, 1.5, -np.inf]])  # not all finite
V = floats([0.5, -1.25, 2, 1.5, 0.25, -0.75])  # a vector
R = floats([-1.25, -0.75, 0.25, 0.5, 1.5, 2])  # a vector in rising order
W = floats([1, -0.5, 0.25])  # a short vector
S = floats([[2, -0.5, 0.25], [0.75, 1.5, -0.25], [-0.5, 0.125, 3]])  # square, well-conditioned
D = floats([[4, 1, 0.5], [1, 3, 0.25], [0.5, 0.25, 2]])  # positive definite
T = floats([[2, 0, 0], [1, 1.5, 0], [0.5, 0.25, 3]])  # triangular
ONE, HALF = floats(1.5), floats(0.5)  # scalars
PROBS = floats([[0.5, 0.25, 0.25], [0.125, 0.25, 0.625]])
ONE_HOT = floats([[0, 1, 0], [1, 0, 0]])
IMAGE = floats(np.arange(32).reshape(1, 2, 4, 4) * 5 % 33)  # NCHW, no two pixels alike
KERNEL = floats(np.arange(24).reshape(3, 2, 2, 2) % 5 - 2)  # OIHW
SIGNAL = floats(np.arange(32) * 5 % 7 - 3)
TOKENS = [x.reshape(1, 3, 2, 1) for x in (X, Y, P)]  # queries, keys, values
MASK = np.array([[True, False, True], [False, False, True]])
INTS = np.array([[1, 0, 2], [2, 1, 0]], np.int32)
INDEX = np.array([2, 0, 5], np.int32)
LABELS = np.array([1, 0], np.int32)
SEGMENTS = np.array([0, 0, 1, 1, 2, 2], np.int32)
COMPLEX = np.array([1 + 2j, -0.5 + 1j, 0.25 - 1j], np.complex64)
KEY = np.array([0, 1], np.uint32)

NAMESPACES = {"jnp": jnp, "nn": jax.nn, "lax": lax, "scipy": jax.scipy, "optax": optax.losses}


def named(names, *inputs):
    """Rows of functions of one namespace and the same inputs: `named("jnp: exp log", X)`."""
    namespace, functions = names.split(": ")
    return {f"{namespace}.{name}": (attrgetter(name)(NAMESPACES[namespace]), *inputs) for name in functions.split()}


def options(name, function, values, *inputs):
    """Rows of one function, an option of which takes several values."""
    return {f"{name} {value}": (lambda *xs, value=value: function(*xs, value), *inputs) for value in values}


ELEMENTWISE = [
    named("jnp: abs cbrt cos cosh exp exp2 expm1 floor frexp i0 modf negative real round sign signbit sin sinc", X),
    named("jnp: sinh spacing square tan tanh trunc arcsinh arctan angle", X),
    named("jnp: sqrt log log2 log10 log1p reciprocal", P),
    named("jnp: arccosh", G),
    named("jnp: arccos arcsin arctanh", U),
    named("jnp: isfinite isnan nan_to_num", N),
    named("jnp: add multiply divide maximum fmax arctan2 copysign hypot remainder divmod heaviside nextafter", X, Y),
    named("jnp: equal greater isclose allclose array_equal logaddexp logical_and", X, Y),
    named("jnp: power", P, Y),
    named("jnp: ldexp", X, INTS),
    named("jnp: clip", X, -ONE, ONE),
    named("lax: bessel_i0e erf erf_inv erfc logistic optimization_barrier", U),
    named("lax: rsqrt lgamma digamma", P),
    named("lax: complex rem", X, Y),
    named("lax: igamma random_gamma_grad", P, Q),
    named("lax: betainc", P, Q, C),
    named("lax: zeta", G, Q),
    named("lax: polygamma", INTS.astype(np.float32) + 1, P),
    named("lax: clamp", -ONE, X, ONE),
    named("lax: select_n", INTS, X, Y, P),
    options("lax.bitcast_convert_type", lax.bitcast_convert_type, (jnp.int32, jnp.int8), X),
    options("lax.integer_pow", lax.integer_pow, (-2, 0, 3), X),
    options("x.astype", lambda x, dtype: 2 * x.astype(dtype), (F16, BF16, jnp.complex64, jnp.int32, bool), X),
    {
        "jnp.power to integers": (lambda x: x**INTS, X),
        "jnp.power of a constant": (lambda x: 2.0**x, X),
        "x // 1, x % 1": (lambda x: (x // 1, x % 1), X),
        "float8": (lambda x: x.astype(jnp.float8_e4m3fn).astype(F32), X),
        "x.view": (lambda x: (x.view(jnp.int32) + 1).view(F32), X),
        "lax.reduce_precision": (lambda x: lax.reduce_precision(x, 5, 2), X),
        "lax.real": (lambda z, x: lax.real(lax.conj(z) * x), COMPLEX, W),
        "lax.optimization_barrier of mixed dtypes": (lambda x: lax.optimization_barrier((INTS, Y, x)), X),
        "lax.stop_gradient": (lambda x: x * lax.stop_gradient(x), X),
    },
]

NN = [
    named("nn: celu elu gelu glu hard_sigmoid leaky_relu log_sigmoid log_softmax logmeanexp logsumexp mish relu6", V),
    named("nn: selu sigmoid silu soft_sign softmax softplus sparse_plus squareplus standardize", V),
    named("nn: log1mexp", P),
    named("nn: dot_product_attention", *TOKENS),
    {
        "nn.gelu exact": (lambda x: jax.nn.gelu(x, approximate=False), X),
        "nn.softmax where": (lambda x: jax.nn.softmax(x, where=MASK), X),
        "nn.logsumexp weighted": (lambda x, w: jax.nn.logsumexp(x, b=w, return_sign=True), X, Y),
        "nn.one_hot": (lambda x: jax.nn.one_hot(INTS, 3) * x[..., None], X),
        "nn.dot_product_attention biased": (jax.nn.dot_product_attention, *TOKENS, S[None, None]),
    },
]

PRODUCTS = [
    named("jnp: matmul", S, X.T),
    named("jnp: vdot outer kron vecdot cross", X, Y),
    named("jnp: matvec", S, W),
    named("jnp: convolve", V, W),
    options("jnp.einsum", lambda x, spec: jnp.einsum(spec, x), ("ii", "ij->ji", "ij->j"), S),
    options("jnp.einsum", lambda x, y, s: jnp.einsum(s, x, y), ("ij,kj", "ij,ij->ij", "i...,i...->..."), X, Y),
    {
        "jnp.matmul batched": (jnp.matmul, IMAGE / 8, IMAGE / 8),
        "jnp.matmul of integers": (lambda x: (INTS @ INTS.T) * x, ONE),
        "jnp.matmul of an input": (lambda x: x @ D, S),
        "jnp.matmul in float16": (lambda x: jnp.matmul(x.astype(F16), S.astype(F16)), X),
        "jnp.matmul in highest precision": (lambda x: jnp.matmul(x, S, precision="highest"), X),
        "jnp.matmul to float32": (lambda x: jnp.matmul(x, S, preferred_element_type=F32), X),
        "jnp.matmul of complex": (lambda x: COMPLEX @ (x * COMPLEX), W),
        "jnp.tensordot over axes": (lambda x, y: jnp.tensordot(x, y, axes=([0, 1], [0, 1])), X, Y),
        "jnp.einsum of three": (lambda x, y, z: jnp.einsum("ij,jk,k->i", x, y, z), X, S, W),
        "jnp.linalg.multi_dot": (lambda *xs: jnp.linalg.multi_dot(xs), X, S, D),
        "lax.dot_general of mixed dtypes": (lambda x: lax.dot(x, S.astype(BF16), preferred_element_type=F32), X),
        "jnp.matmul with float16": (lambda x: x @ S.astype(F16), X),
        "jnp.matmul of float16": (lambda x: S.astype(F16) @ x, X.T),
        "jnp.matmul to float16": (lambda x: jnp.matmul(x, S.astype(F16), preferred_element_type=F16), X),
        "lax.dot_general with float16": (lambda x: lax.dot(x, S.astype(F16)), X),
        "lax.ragged_dot": (lambda x, w: lax.ragged_dot(x, w, np.array([1, 1], np.int32)), X, np.stack([S, D])),
        "lax.ragged_dot with float16": (
            lambda x: lax.ragged_dot(x, np.stack([S, D]).astype(F16), np.array([1, 1], np.int32)),
            X,
        ),
        "lax.conv": (lambda x, k: lax.conv(x, k, (2, 1), "SAME"), IMAGE, KERNEL),
        "lax.conv dilated": (lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", None, (2, 2)), IMAGE, KERNEL),
        "lax.conv grouped": (
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=2),
            IMAGE,
            KERNEL[:2, :1],
        ),
        "lax.conv_transpose": (
            lambda x, k: lax.conv_transpose(x, k, (2,), "SAME"),
            X[None],
            SIGNAL[:18].reshape(2, 3, 3),
        ),
        "lax.conv_general_dilated_patches": (
            lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "SAME"),
            IMAGE,
        ),
        "lax.conv_general_dilated_local": (
            lambda x, k: lax.conv_general_dilated_local(x, k, (1,), "VALID", (2,)),
            X[None],
            SIGNAL[:24].reshape(3, 4, 2),
        ),
    },
]

REDUCTIONS = [
    named("jnp: sum prod mean std max ptp median average all argmax count_nonzero cov", X),
    named("jnp: cumsum cumprod diff trapezoid gradient", V),
    named("jnp: nansum nanvar nanmax nanargmin nancumsum", X * np.where(MASK, 1, np.nan)),
    named("jnp: quantile", V, HALF),
    named("jnp: digitize", X, R),
    options("jnp.sum", lambda x, dtype: jnp.sum(x, 1, dtype), (F16, jnp.int32), X),
    {
        "jnp.sum where": (lambda x: jnp.sum(x, where=MASK, initial=2.0), X),
        "jnp.max where": (lambda x: jnp.max(x, 1, where=MASK, initial=-1e9), X),
        "jnp.var along an axis": (lambda x: jnp.var(x, 0, ddof=1, keepdims=True), X),
        "jnp.histogram": (lambda x, w: jnp.histogram(x, 4, (-2, 2), weights=w), V, R),
        "jnp.bincount": (lambda x: jnp.bincount(SEGMENTS, x, length=4), V),
        "jnp.apply_along_axis": (lambda x: jnp.apply_along_axis(jnp.cumsum, 1, x), X),
        "lax.reduce": (lambda x: lax.reduce(x, 0.0, jnp.hypot, (1,)), X),
        "lax.reduce from a start beyond float16": (lambda x: lax.reduce(x, -1e9, lax.max, (1,)), X),
        "lax.reduce of several": (
            lambda x, y: lax.reduce((x, y), (-np.inf, 0.0), lambda a, b: (lax.max(a[0], b[0]), a[1] + b[1]), (1,)),
            X,
            Y,
        ),
        "lax.reduce of floats and integers": (
            lambda x: lax.reduce(
                (x, INTS), (np.float32(0), np.int32(0)), lambda a, b: (a[0] + b[0], a[1] | b[1]), (0,)
            ),
            X,
        ),
        "lax.cumprod reversed": (lambda x: lax.cumprod(x, 1, reverse=True), X),
        "lax.cummax": (lambda x: lax.cummax(x, 1), X),
        "lax.cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), X),
        "lax.reduce_window": (lambda x: lax.reduce_window(x, 0.0, jnp.hypot, (1, 2), (1, 1), "VALID"), X),
        "lax.reduce_window mul": (lambda x: lax.reduce_window(x, 1.0, lax.mul, (1, 2), (1, 1), "SAME"), X),
        "average pooling": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 1, 1), "SAME"), IMAGE),
        "max pooling": (lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "SAME"), IMAGE),
        "lax.associative_scan": (
            lambda *ab: lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), ab),
            V,
            R,
        ),
        "jax.ops.segment_sum": (lambda x: jax.ops.segment_sum(x, SEGMENTS, 4), V),
        "jax.ops.segment_max": (lambda x: jax.ops.segment_max(x, SEGMENTS, 4), V),
    },
]

ORDER = [
    named("jnp: sort argsort", X),
    named("jnp: searchsorted", R, X),
    named("jnp: isin", X, Y),
    named("lax: sort_key_val", V, R),
    {
        "jnp.sort descending": (lambda x: jnp.sort(x, descending=True), X),
        "jnp.sort_complex": (jnp.sort_complex, V),
        "jnp.lexsort": (lambda x, y: jnp.lexsort((x, y)), V, R),
        "jnp.partition": (lambda x: jnp.partition(x, 2), V),
        "jnp.unique": (lambda x: jnp.unique(x, True, True, True, size=4), V),
        "jnp.nonzero": (lambda x: jnp.nonzero(jax.nn.relu(x), size=4), X),
        "jnp.extract": (lambda x: jnp.extract(x > 0, x, size=3), X),
        "lax.sort of several": (lambda x, y: lax.sort((x, y, INTS), num_keys=2), X, Y),
        "lax.sort of mixed dtypes": (lambda x: lax.sort((x, Y), num_keys=1), X),
        "lax.sort of mixed dtypes and integers": (lambda x: lax.sort((INTS, Y, x), num_keys=1), X),
        "lax.top_k": (lambda x: lax.top_k(x, 2), X),
        "lax.approx_max_k": (lambda x: lax.approx_max_k(x, 2), X),
    },
]

SHAPES = [
    named("jnp: ravel transpose atleast_3d rot90 zeros_like unstack", X),
    named("jnp: diag diagonal trace tril", S),
    named("jnp: broadcast_arrays", X, Y),
    named("jnp: vander unwrap polyint", V),
    named("jnp: meshgrid polymul", V, W),
    named("jnp: full_like", X, ONE),
    named("jnp: interp", X, R, V),
    named("jnp: polyval", W, X),
    options(
        "jnp.pad",
        lambda x, mode: jnp.pad(x, ((1, 0), (2, 1)), mode),
        ("edge", "linear_ramp", "maximum", "mean", "reflect", "symmetric", "wrap"),
        X,
    ),
    {
        "jnp.pad with what is beyond float16": (lambda x: jnp.pad(x, 1, constant_values=-1e9), X),
        "jnp.pad with what is computed": (lambda x, c: jnp.pad(x, 1, constant_values=c), X, ONE),
        "jnp.reshape": (lambda x: x.reshape(3, 2), X),
        "jnp.broadcast_to": (lambda x: jnp.broadcast_to(x, (2, 2, 3)), X),
        "jnp.concatenate": (lambda x, y: jnp.concatenate([x, y, jnp.zeros((1, 3))]), X, Y),
        "jnp.concatenate of mixed dtypes": (lambda x: jnp.concatenate([x, Y]), X),
        "jnp.block": (lambda x, y: jnp.block([[x, y], [y, x]]), X, Y),
        "jnp.tile": (lambda x: jnp.tile(x, (2, 2)), X),
        "jnp.repeat": (lambda x: jnp.repeat(x, SEGMENTS, total_repeat_length=6), V),
        "jnp.resize": (lambda x: jnp.resize(x, (3, 3)), X),
        "jnp.split": (lambda x: jnp.split(x, 3, 1), X),
        "jnp.delete": (lambda x: jnp.delete(x, 1, 1), X),
        "jnp.insert": (lambda x, y: jnp.insert(x, 1, y, 1), X, ONE),
        "jnp.choose": (lambda x, y: jnp.choose(INTS, [x, y], mode="wrap"), X, Y),
        "jnp.select": (lambda x, y: jnp.select([x > 1, x > 0], [x, y], -1e9), X, Y),
        "jnp.where": (lambda x: jnp.where(x > Y, x, Y), X),
        "jnp.piecewise": (lambda x: jnp.piecewise(x, [x < 0, x > 1], [jnp.exp, jnp.sin, 0.5]), X),
        "jnp.linspace": (lambda a, b: jnp.linspace(a, b, 5), HALF, ONE),
        "jnp.vectorize": (jnp.vectorize(jnp.dot, signature="(n),(n)->()"), X, Y),
        "jnp.polyfit": (lambda x, y: jnp.polyfit(x, y, 2), R, V),
        "jnp.roots": (lambda x: jnp.roots(x, strip_zeros=False), W),
        "lax.pad negative": (lambda x, c: lax.pad(x, c, ((1, 0, 1), (-1, 2, 0))), X, ONE),
        "lax.split": (lambda x: lax.split(x, (1, 2), 1), X),
    },
]

SCATTER = lax.ScatterDimensionNumbers((), (0,), (0,))
INDEXING = [
    named("jnp: take", V, INDEX),
    options("at", lambda x, y, f: getattr(x.at[INDEX], f)(y), ("set", "add", "multiply", "divide", "max"), V, W),
    options("at of mixed dtypes", lambda x, f: getattr(x.at[0], f)(Y[1]), ("set", "add", "multiply", "max"), X),
    {
        "x[1], x[:, ::-2]": (lambda x: (x[1], x[:, ::-2]), X),
        "x[computed]": (lambda x: x[jnp.argsort(x)[::-1]], V),
        "jnp.take filled": (lambda x: jnp.take(x, INDEX + 2, mode="fill", fill_value=-1e9), V),
        "jnp.take_along_axis": (lambda x: jnp.take_along_axis(x, INTS, 1), X),
        "jnp.put_along_axis": (lambda x, y: jnp.put_along_axis(x, INTS, y, 1, inplace=False), X, Y),
        "jnp.place": (lambda x, y: jnp.place(x, MASK, y, inplace=False), X, W),
        "at[mask].set": (lambda x: x.at[MASK].set(0.0), X),
        "at.set beyond float16": (lambda x: x.at[INDEX].set(-1e9), V),
        "at.set into an input": (lambda y: jnp.asarray(X).at[0].set(y), W),
        "at.add into zeros": (lambda y: jnp.zeros(6).at[SEGMENTS].add(y), V),
        "at.apply": (lambda x: x.at[INDEX].apply(jnp.sin), V),
        "at.get filled": (lambda x: x.at[INDEX + 2].get(mode="fill", fill_value=0), V),
        "lax.dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (0, i[0, 0]), (2, 2)), X, INTS),
        "lax.dynamic_update_slice": (lambda x, y, i: lax.dynamic_update_slice(x, y[:1], (i[0, 0], 0)), X, Y, INTS),
        "lax.dynamic_update_slice of mixed dtypes": (lambda x: lax.dynamic_update_slice(x, Y[:1], (1, 0)), X),
        "lax.scatter": (lambda x, y: lax.scatter(x, INDEX[:, None], y, SCATTER), V, W),
        "lax.scatter_apply": (
            lambda x: lax.scatter_apply(x, INDEX[:, None], jnp.sin, SCATTER, update_shape=(3,)),
            V,
        ),
    },
]

LINALG = [
    named("jnp: linalg.det linalg.inv linalg.slogdet linalg.svd linalg.qr linalg.pinv linalg.eig", S),
    named("jnp: linalg.cholesky linalg.eigh linalg.matrix_rank", D),
    named("jnp: linalg.solve linalg.lstsq", S, W),
    options("jnp.linalg.norm", jnp.linalg.norm, (1, -2, "fro", "nuc"), S),
    options("jnp.linalg.vector_norm", lambda x, p: jnp.linalg.vector_norm(x, ord=p), (0, 2, 3, np.inf), V),
    options("jnp.linalg.matrix_power", jnp.linalg.matrix_power, (-2, 3), S),
    named("scipy: linalg.lu linalg.expm linalg.schur linalg.sqrtm", S),
    named("scipy: linalg.block_diag", S, D),
    named("scipy: linalg.toeplitz", V),
    {
        "lax.linalg.triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, lower=True), T, X),
        "lax.linalg.tridiagonal_solve": (lax.linalg.tridiagonal_solve, W * [0, 1, 1], W + 4, W * [1, 1, 0], X.T),
        "scipy.linalg.cho_solve": (lambda a, b: jax.scipy.linalg.cho_solve((a, True), b), T, W),
        "scipy.linalg.lu_solve": (lambda a, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(a), b), S, W),
    },
]

FFT = [
    named("jnp: fft.fft fft.rfft fft.irfft fft.hfft fft.fftshift", V),
    named("jnp: fft.fft2 fft.rfftn fft.irfft2", IMAGE),
    named("scipy: fft.dct", V),
]

SPECIAL = [
    named("scipy: special.erfcx special.i1 special.log_ndtr special.wofz", X),
    named("scipy: special.entr special.exp1 special.expi special.gamma", P),
    named("scipy: special.kl_div special.xlog1py", P, Q),
    named("scipy: special.boxcox", P, Y),
    named("scipy: special.logit special.ndtri", C),
    named("scipy: special.hyp1f1", P, Q, U),
    named("scipy: special.hyp2f1", P, Q, G, U),
    {
        "scipy.special.bessel_jn": (lambda x: jax.scipy.special.bessel_jn(x, v=3), P[0]),
        "scipy.special.expn": (lambda x: jax.scipy.special.expn(2, x), P),
        "scipy.special.multigammaln": (lambda x: jax.scipy.special.multigammaln(x, 2), G),
        "scipy.special.polygamma": (lambda x: jax.scipy.special.polygamma(1, x), P),
    },
]

STATS = [
    named("scipy: stats.norm.logpdf stats.norm.cdf stats.cauchy.cdf stats.sem stats.rankdata", X),
    named("scipy: stats.gamma.logpdf stats.gennorm.logpdf", P, Q),
    named("scipy: stats.t.logpdf stats.vonmises.logpdf", X, P),
    named("scipy: stats.poisson.logpmf", INTS, C),
    named("scipy: stats.multivariate_normal.logpdf", X, W, D),
    {
        "scipy.stats.mode": (lambda x: jax.scipy.stats.mode(jnp.round(x)), V),
        "scipy.stats.gaussian_kde": (lambda x, y: jax.scipy.stats.gaussian_kde(x)(y), V, W),
    },
]

SCIPY = [
    named("scipy: signal.fftconvolve", V, W),
    named("scipy: signal.convolve2d", S, X),
    named("scipy: signal.detrend", V),
    named("scipy: cluster.vq.vq", X, Y),
    named("scipy: sparse.linalg.cg sparse.linalg.bicgstab", D, W),
    options("image.resize", lambda x, m: jax.image.resize(x, (1, 2, 3, 6), m), ("nearest", "linear", "cubic"), IMAGE),
    options(
        "scipy.ndimage.map_coordinates",
        lambda x, i, mode: jax.scipy.ndimage.map_coordinates(x, [i, 1.5 * i], 1, mode),
        ("constant", "mirror"),
        S,
        2 * C.ravel(),
    ),
    {
        "image.scale_and_translate": (
            lambda x: jax.image.scale_and_translate(x, (4, 4), (0, 1), W[:2] + 1, W[1:], "linear"),
            S,
        ),
        "scipy.signal.stft": (lambda x: jax.scipy.signal.stft(x, nperseg=8), SIGNAL),
        "scipy.optimize.minimize": (
            lambda x, a: jax.scipy.optimize.minimize(lambda x: jnp.sum((a @ x - 1) ** 2), x, method="BFGS").x,
            W,
            S,
        ),
    },
]


def sampled(name, *inputs):
    """A row of a sampler, whose key is made inside."""
    return {f"random.{name}": (lambda *args: getattr(random, name)(random.wrap_key_data(KEY), *args), *inputs)}


RANDOM = [
    sampled("bernoulli", C),
    sampled("categorical", X),
    sampled("gamma", P),
    sampled("multivariate_normal", W, D),
    sampled("permutation", V),
    sampled("truncated_normal", -ONE, ONE),
    options(
        "random",
        lambda x, name: x * getattr(random, name)(random.wrap_key_data(KEY), x.shape),
        ("normal", "uniform", "gumbel", "cauchy", "rademacher"),
        X,
    ),
    {
        "random.uniform between": (lambda a, b: random.uniform(random.key(0), (2, 3), F32, a, b), -ONE, ONE),
        "random.choice": (lambda x, p: random.choice(random.key(0), x, (4,), p=p), W, PROBS[0]),
        "random key as an argument": (lambda x, key: x * random.normal(random.wrap_key_data(key), x.shape), X, KEY),
        "dropout": (lambda x: jnp.where(random.bernoulli(random.key(0), 0.5, x.shape), x / 0.5, 0), X),
    },
]

LOSSES = [
    named("optax: cosine_similarity huber_loss l2_loss log_cosh squared_error kl_divergence_with_log_targets", X, Y),
    named("optax: sigmoid_binary_cross_entropy", X, C),
    named("optax: softmax_cross_entropy safe_softmax_cross_entropy poly_loss_cross_entropy dice_loss", X, PROBS),
    named("optax: kl_divergence generalized_kl_divergence", -P, PROBS),
    named("optax: hinge_loss perceptron_loss", X, 2 * ONE_HOT - 1),
    named(
        "optax: softmax_cross_entropy_with_integer_labels multiclass_hinge_loss multiclass_sparsemax_loss", X, LABELS
    ),
    named("optax: sparsemax_loss", X, MASK.astype(np.int32)),
    named("optax: ranking_softmax_loss", X, P),
    named("optax: triplet_margin_loss", X, Y, P),
    {
        "optax.smooth_labels": (lambda x: optax.smooth_labels(x, 0.125), PROBS),
        "optax.ctc_loss": (
            lambda x: optax.ctc_loss(x, jnp.zeros((2, 3)), np.array([[1], [2]]), jnp.zeros((2, 1))),
            floats(np.arange(18).reshape(2, 3, 3) % 5 / 2 - 1),
        ),
        "optax.make_fenchel_young_loss": (optax.losses.make_fenchel_young_loss(jax.nn.logsumexp), X, PROBS),
        "optax.projection_simplex": (optax.projections.projection_simplex, V),
        "optax.clip_by_global_norm": (lambda g: optax.clip_by_global_norm(1.0).update(g, ())[0], X),
        "optax.adam": (lambda p, g: optax.adam(0.5).update(g, optax.adam(0.5).init(p)), X, Y),
    },
]


@jax.custom_jvp
def soft_sign(x):
    return x / (1 + jnp.abs(x))


soft_sign.defjvp(lambda primals, tangents: (soft_sign(*primals), tangents[0] / (1 + jnp.abs(primals[0])) ** 2))


@jax.custom_vjp
def double(x):
    return 2 * x


double.defvjp(lambda x: (2 * x, x), lambda x, g: (jnp.where(x > 0, 2 * g, g),))


def bisect(fun, x):
    """Finds the root of a rising function between 0 and 4."""

    def halve(_, interval):
        middle = sum(interval) / 2
        below = fun(middle) < 0
        return jnp.where(below, middle, interval[0]), jnp.where(below, interval[1], middle)

    return lax.fori_loop(0, 20, halve, (jnp.zeros_like(x), jnp.full_like(x, 4.0)))[0]


def steps_to_close(x):
    """The number of halvings until an interval around each root is small; capped, or autocast could go on for ever."""

    def halve(state):
        n, low, high = state
        middle = (low + high) / 2
        below = middle**2 < x
        return n + 1, jnp.where(below, middle, low), jnp.where(below, high, middle)

    def is_open(state):
        n, low, high = state
        return (n < 99) & (jnp.max(high - low) > 1e-6)

    return lax.while_loop(is_open, halve, (0, 0 * x, x + 1))[0]


def steps_to_3000(x):
    """The number of times that 1 is added until 3000 is reached, which float16 cannot do."""
    return lax.while_loop(lambda s: (s[0] < 9999) & jnp.all(s[1] < 3000), lambda s: (s[0] + 1, s[1] + 1.0), (0, x))[0]


def after(effect):
    """The identity, after an effect."""
    return lambda x: (effect(x), x)[1]


def layer(x):
    return jnp.sin(x @ S)


CONSTANTS = [
    {
        "a constant beyond float16": (lambda x: jnp.where(MASK, x, -1e9), X),
        "a constant beyond float16, negated": (lambda x: jnp.where(MASK, x, -jnp.float32(1e9)), X),
        "a constant beyond float16, computed": (lambda x: jnp.where(MASK, x, jnp.float32(1e5) * jnp.float32(10)), X),
        "a constant beyond float16, concatenated": (lambda x: x + jnp.concatenate([jnp.full(2, 1e9), jnp.zeros(1)]), X),
        "a constant beyond float16, closed over": (lambda x: jnp.maximum(x, R[:3] * -1e9), X),
        "a constant beyond float16, from a call": (
            lambda x: jnp.where(MASK, x, jax.jit(lambda: jnp.full(3, -1e9))()),
            X,
        ),
        "a constant beyond float16, from a branch": (
            lambda x: jnp.where(MASK, x, lax.cond(x[0, 0] > 0, lambda: -1e9, lambda: -1e8)),
            X,
        ),
        "a constant beyond float16, carried": (
            lambda x: lax.fori_loop(0, 2, lambda _, c: jnp.where(MASK, x, c), jnp.full_like(x, -1e9)),
            X,
        ),
        "a constant below float16, computed": (lambda x: jnp.log(x * 0 + jnp.float32(1e-5) ** 2), X),
    }
]

CONTROL = [
    {
        "lax.map": (lambda x: lax.map(layer, x), X),
        "lax.map batched": (lambda x: lax.map(layer, x, batch_size=2), X),
        "lax.scan": (lambda x, c: lax.scan(lambda c, row: (jnp.tanh(c @ S + row), c), c, x), X, W),
        "lax.scan reversed": (lambda x: lax.scan(lambda c, v: (c * v, c + v), ONE, x, reverse=True), V),
        "lax.scan of integers": (lambda x: lax.scan(lambda c, v: (c + 1, c * v), 0, x), V),
        "lax.fori_loop": (lambda x: lax.fori_loop(0, 3, lambda _, y: y * x, jnp.ones_like(x)), X),
        "lax.while_loop": (lambda x: lax.while_loop(lambda c: jnp.sum(c) < 50, lambda c: c * 2, x), P),
        "lax.while_loop that converges": (steps_to_close, P),
        "lax.while_loop that counts": (steps_to_3000, X),
        "lax.while_loop under vmap": (
            jax.vmap(lambda x: lax.while_loop(lambda c: c < 50, lambda c: c * 2, x)),
            P[0],
        ),
        "lax.cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.cos, layer, x), X),
        "lax.cond under vmap": (jax.vmap(lambda x: lax.cond(x[0] > 0, jnp.cos, layer, x)), X),
        "lax.switch": (lambda x, i: lax.switch(i[0, 0], [jnp.exp, layer, lambda x: x], x), X, INTS),
        "lax.custom_root": (
            lambda a: lax.custom_root(lambda x: x**2 - a, a, bisect, lambda g, y: y / g(jnp.ones_like(y))),
            P,
        ),
        "lax.custom_linear_solve": (
            lambda a, b: lax.custom_linear_solve(
                lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b), symmetric=True
            ),
            D,
            W,
        ),
        "lax.platform_dependent": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), X),
        "jax.jit": (jax.jit(layer), X),
        "jax.vmap": (jax.vmap(lambda row: jnp.outer(row, row)), X),
        "jax.checkpoint": (jax.checkpoint(layer), X),
        "jax.grad": (jax.grad(lambda x: jnp.sum(layer(x))), X),
        "jax.jvp": (lambda x, y: jax.jvp(layer, (x,), (y,)), X, Y),
        "jax.linearize": (lambda x, y: jax.linearize(layer, x)[1](y), X, Y),
        "jax.jacrev": (jax.jacrev(layer), W),
        "jax.hessian": (jax.hessian(lambda x: jnp.sum(layer(x))), W),
        "jax.custom_jvp": (soft_sign, X),
        "jax.custom_vjp": (double, X),
        "jax.named_call": (jax.named_call(layer, name="layer"), X),
        "jax.pure_callback": (lambda x: jax.pure_callback(np.sin, jax.typeof(x), x), X),
        "jax.pure_callback under vmap": (
            jax.vmap(lambda x: jax.pure_callback(np.sin, jax.typeof(x), x, vmap_method="expand_dims")),
            X,
        ),
        "jax.experimental.io_callback": (lambda x: jax.experimental.io_callback(np.sin, jax.typeof(x), x), X),
        "jax.debug.print": (after(lambda x: jax.debug.print("{}", x[0, 0])), X),
        "jax.debug.callback": (after(lambda x: jax.debug.callback(lambda x: None, x, ordered=True)), X),
        "jax.flatten_util.ravel_pytree": (lambda *xs: jax.flatten_util.ravel_pytree(xs)[0] * 2, X, V),
        "a tree": (lambda x, y: {"a": (x, [y, None]), "b": x > y, "c": 3}, X, Y),
        "an empty array": (lambda x: (x[:0], jnp.sum(x[:0])), X),
        "a constant": (lambda x: jnp.arange(3.0), X),
        "the argument": (lambda x: x, X),
    },
]


def table(*domains):
    """All rows, each under its own name."""
    rows = [row for domain in domains for group in domain for row in group.items()]
    assert len(dict(rows)) == len(rows), [name for name, _ in rows if [n for n, _ in rows].count(name) > 1]
    return pytest.mark.parametrize(
        ("fun", "inputs"), [pytest.param(fun, inputs, id=name) for name, (fun, *inputs) in rows]
    )


@pytest.mark.sweep(72)
@table(
    *(ELEMENTWISE, NN, PRODUCTS, REDUCTIONS, ORDER, SHAPES, INDEXING, LINALG),
    *(FFT, SPECIAL, STATS, SCIPY, RANDOM, LOSSES, CONSTANTS, CONTROL),
)
def test_float16_computes_what_the_plain_function_does(fun, inputs):
    check(fun, inputs, F16)


@pytest.mark.sweep(15)
@table(NN, ORDER)
def test_bfloat16_computes_what_the_plain_function_does(fun, inputs):
    check(fun, inputs, BF16)


@pytest.mark.sweep(15)
@table(NN, CONTROL)
def test_parameters_of_a_low_precision_policy_compute_what_float32_ones_do(fun, inputs):
    check_parameters(fun, inputs, F16)


def check_parameters(fun, inputs, dtype):
    """Compares value and gradient of `fun` in float32 with those under autocast of inputs that are `dtype`."""
    autocast = amp.autocast(fun, amp.Policy(dtype, dtype, F32))
    low = [x.astype(dtype) if is_float(x) else x for x in inputs]

    def low_grad(*low):
        grads = grad(autocast, low)
        assert all(g.dtype == dtype for g in grads)
        return tuple(g.astype(F32) for g in grads)

    compare(autocast, low, low_grad, fun, inputs, dtype)


def check(fun, inputs, dtype):
    """Compares value and gradient of `fun` with those under autocast."""
    low = [is_float(x) and bool(np.isfinite(x).all()) for x in inputs]

    def plain(*inputs):
        return fun(*[through_a_product(x) if is_low else x for x, is_low in zip(inputs, low, strict=True)])

    autocast = amp.autocast(plain, dtype=dtype)
    compare(autocast, inputs, lambda *inputs: grad(autocast, inputs), plain, inputs, dtype)


def compare(autocast, low, low_grad, plain, inputs, dtype):
    """Runs both, value and gradient, in one program that compiles quickly."""

    def both(low, inputs):
        values = autocast(*low), plain(*inputs)
        try:
            gradient = grad(plain, inputs)
        except (TypeError, ValueError, NotImplementedError):  # what JAX raises where it cannot differentiate
            return [values]
        return [values, (low_grad(*low), gradient)]

    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    for got, expected in jax.jit(both, compiler_options=options)(low, inputs):
        assert_same(got, expected, 8 * float(jnp.finfo(dtype).eps))


def is_float(x):
    return jnp.issubdtype(x.dtype, np.floating)


def through_a_product(x):
    return (x.reshape(1, x.size) @ np.eye(x.size, dtype=np.float32)).reshape(x.shape)


def weights(shape):
    """Different everywhere, so that the sum of what was normalised has a gradient."""
    return np.linspace(0.5, 1, math.prod(shape), dtype=np.float32).reshape(shape)


def grad(fun, inputs):
    """The gradient of a weighted sum of all real floating results with respect to all real floating inputs."""

    def loss(*inputs):
        leaves = [x.astype(F32) for x in map(jnp.asarray, jax.tree.leaves(fun(*inputs))) if is_float(x)]
        return sum((jnp.sum(x * weights(x.shape)) for x in leaves), jnp.zeros(()))

    return jax.grad(loss, [i for i, x in enumerate(inputs) if is_float(x)])(*inputs)


def assert_same(got, expected, tolerance):
    """Same tree, shapes and dtypes; finite and close wherever `expected` is finite."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (g.shape, g.dtype) == (e.shape, e.dtype)
        exact = not jnp.issubdtype(e.dtype, np.inexact)
        wide = e.dtype if exact else np.complex128
        g, e = np.asarray(g).astype(wide), np.asarray(e).astype(wide)
        finite = np.isfinite(e)
        atol = 0 if exact else tolerance * max(0.1, np.abs(e[finite]).max(initial=0))
        np.testing.assert_allclose(g[finite], e[finite], rtol=0, atol=atol)

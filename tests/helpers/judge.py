"""Judges what `first_nonfinite` says of the programs of `broken_models` and `broken_kinds`.

The line must be one that is marked in the program, the report must name what the program is known to suffer from, and
lines are computed in float32 in the source: value and gradient must then be those of the correct form in float64.
"""

import dataclasses
import inspect
import re
import sys
import textwrap

import jax
import numpy as np
from broken_models import step

TOLERANCE = {"float32": 1e-3, "float16": 5e-2}


def is_finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def assert_near(actual, expected, rtol):
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * (np.abs(want).max() or 1))


def in_float64(program, dtype):
    fun = jax.jit(step(program, dtype and "float32", 1.0))

    def widened(*args):
        with jax.enable_x64(True):
            args = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, args)
            return jax.device_get(fun(*args))

    return widened


# Parts of the cause, each of which must be there; from what is known of the program.
SEEN = {
    "cosine_after_product": ("`dot_general`", "beyond float16"),
    "packed_sequences": ("-inf and -inf", "nan", "`select_n`"),
    "t5_feed_forward": ("beyond float16", "wi_0"),
    "one_large_kernel": ("beyond float16", "`params[1]['kernel']"),
    "summed_loss": ("loss scale that is 2^", "times smaller"),
    "grpo": ("`div` of 0 and 0", "`sub` of 1 and 1"),
    "fill_value": ("`table[1, 2]` is 9.969e+36", "beyond float16"),
    "ctc": ("-inf and -inf", "nan"),
    "von_mises": ("`exp` of", "beyond float32"),
    "min_snr": ("`div` of 0 and 0",),
    "gcn": ("`pow` of 0 and -0.5", "`adjacency[4, 0]` is 0"),
    "lars": ("`div` of", "and 0 is inf", "`params['out'][0, 0]` is 0"),
    "batch_norm": ("`sqrt` of -", "`sub` of 1.027e+10 and 1.027e+10"),
    "ciou": ("in the derivative", "`max` of -0.9 and 0"),
    "slerp": ("`div` of 0 and 0", "`acos` of 1"),
    "whitening": ("in the derivative", "of 0 at [0, 1] is inf", "`sub` of 0.01 and 0.01"),
    "wkv": ("`exp` of 117.1", "beyond float32"),
    "memory_efficient_mish": ("in the derivative, `integer_pow`", "beyond float32", "`exp` of"),
    "uint8_lengths": ("256, more than uint8 holds, and wraps around",),
    "diverging_descent": ("beyond float32", "iteration 12"),
    "tanh_gaussian": ("`log` of 0", "`sub` of 1 and 1"),
    "triplet": ("in the derivative, `div` of 0.5 and 0", "`sub` of 1.375 and 1.375"),
    "focal": ("`log` of 0", "`sub` of 1 and 1"),
    "mixture_density": ("`log` of 0", "`exp` of -1269"),
    "distillation": ("`log` of 0", "`teacher[1, 0]` is 0"),
    "gem_pooling": ("in the derivative, `pow` of 0 and -0.6667", "`max` of -"),
    "sinkhorn": ("`div` of 0.2 and 0", "`exp` of -145.2", "which is 0 in float32"),
    "rodrigues": ("`div` of 0", "`params['rotation'][0]` is 0"),
    "cox": ("`exp` of 101.3", "beyond float32"),
    "router": ("`integer_pow` of", "beyond float16"),
    "rmse": ("in the derivative", "`sub` of 0.009829 and 0.009829"),
    "rmse_by_hand": ("in the derivative", "`sub` of 0.009829 and 0.009829"),
    "rmse_by_norm": ("in the derivative", "`sub` of 0.009829 and 0.009829"),
    "hidden_markov_model": ("`log` of 0", "iteration 112"),
    "mean_by_prod": ("8.59e+09, more than int32 holds, and wraps around",),
    "log_of_relu": ("`log` of 0", "`max` of -"),
    "log_of_determinant": ("`log` of 0", "e-49", "which is 0 in float32"),
    "adam": ("and 0 at", "`sub` of 1 and 1"),
    "ppo": ("`exp` of 118.3", "`old[1]` is -120"),
    "ppo_of_negative_advantages": ("`exp` of 118.3", "`old[1]` is -120"),
    "of_eigenvectors": ("in the derivative", "`sub` of 1 and 1"),
    "deep": ("beyond float16", "`params['dense1']['kernel']"),
    "diverged": ("beyond float32", "`params[2][1, 0]` is 1.8e+20"),
    "with_norms": ("in the derivative", "['bias'][0]` is 0"),
    "cosine": ("`div` of", "`x[1, 0]` is 0"),
    "entropy": ("`log` of 0", "`exp` of -203", "which is 0 in float32"),
    "likelihood": ("beyond float32", "`div` of 0.1257 and 8.757e-27"),
    "regression": ("beyond float32", "`batch['x'][5, 2]` is 3e+30"),
    "masked_sqrt": ("`sqrt` of -0.07983",),
    "contrastive": ("`exp` of 4544", "beyond float32"),
    "scanned": ("beyond float16", "iteration 2"),
    "squared_relu": ("beyond float16", "`mul` of 698.1 and 100"),
    "log_of_ratio": ("1e+30 and 1e-30", "beyond float32"),
    "clipped_weight": ("`div` of 0 and 0", "`x[0]` is 0"),
    "clipped_softplus": ("`exp` of 100", "`x[0]` is 100"),
    "penalty_of_small": ("in the derivative", "`x[0, 0]` is 0"),
    "roots_from_zero": ("`sqrt` of -1", "`x[0]` is -1"),
    "batch_of_one": ("`exp` of 100", "`x[0, 0]` is 100"),
    "selected_below_85": ("`exp` of 100", "`x[2]` is 100"),
    "layer_norm_in_float16": ("1e-08 is 0 in float16", "smallest positive value is 6e-8"),
    "layer_norm_with_default": ("`eps` = 1e-08 is 0 in float16",),
    "rms_norm_of_zeros": ("1e-08 is 0 in float16",),
    "adam_in_float16": ("1e-08 is 0 in float16",),
    "mask_in_float16": ("-1e+09 is -inf", "float16"),
    "additive_mask_in_float16": ("0 and -inf", "-1e+09 is -inf in float16"),
    "binary_cross_entropy_in_float16": ("`log` of 0", "`sub` of 1 and 1"),
    "squared_error_in_float16": ("of -300.5", "beyond float16", "`y[2]` is 300"),
    "sum_in_float16": ("`reduce_sum`", "1e+05, beyond float16"),
    "variance_that_overflows": ("`mul` of 640.5 and 640.5", "beyond float16"),
    "clipped_by_norm": ("`integer_pow` of 320.2", "beyond float16"),
    "scanned_norms": ("`mul` of 391.2 and 391.2", "beyond float16"),
    "entropy_by_hand": ("`log` of 0", "`exp` of -120"),
    "cross_entropy_by_hand": ("`log` of 0", "which is 0 in float32"),
    "one_hot_cross_entropy": ("`log` of 0", "which is 0 in float32"),
    "logistic_by_hand": ("`exp` of 383.4", "beyond float32"),
    "poisson": ("`exp` of 146.5", "beyond float32"),
    "log_of_one_hot": ("`log` of 0", "`labels[0, 1]` is 0"),
    "kl_divergence": ("`log` of 0", "`p[0, 0]` is 0"),
    "kl_with_no_support": ("`log` of 0", "`q[0]` is 0"),
    "gumbel": ("`log` of -0", "`log` of 1"),
    "logit": ("`div` of 1 and 0", "`sub` of 1 and 1"),
    "likelihood_by_prod": ("`log` of 0", "which is 0 in float32"),
    "exclusive_products": ("`div` of 0 and 0", "`sub` of 1 and 1"),
    "masked_mean": ("`div` of 0 and 0", "`mask[1, 0]` is 0"),
    "class_weights": ("`div` of 4 and 0 at [2]", "`eq`"),
    "dice": ("`div` of 0 and 0", "`add` of 0 and 0"),
    "correlation": ("`sub` of 2 and 2",),
    "min_max": ("`div` of 0 and 0 at [1, 0]", "`sub` of 4 and 4"),
    "temperature": ("and 0 at", "`t` is 0"),
    "sinc_kernel": ("`div` of 0 and 0", "`times[1]` is 0"),
    "newton_root": ("`div` of -2 and 0", "0 is a constant"),
    "power_iteration": ("`div` of 0 and 0",),
    "distance_to_self": ("in the derivative", "`sub` of 0.8371 and 0.8371"),
    "vmapped_norms": ("in the derivative", "`x[1, 0]` is 0"),
    "standard_deviation": ("in the derivative", "and 0 at [1]", "`w[0, 1]` is 0"),
    "pairwise_by_expansion": ("`sqrt` of -", re.compile(r"`sub` of (\S+) and \1 ")),  # which pair depends on the CPU
    "spectrum": ("in the derivative", "and 0 at [1]", "`add` of 0 and 0"),
    "angle_between": ("in the derivative, `rsqrt` of 0", "of 1"),
    "power_of_negative": ("`pow` of -1 and 0.7",),
    "power_by_logarithm": ("in the derivative", "`x[0]` is 0"),
    "where_log": ("in the derivative", "`x[1]` is 0"),
    "gaussian": ("eigenvalues of the matrix are from -1 to 3",),
    "normal_equations": ("the diagonal of the triangular matrix is from 0 to 28",),
    "embedding": ("an index is out of range", "from 0 to 5"),
    "exploding_rnn": ("2.184e+04 and 4", "beyond float16"),
    "diverging_while": ("3.434e+30 and 3.434e+30", "beyond float32"),
    "transformer": ("`div` of 0 and 0", "`sub` of 1.5 and 1.5", "iteration 0"),
    "transformer_step": ("`div` of 0 and 0", "`sub` of 1.5 and 1.5", "iteration 0"),
    "nnx_classifier": ("`log` of 0", "which is 0 in float32"),
    "equinox_norms": ("in the derivative", "`x[1, 0]` is 0"),
    "keras_entropy": ("`log` of 0", "`exp` of -88.21"),
}

# The programs whose report has lines in float32. One that is lost makes no report wrong, so it must be missed here.
CURED = """
clipped_by_norm cosine_after_product deep exploding_rnn one_large_kernel router scanned scanned_norms
squared_error_in_float16 squared_relu sum_in_float16 t5_feed_forward variance_that_overflows
"""

# The lines that are computed in float32 where the code itself casts: an expression, and the same with a cast.
CASTS = {
    "router": (r"z\*\*2", "z.astype(jnp.float32)**2"),
    "squared_error_in_float16": (r"errors\*\*2", "errors.astype(jnp.float32)**2"),
    "sum_in_float16": (r"F16", "jnp.float32"),
    "variance_that_overflows": (r"x \* x", "x.astype(jnp.float32) ** 2"),
    "clipped_by_norm": (r"g\*\*2", "g.astype(jnp.float32)**2"),
    "scanned_norms": (
        r"x / (jnp.sqrt.*) \* 400",
        r"(x / jnp.sqrt(jnp.sum(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + 1e-3) * 400).astype(F16)",
    ),
    "exploding_rnn": (r"F16", "jnp.float32"),
}


def with_cure(model, cure, cause=""):
    """Returns a model in which the lines of a cure are in float32, with the loss scale that a cause asks for."""
    lines, first = inspect.getsourcelines(model.broken)
    code, changes = "".join(lines), {}
    scope = dict(vars(sys.modules[model.broken.__module__]))
    if around := re.search(r"compute (.*?) in float32", cure):
        if model.name in CASTS:
            code, n = re.subn(*CASTS[model.name], code)
            assert n
        else:
            for k in {int(number) - first for number in re.findall(r"py:(\d+) ", f"{around[1]} ")}:
                indent = re.match(" *", lines[k])[0]
                lines[k] = f"{indent}with amp.full_precision():\n    {lines[k]}"
            code = "".join(lines)
    if smaller := re.search(r"a loss scale that is 2\^(\d+) times smaller", cause):
        changes["loss_scale"] = model.loss_scale / 2 ** int(smaller[1])
    exec(compile(textwrap.dedent(code), "cured.py", "exec"), scope)
    return dataclasses.replace(model, broken=scope[model.broken.__name__], **changes)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.abs(x), dtype=np.float64)) for x in jax.tree.leaves(tree)))


def assert_right(cured, tried=""):
    """Compares value and gradient with those of the correct form in float64."""
    near, args = cured.near(), cured.args()
    exact = in_float64(cured.fixed, cured.dtype)
    assert_near(in_float64(cured.broken, cured.dtype)(*near), exact(*near), 1e-3)

    results = jax.device_get(jax.jit(cured.make()[0])(*args))
    if cured.dtype == "float16":
        results = results[0], jax.tree.map(lambda g: g / cured.loss_scale, results[1])
    assert is_finite(results)
    printed = re.search(r"within (.*) of float", tried)
    rtol = max(TOLERANCE[cured.dtype or "float32"], 3 * float(printed[1]) if printed else 0)
    value, *grads = jax.tree.leaves(results)
    exact_value, *exact_grads = jax.tree.leaves(exact(*args))
    for actual, expected in ((value, exact_value), (grads, exact_grads)):
        assert norm(jax.tree.map(np.subtract, actual, expected)) < rtol * (norm(expected) or 1)


def is_line_right(model, found):
    """Whether the line of a report is one of the program that are at fault."""
    file = model.broken.__code__.co_filename.rpartition("/")[2]
    return found is not None and any(f"{file}:{line} " in found.source for line in model.lines)


def is_cause_right(model, found):
    """Whether a report names what the program is known to suffer from: all texts of `SEEN`, or what match them."""
    patterns = [re.escape(part) if isinstance(part, str) else part for part in SEEN[model.name]]
    return found is not None and all(re.search(pattern, found.cause) for pattern in patterns)


def assert_cure_is_right(model, found):
    """Applies a cure, if there is one; `AssertionError` if it is not right."""
    if found.cure or "loss scale that is" in found.cause:
        assert_right(with_cure(model, found.cure, found.cause), found.tried)

"""`underflow`: the share of the gradients that underflows or overflows in a low-precision dtype."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._formats import parse_format
from jmp_amp._loss_scale import to_number
from jmp_amp._trees import is_inexact
from jmp_amp.debug._arguments import check_concrete
from jmp_amp.debug._leaf_names import leaf_name, module_name
from jmp_amp.debug._relative_error import flat_on_host
from jmp_amp.debug._underflow_report import LeafUnderflow, Underflow, range_of


def underflow(grads: Any, loss_scale: Any = 1.0, dtype: Any = "float16") -> Underflow:
    """Returns the share of each gradient that is zero, subnormal or too large in a low-precision dtype.

    Use it to choose a loss scale, or to find the modules that no scale fits.

    Args:
        grads: a pytree of the *scaled* gradients, as `amp.value_and_grad` returns them, in any floating dtypes and
            shapes. They are copied to the host. Leaves of other dtypes are ignored.
        loss_scale: the scale that multiplied the loss of these gradients; 1 for unscaled gradients, such as those of a
            float32 run.
        dtype: as for `autocast`. With `"float8"`, each gradient is scaled to the range of float8_e5m2, whatever the
            loss scale is, as the cotangents of float8 products are.

    Returns:
        An `Underflow`; `print` it or call `plot()`.

    Raises:
        TypeError: called inside `jit`, or the scale is not a number.
        ValueError: `grads` has no floating leaves, the scale is not between 2^-126 and 2^126, or autocast does not
            compute in `dtype`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> grads = {"w": jnp.array([0.0, 2.0**-30, 2.0**-20, 1.0]) * 2**8}
        >>> print(amp.debug.underflow(grads, loss_scale=2.0**8))
        gradient  size  zero x2^8  subnormal  zero x1  subnormal  overflow  largest
        w            4      25.0%      25.0%    50.0%      25.0%         0      2^8
        all          4      25.0%      25.0%    50.0%      25.0%         0      2^8

    References:
        The plot follows figure 3 of Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740.
    """
    check_concrete(
        (grads, loss_scale), "underflow", "return the gradients from the jitted step, and call it on those gradients"
    )
    form, scale = parse_format(dtype), to_number("loss_scale", loss_scale)
    low = form.dtype if form.float8 is None else form.float8.cotangents
    rows = []
    exponents: dict[str, dict[int | None, int]] = {}
    for path, leaf in jax.tree.leaves_with_path(grads):
        if not is_inexact(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating) or not np.size(leaf):
            continue
        scaled = np.abs(flat_on_host(leaf))
        own = scale if form.float8 is None else scale * _scale_to_range(scaled, low)
        rows.append(_leaf_row(leaf_name(path), scaled * (own / scale), own, low))
        counts = exponents.setdefault(module_name(path), {})
        for k, n in _count_exponents(scaled / scale).items():
            counts[k] = counts.get(k, 0) + n
    if not rows:
        raise ValueError(f"`grads`, a {type(grads).__name__}, contains no floating arrays; pass a pytree of gradients")
    return Underflow(tuple(rows), _total_row(rows), scale if form.float8 is None else None, low.name, exponents)


def _scale_to_range(magnitudes: np.ndarray, dtype: Any) -> float:
    """Returns the power of two with which the largest finite magnitude is just below the largest number of `dtype`."""
    largest = magnitudes[np.isfinite(magnitudes)].max(initial=0)
    return float(2.0 ** np.floor(np.log2(float(jnp.finfo(dtype).max) / largest))) if largest else 1.0


def _leaf_row(path: str, scaled: np.ndarray, scale: float, dtype: Any) -> LeafUnderflow:
    zero, subnormal, overflow = _shares(scaled, dtype)
    zero_unscaled, subnormal_unscaled, _ = _shares(scaled / scale, dtype)
    largest = scaled[np.isfinite(scaled)].max(initial=0)
    exponent = int(np.frexp(largest)[1]) - 1 if largest else None
    return LeafUnderflow(path, scaled.size, zero, subnormal, zero_unscaled, subnormal_unscaled, overflow, exponent)


def _total_row(rows: Sequence[LeafUnderflow]) -> LeafUnderflow:
    size = sum(row.size for row in rows)
    shares = np.average([row[2:7] for row in rows], axis=0, weights=[row.size for row in rows])
    zero, subnormal, zero_unscaled, subnormal_unscaled, overflow = shares.tolist()
    largest = max((row.largest for row in rows if row.largest is not None), default=None)
    return LeafUnderflow("all", size, zero, subnormal, zero_unscaled, subnormal_unscaled, overflow, largest)


def _shares(magnitudes: np.ndarray, dtype: Any) -> tuple[float, float, float]:
    """Returns the shares that are zero, subnormal and not finite after rounding to `dtype`."""
    with np.errstate(over="ignore", under="ignore"):
        low = magnitudes.astype(dtype).astype(np.float64)
    subnormal = (low > 0) & (low < 2.0 ** range_of(dtype).normal)
    return float(np.mean(low == 0)), float(np.mean(subnormal)), float(np.mean(~np.isfinite(low)))


def _count_exponents(magnitudes: np.ndarray) -> dict[int | None, int]:
    """Returns the number of finite values for each exponent, and the number of zeros under None."""
    is_positive = np.isfinite(magnitudes) & (magnitudes > 0)
    values, counts = np.unique(np.frexp(magnitudes[is_positive])[1] - 1, return_counts=True)
    by_exponent: dict[int | None, int] = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if zeros := int(np.sum(magnitudes == 0)):
        by_exponent[None] = zeros
    return by_exponent

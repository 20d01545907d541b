"""`underflow`: the share of the gradients that underflows or overflows in a low-precision dtype."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._calls import check_concrete
from jmp_amp._formats import parse_format
from jmp_amp._loss_scale import to_number
from jmp_amp._trees import is_inexact
from jmp_amp.debug._report import Content, Plot, Table, flat_on_host, format_percent, leaf_name, module_name

_IN_RANGE, _OUT_OF_RANGE, _RANGE = "#3b6fb6", "#c8443c", "#c9daf0"


def underflow(grads: Any, loss_scale: Any = 1.0, dtype: Any = "float16") -> "Underflow":
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
    low, has_own_scales = (form.dtype, False) if form.float8 is None else (form.float8.cotangents, True)
    rows = []
    exponents: dict[str, Counter[int | None]] = defaultdict(Counter)
    for path, leaf in jax.tree.leaves_with_path(grads):
        if is_inexact(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and np.size(leaf):
            unscaled = np.abs(flat_on_host(leaf)) / scale
            scaled = unscaled * (_scale_to_range(unscaled, low) if has_own_scales else scale)
            zero, subnormal, overflow = _shares(scaled, low)
            shares = zero, subnormal, *_shares(unscaled, low)[:2], overflow
            rows.append(LeafUnderflow(leaf_name(path), unscaled.size, *shares, _largest(_count_exponents(scaled))))
            exponents[module_name(path)].update(_count_exponents(unscaled))
    if not rows:
        raise ValueError(f"`grads`, a {type(grads).__name__}, contains no floating arrays; pass a pytree of gradients")
    return Underflow(tuple(rows), _total_row(rows), None if has_own_scales else scale, low.name, dict(exponents))


def _range_of(dtype: Any) -> tuple[int, int, int]:
    """Returns the exponents of the smallest subnormal and normal numbers, and the exponent above the largest number."""
    info = jnp.finfo(dtype)
    return info.minexp - info.nmant, info.minexp, info.maxexp


def _scale_to_range(magnitudes: np.ndarray, dtype: Any) -> float:
    """Returns the power of two with which the largest finite magnitude is just below the largest number of `dtype`."""
    largest = magnitudes.max(initial=0, where=np.isfinite(magnitudes))
    return float(2.0 ** np.floor(np.log2(float(jnp.finfo(dtype).max) / largest))) if largest else 1.0


def _total_row(rows: Sequence["LeafUnderflow"]) -> "LeafUnderflow":
    _, sizes, *shares, largest = zip(*rows, strict=True)
    means = [np.average(share, weights=sizes).item() for share in shares]
    return LeafUnderflow._make(("all", sum(sizes), *means, _largest(largest)))


def _largest(exponents: Iterable[int | None]) -> int | None:
    return max((k for k in exponents if k is not None), default=None)


def _shares(magnitudes: np.ndarray, dtype: Any) -> tuple[float, float, float]:
    """Returns the shares that are zero, subnormal and not finite after rounding to `dtype`."""
    with np.errstate(over="ignore", under="ignore"):
        low = magnitudes.astype(dtype).astype(np.float64)
    subnormal = (low > 0) & (low < 2.0 ** jnp.finfo(dtype).minexp)
    return float(np.mean(low == 0)), float(np.mean(subnormal)), float(np.mean(~np.isfinite(low)))


def _count_exponents(magnitudes: np.ndarray) -> dict[int | None, int]:
    """Returns the number of finite values for each exponent, and the number of zeros under None."""
    is_positive = np.isfinite(magnitudes) & (magnitudes > 0)
    values, counts = np.unique(np.frexp(magnitudes[is_positive])[1] - 1, return_counts=True)
    zeros = int(np.sum(magnitudes == 0))
    return dict(zip(values.tolist(), counts.tolist(), strict=True)) | ({None: zeros} if zeros else {})


class LeafUnderflow(NamedTuple):
    """The shares of one gradient that are zero, subnormal and too large in a dtype.

    Attributes:
        path: the path of the parameter, such as `layers/0/w`.
        size: the number of values.
        zero: the share that is 0 in the dtype with the scale, including exact zeros.
        subnormal: the share that is subnormal with the scale: in float16, below 2^-14, with less than 11 bits.
        zero_unscaled: the share that is 0 in the dtype at scale 1.
        subnormal_unscaled: the share that is subnormal in the dtype at scale 1.
        overflow: the share that is infinite, NaN, or too large for the dtype with the scale.
        largest: the exponent (floor of log2) of the largest finite value with the scale; the largest exponent of
            float16 is 15. None if all values are 0 or not finite.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> row = amp.debug.underflow({"w": jnp.array([1024.0, 1e-6])}, loss_scale=2.0**10).rows[0]
        >>> row.path, row.zero_unscaled, row.zero, row.subnormal
        ('w', 0.5, 0.0, 0.5)
    """

    path: str
    size: int
    zero: float
    subnormal: float
    zero_unscaled: float
    subnormal_unscaled: float
    overflow: float
    largest: int | None


@dataclasses.dataclass(frozen=True)
class Underflow(Plot):
    """The shares of gradients that underflow or overflow in a dtype; `underflow` returns it.

    `print` shows a table with one line for each parameter. `plot` draws a histogram of the exponents of the unscaled
    gradients for each module. Shaded areas are the range of the dtype with the scale: dark for normal numbers, light
    for subnormal numbers. Values to the left round to 0, values to the right overflow. A dashed line shows where the
    range starts at scale 1.

    Attributes:
        rows: a `LeafUnderflow` for each floating leaf.
        total: the shares of all leaves together; its path is `all`.
        loss_scale: the scale that multiplies the gradients; None for float8, where each gradient has its own.
        dtype: the dtype, such as float16.
        exponents: for each module, the number of *unscaled* gradients with each exponent (floor of log2), and the
            number of zeros under None.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.debug.underflow({"w": jnp.array([1.0, 1e-9]), "b": jnp.ones(2)})
        >>> [row.path for row in report.rows], report.total.zero
        (['b', 'w'], 0.25)
    """

    _aligns_right = True
    rows: tuple[LeafUnderflow, ...]
    total: LeafUnderflow
    loss_scale: float | None
    dtype: str
    exponents: Mapping[str, Mapping[int | None, int]] = dataclasses.field(repr=False)

    def _content(self) -> Content:
        scale = "scaled" if self.loss_scale is None else f"x2^{np.log2(self.loss_scale):g}"
        titles = ("gradient", "size", f"zero {scale}", "subnormal", "zero x1", "subnormal", "overflow", "largest")
        lines: list[tuple[str, ...]] = [titles]
        for path, size, *shares, largest in (*self.rows, self.total):
            lines.append((path, f"{size}", *map(format_percent, shares), "-" if largest is None else f"2^{largest}"))
        return "", [Table([line if self.loss_scale != 1 else (*line[:4], *line[6:]) for line in lines])], []

    def _draw(self, figure: Any) -> None:
        figure.set_size_inches(8, 1.5 + 0.55 * len(self.exponents))
        rows = figure.subplots(len(self.exponents), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, counts) in zip(rows, self.exponents.items(), strict=True):
            self._plot_module(axes, name, counts)
        text, position = f"{self.dtype} starts here at scale 1 ", rows[0].get_xaxis_transform()
        rows[0].text(_range_of(self.dtype)[0], 1.02, text, transform=position, ha="right", size=8)
        rows[-1].set_xlabel("log2 of the magnitude of the unscaled gradients")
        scale = "the scale of each module" if self.loss_scale is None else f"loss scale 2^{np.log2(self.loss_scale):g}"
        figure.suptitle(f"Shaded: the range of {self.dtype} at {scale} (light: subnormal)", size=10)

    def _plot_module(self, axes: Any, name: str, counts: Mapping[int | None, int]) -> None:
        limits, largest = _range_of(self.dtype), _largest(counts) or 0
        log_scale = limits[2] - 1 - largest if self.loss_scale is None else np.log2(self.loss_scale)
        smallest, normal, overflow = (exponent - log_scale for exponent in limits)
        size = max(sum(counts.values()), 1)
        bars = {k: n / size for k, n in counts.items() if k is not None}
        axes.axvspan(smallest, normal, color=_RANGE, alpha=0.5, lw=0)
        axes.axvspan(normal, overflow, color=_RANGE, lw=0)
        axes.axvline(limits[0], color="0.35", ls="--", lw=1)
        colors = [_IN_RANGE if smallest <= k < overflow else _OUT_OF_RANGE for k in bars]
        axes.bar(bars.keys(), bars.values(), 0.9, align="edge", color=colors)
        axes.set(yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        zeros = counts.get(None, 0) / size
        text = f"{format_percent(zeros)} zeros" if zeros else "" if counts else "not finite"
        axes.text(0.005, 0.9, text, transform=axes.transAxes, va="top", size=8)
        axes.spines["left"].set_visible(False)

"""`underflow`: which gradients float16 holds, and which vanish in it."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._extras import extra
from jmp_amp._loss_scale import to_number
from jmp_amp._policy import is_inexact
from jmp_amp.debug._table import aligned, percent

_SMALLEST, _NORMAL, _END = -24, -14, 16  # the powers of two between which float16 holds numbers, and normal ones
_HELD, _LOST, _RANGE = "#3b6fb6", "#c8443c", "#c9daf0"


class LeafUnderflow(NamedTuple):
    """How the gradients of one parameter lie in float16's range.

    Attributes:
        path: of the parameter, such as `layers/0/w`.
        size: how many values there are.
        zero: share that is 0 in float16 with the loss scale; zeros that are no rounding are counted too.
        subnormal: share that is subnormal in float16 with the loss scale: below 2^-14, with less than 11 bits.
        zero_unscaled: share that would be 0 in float16 at scale 1.
        subnormal_unscaled: share that would be subnormal in float16 at scale 1.
        overflow: share that is infinite, NaN, or too large for float16 with the loss scale.
        largest: exponent (floor of log2) of the largest finite value with the loss scale; float16 ends at 15. None
            where all are 0.

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
class Underflow:
    """Where gradients lie in float16's range; what `underflow` returns. Printed, a table with a line a parameter.

    Attributes:
        rows: a `LeafUnderflow` for each floating leaf.
        total: the same for all leaves together; its path is `all`.
        loss_scale: what the gradients are multiplied by.
        exponents: of each module, how many of the *true* gradients have which exponent, and how many are 0 (by None).

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> found = amp.debug.underflow({"w": jnp.array([1.0, 1e-9]), "b": jnp.ones(2)})
        >>> [row.path for row in found.rows], found.total.zero
        (['b', 'w'], 0.25)
    """

    rows: tuple[LeafUnderflow, ...]
    total: LeafUnderflow
    loss_scale: float
    exponents: dict[str, dict[int | None, int]] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        scale = f"x2^{np.log2(self.loss_scale):g}"
        titles = ("gradient", "size", f"zero {scale}", "subnormal", "zero x1", "subnormal", "overflow", "largest")
        lines = [titles, *(_cells(row) for row in (*self.rows, self.total))]
        return aligned(line if self.loss_scale != 1 else (*line[:4], *line[6:]) for line in lines)

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Draws histograms of the exponents of the true gradients, a module a line, and what float16 holds of them.

        Dark is what float16 holds as normal numbers with the loss scale, light what it holds as subnormal ones; what is
        left of it becomes 0, what is right of it overflows. Dashed is where that range begins at scale 1.

        Args:
            path: where to save the picture, if anywhere; the ending says in which format.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = extra("matplotlib.figure", "`plot`").Figure(
            figsize=(8, 1.5 + 0.55 * len(self.exponents)), dpi=120, layout="constrained"
        )
        shift = np.log2(self.loss_scale)
        rows = figure.subplots(len(self.exponents), 1, sharex=True, squeeze=False)[:, 0]
        found = [k for counts in self.exponents.values() for k in counts if k is not None]
        low = min([*found, _SMALLEST - shift, _SMALLEST]) - 2
        high = max([*found, _END - shift]) + 2
        for axes, (name, counts) in zip(rows, self.exponents.items(), strict=True):
            size = sum(counts.values())
            bars = {k: n / size for k, n in counts.items() if k is not None}
            axes.axvspan(_SMALLEST - shift, _NORMAL - shift, color=_RANGE, alpha=0.5, lw=0)
            axes.axvspan(_NORMAL - shift, _END - shift, color=_RANGE, lw=0)
            axes.axvline(_SMALLEST, color="0.35", ls="--", lw=1)
            held = [_SMALLEST - shift <= k < _END - shift for k in bars]
            axes.bar(bars.keys(), bars.values(), 0.9, align="edge", color=[_HELD if h else _LOST for h in held])
            axes.set(xlim=(low, high), yticks=[])
            axes.set_ylabel(name, rotation=0, ha="right", va="center")
            zeros = counts.get(None, 0) / size
            axes.text(
                0.005, 0.9, f"{percent(zeros)} zeros" if zeros else "", transform=axes.transAxes, va="top", size=8
            )
            axes.spines[["top", "right", "left"]].set_visible(False)
        rows[0].text(
            _SMALLEST, 1.02, "here it begins at scale 1 ", transform=rows[0].get_xaxis_transform(), ha="right", size=8
        )
        rows[-1].set_xlabel("log2 of the magnitude of the true gradients")
        figure.suptitle(f"Shaded: what float16 holds with a loss scale of 2^{shift:g} (light: subnormal)", size=10)
        if path is not None:
            figure.savefig(path)
        return figure


def underflow(grads: Any, loss_scale: Any = 1.0) -> Underflow:
    """Returns which gradients float16 holds, and which vanish in it or overflow.

    Args:
        grads: a pytree of the *scaled* gradients, as `amp.value_and_grad` returns them, in any floating dtypes and
            shapes; other leaves are left out. They are read to the host.
        loss_scale: multiplies the loss; what these gradients were scaled by. 1 for true ones, of a float32 run say.

    Returns:
        An `Underflow`: `print` it, or `plot()` it.

    Raises:
        TypeError: called inside `jit`, or the scale is not a number.
        ValueError: there are no floating leaves, or the scale is not between 2^-126 and 2^126.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> grads = {"w": jnp.array([0.0, 2.0**-30, 2.0**-20, 1.0]) * 2**8}
        >>> print(amp.debug.underflow(grads, loss_scale=2.0**8))
        gradient  size  zero x2^8  subnormal  zero x1  subnormal  overflow  largest
        w            4      25.0%      25.0%    50.0%      25.0%         0      2^8
        all          4      25.0%      25.0%    50.0%      25.0%         0      2^8

    References:
        The picture is figure 3 of Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740.
    """
    leaves = jax.tree.leaves_with_path((grads, loss_scale))
    if any(isinstance(x, jax.core.Tracer) for _, x in leaves):
        raise TypeError(
            "`underflow` reads values, so it cannot run inside `jit`; return the gradients from the jitted step, "
            "and call it on those"
        )
    scale = to_number("loss_scale", loss_scale)
    rows = []
    exponents: dict[str, dict[int | None, int]] = {}
    for path, leaf in jax.tree.leaves_with_path(grads):
        if not is_inexact(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating) or not np.size(leaf):
            continue
        scaled = np.abs(np.asarray(jax.device_get(leaf)).astype(np.float64).ravel())
        rows.append(_leaf(path_name(path), scaled, scale))
        counts = exponents.setdefault(module_name(path), {})
        for k, n in _exponents(scaled / scale).items():
            counts[k] = counts.get(k, 0) + n
    if not rows:
        raise ValueError(f"there are no floating arrays in these gradients, a {type(grads).__name__}")
    return Underflow(tuple(rows), _total(rows), scale, exponents)


def path_name(path: tuple[Any, ...]) -> str:
    """Returns where a leaf is, such as `layers/0/w`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(leaf)"


def module_name(path: tuple[Any, ...]) -> str:
    """Returns where the container of a leaf is; a leaf without one is its own."""
    return path_name(path[:-1] or path)


def _leaf(path: str, scaled: np.ndarray, scale: float) -> LeafUnderflow:
    held = np.isfinite(scaled)
    zero, subnormal, overflow = _shares(scaled)
    zero_unscaled, subnormal_unscaled, _ = _shares(scaled / scale)
    largest = scaled[held].max(initial=0)
    exponent = int(np.frexp(largest)[1]) - 1 if largest else None
    return LeafUnderflow(path, scaled.size, zero, subnormal, zero_unscaled, subnormal_unscaled, overflow, exponent)


def _total(rows: Sequence[LeafUnderflow]) -> LeafUnderflow:
    size = sum(row.size for row in rows)
    shares = np.average([row[2:7] for row in rows], axis=0, weights=[row.size for row in rows])
    zero, subnormal, zero_unscaled, subnormal_unscaled, overflow = shares.tolist()
    largest = max((row.largest for row in rows if row.largest is not None), default=None)
    return LeafUnderflow("all", size, zero, subnormal, zero_unscaled, subnormal_unscaled, overflow, largest)


def _shares(x: np.ndarray) -> tuple[float, float, float]:
    """The shares that are zero, subnormal and not finite once they are rounded to float16."""
    with np.errstate(over="ignore", under="ignore"):
        half = x.astype(np.float16)
    subnormal = (half > 0) & (half < 2.0**_NORMAL)
    return float(np.mean(half == 0)), float(np.mean(subnormal)), float(np.mean(~np.isfinite(half)))


def _exponents(x: np.ndarray) -> dict[int | None, int]:
    """How many finite values have which exponent, and how many are 0."""
    values, counts = np.unique(np.frexp(x[np.isfinite(x) & (x > 0)])[1] - 1, return_counts=True)
    found: dict[int | None, int] = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if zeros := int(np.sum(x == 0)):
        found[None] = zeros
    return found


def _cells(row: LeafUnderflow) -> tuple[str, ...]:
    shares = (row.zero, row.subnormal, row.zero_unscaled, row.subnormal_unscaled, row.overflow)
    largest = "-" if row.largest is None else f"2^{row.largest}"
    return (row.path, f"{row.size}", *map(percent, shares), largest)

"""Bounds of the time of products on a device, from its peak rates: whether a format pays there."""

import collections
import dataclasses
import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jmp_amp._autocast import OpSite
from jmp_amp._calls import quote
from jmp_amp._formats import FORMATS, Float8
from jmp_amp.debug._report import format_table, without_numbers


class Peaks(NamedTuple):
    """The peak rates of a device: TB/s of its memory, and TFLOP/s of dense products by the dtype of their operands.

    Attributes:
        memory: 10**12 bytes a second.
        float32: 10**12 floating-point operations a second at JAX's default precision, which is tensorfloat32 on NVIDIA
            GPUs since Ampere, and bfloat16 on TPUs.
        float16: likewise; the rate of float32 if the device has no such units.
        bfloat16: likewise.
        float8: likewise; 0 if the device has no units that autocast uses, so that products run in the base dtype.
        mxfp8: likewise, of float8 operands with a scale for each block of 32.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: x @ w)(*[jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2)
        >>> peaks = amp.debug.Peaks(memory=1.0, float32=10, float16=20, bfloat16=20)
        >>> print(f"{report.roofline(peaks).speedup:.1f}")
        2.0
    """

    memory: float
    float32: float
    float16: float
    bfloat16: float
    float8: float = 0.0
    mxfp8: float = 0.0


# Vendors state most rates with structured sparsity; these are half of that, for dense products.
DEVICES = {
    "T4": Peaks(0.32, 8.1, 65, 8.1),  # NVIDIA Turing GPU architecture, 2018
    "V100": Peaks(0.9, 15.7, 125, 15.7),  # NVIDIA V100 datasheet, 2020, SXM2
    "A100": Peaks(2.039, 156, 312, 312),  # NVIDIA A100 datasheet, 2021, 80 GB SXM
    "L4": Peaks(0.3, 60, 121, 121, 242.5),  # NVIDIA L4 datasheet, 2023
    "H100": Peaks(3.35, 494.5, 989.5, 989.5, 1979),  # NVIDIA H100 datasheet, 2023, SXM
    "H200": Peaks(4.8, 494.5, 989.5, 989.5, 1979),  # NVIDIA H200 datasheet, 2024, SXM
    "B200": Peaks(7.7, 1100, 2250, 2250, 4500, 4500),  # NVIDIA Blackwell datasheet, 2025, HGX B200
    "MI300X": Peaks(5.3, 163.4, 1307.4, 1307.4),  # AMD Instinct MI300X data sheet, 2023; its float8 dtypes are others
    # Google Cloud TPU documentation, 2023 to 2025, of a chip. There are no units for float16 and float32.
    "TPU v5e": Peaks(0.819, 197, 197, 197),
    "TPU v5p": Peaks(2.765, 459, 459, 459),
    "TPU v6e": Peaks(1.638, 918, 918, 918),
    "TPU7x": Peaks(7.38, 2307, 2307, 2307, 4614),
}


class Bound(NamedTuple):
    """The least time that a product and the casts of its operands take, by the peak rates of a device.

    Attributes:
        site: the product.
        base_seconds: in the base dtype, for all its runs.
        seconds: in the dtype of the report.
        cast_seconds: the part of `seconds` in which operands are cast.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: x @ w)(*[jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2)
        >>> bound = report.roofline("T4").bounds[0]
        >>> print(f"{1e3 * bound.base_seconds:.1f} ms, {1e3 * bound.seconds:.1f} ms")
        17.0 ms, 2.7 ms
    """

    site: OpSite
    base_seconds: float
    seconds: float
    cast_seconds: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Bounds of the products of a program on a device; `PrecisionReport.roofline` returns it.

    Attributes:
        bounds: a `Bound` for each product and convolution.
        device: the name of the device.
        peaks: its rates.
        base: the dtype that the format is compared with.
        dtype: the format.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: x @ w)(*[jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2)
        >>> roofline = report.roofline("T4")
        >>> print(f"{roofline.base_seconds:.4f} s, {roofline.seconds:.4f} s, {roofline.speedup:.1f}x")
        0.0509 s, 0.0070 s, 7.3x
    """

    bounds: tuple[Bound, ...]
    device: str
    peaks: Peaks
    base: str
    dtype: str

    @property
    def base_seconds(self) -> float:
        """The sum of the bounds in the base dtype."""
        return sum(bound.base_seconds for bound in self.bounds)

    @property
    def seconds(self) -> float:
        """The sum of the bounds in the format, casts included."""
        return sum(bound.seconds for bound in self.bounds)

    @property
    def speedup(self) -> float:
        """How many times as fast the bounds are in the format, in sum."""
        return self.base_seconds / self.seconds if self.seconds else 1.0

    def _heading(self) -> str:
        rates = zip(Peaks._fields[1:], self.peaks[1:], strict=True)
        units = ", ".join(f"{rate:g} TFLOP/s in {name}" if rate else f"no {name} units" for name, rate in rates)
        peaks = f"{self.device} at {self.peaks.memory:g} TB/s, {units}"
        return f"Roofline bounds, not measurements: {peaks}. Products and the casts of their operands only."

    def _table(self) -> Iterator[tuple[str, ...]]:
        yield "product", "dtype", "module", "pass", "runs", f"{self.base} us", f"{self.dtype} us", "casts us", "x"
        groups = collections.defaultdict(list)
        for bound in self.bounds:
            site, shapes = bound.site, " @ ".join("x".join(map(str, x.shape)) for x in bound.site.operands)
            groups[shapes, site.compute, without_numbers(site.module), site.direction].append(bound)
        for key, group in [*groups.items(), (("sum", "", "", ""), self.bounds)]:
            part = dataclasses.replace(self, bounds=tuple(group))
            casts = sum(bound.cast_seconds for bound in group)
            times = (f"{1e6 * seconds:.1f}" for seconds in (part.base_seconds, part.seconds, casts))
            yield *key, str(sum(bound.site.runs for bound in group)), *times, f"{part.speedup:.2f}"

    def __str__(self) -> str:
        return f"{self._heading()}\n\n{format_table(self._table())}"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(x)}</td>' for x in row)}</tr>" for row in self._table())
        return f"<p>{html.escape(self._heading())}</p><table>{rows}</table>"


def roofline_of(sites: Sequence[OpSite], dtype: str, device: str | Peaks) -> Roofline:
    """Returns the bounds of the products among `sites`, the ops of a report in the format `dtype`."""
    name, peaks = ("own peaks", device) if isinstance(device, Peaks) else (device, DEVICES.get(device))
    if peaks is None:
        raise ValueError(
            f"`device` must be one of {', '.join(DEVICES)}, got {quote(device)}; pass the rates of another device as "
            "`amp.debug.Peaks(memory=3.35, float32=494.5, float16=989.5, bfloat16=989.5, float8=1979)`"
        )
    form, products = FORMATS[dtype], [site for site in sites if site.flops]
    if not form.is_low:
        raise ValueError(f"`roofline` compares a format of less than 32 bits with its base, got a report in {dtype}")
    is_float8 = form.float8 is not None or any(site.compute.startswith("float8") for site in products)
    base, low = (str(form.dtype), "float8") if is_float8 else ("float32", str(form.dtype))
    in_base = [
        _in_base(site, base) if site.compute.startswith(low) and site.why != "traced" else site for site in products
    ]
    float8 = form.float8 or Float8()
    rates = peaks._replace(float8=peaks.mxfp8) if float8.blocks else peaks
    in_format = in_base if is_float8 and not rates.float8 else products
    before, after = (_seconds(each, rates, base, float8) for each in (in_base, in_format))
    bounds = tuple(Bound(site, x, *y) for site, (x, _), y in zip(products, before, after, strict=True))
    return Roofline(bounds, name, peaks, base, dtype)


def _in_base(site: OpSite, base: str) -> OpSite:
    """Returns a product of the format as it is in the base dtype."""
    # The result of a float32 product is float32; that of a float8 product has the dtype that it has in the base.
    wider = 4 // jnp.dtype(site.output).itemsize if base == "float32" else 1
    return site._replace(compute=base, bytes=wider * site.bytes)


def _seconds(products: Iterable[OpSite], peaks: Peaks, base: str, float8: Float8) -> Iterator[tuple[float, float]]:
    """Yields the least time of each product with the casts of its operands, and that of these casts alone.

    Args:
        products: the products, in the order of the program.
        peaks: the rates of the device.
        base: the dtype in which values are stored before they are cast to float8.
        float8: the dtypes of float8 products.
    """
    cast: set[int] = set()  # the arrays that an earlier product read, so that they are cast already

    def width(dtype: str) -> float:
        """Returns the bytes of an element, with its part of the scale of a block of 32."""
        return jnp.dtype(dtype).itemsize + (1 / 32 if float8.blocks and dtype.startswith("float8") else 0)

    for site in products:
        dtypes = (site.compute.split() * 2)[:2]
        bytes_of_casts, bytes_read = 0.0, 0.0
        for x, old, new in zip(site.operands, site.inputs, dtypes, strict=False):
            size, is_float8, is_new = site.runs * math.prod(x.shape), new.startswith("float8"), x.array not in cast
            # Residuals were cast in the forward pass; but blocks are along the axis that a product sums over.
            if site.direction == "backward":
                is_new = is_float8 and (float8.blocks or (is_new and new == str(float8.cotangents)))
            # What the program computes is stored in the base dtype, or in 16 bits, by the op that computes it.
            stored = old if x.is_argument else base if is_float8 else new
            narrower = min(width(old), width(stored))
            if is_new and width(new) < narrower:
                reads = 2 if is_float8 and not float8.blocks else 1  # the first for the maximum, which is the scale
                bytes_of_casts += size * (reads * narrower + width(new))
            bytes_read += size * width(new)
        cast.update(x.array for x in site.operands)
        rate = getattr(peaks, "float8" if dtypes[0].startswith("float8") else dtypes[0], peaks.float32)
        casts = bytes_of_casts / peaks.memory
        product = max(site.flops / rate, (bytes_read + site.bytes) / peaks.memory)
        yield (casts + product) / 1e12, casts / 1e12

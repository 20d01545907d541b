"""Shapes of the trees on which kernels are compiled and timed."""

from typing import Any

import jax
import jax.numpy as jnp

Shape = jax.ShapeDtypeStruct


def gpt2_small(dtype: Any) -> list[Shape]:
    """Returns the shapes of the 148 parameters of GPT-2 small, 124 million values."""
    dim, layers, length, vocab = 768, 12, 1024, 50257
    layer = [*_dense(dim, 3 * dim), *_dense(dim, dim), *_dense(dim, 4 * dim), *_dense(4 * dim, dim), *4 * [(dim,)]]
    return _shapes([(vocab, dim), (length, dim), *layers * layer, (dim,), (dim,)], dtype)


def resnet50(dtype: Any) -> list[Shape]:
    """Returns the shapes of the 161 parameters of a ResNet-50, 25.6 million values."""
    shapes = _conv(7, 3, 64)
    features = 64
    for blocks, width in zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True):
        for block in range(blocks):
            shapes += _conv(1, features, width) + _conv(3, width, width) + _conv(1, width, 4 * width)
            if block == 0:
                shapes += _conv(1, features, 4 * width)
            features = 4 * width
    return _shapes([*shapes, *_dense(features, 1000)], dtype)


def one_leaf(dtype: Any, nbytes: int = 2**30) -> list[Shape]:
    """Returns the shape of one leaf."""
    return _shapes([(nbytes // jnp.dtype(dtype).itemsize,)], dtype)


TREES = {"GPT-2 small, 148 leaves": gpt2_small, "ResNet-50, 161 leaves": resnet50, "one leaf of 1 GiB": one_leaf}


def _dense(n: int, m: int) -> list[tuple[int, ...]]:
    return [(n, m), (m,)]


def _conv(size: int, n: int, m: int) -> list[tuple[int, ...]]:
    """Returns the shapes of a convolution without bias, and of the scale and bias of its norm."""
    return [(size, size, n, m), (m,), (m,)]


def _shapes(shapes: list[tuple[int, ...]], dtype: Any) -> list[Shape]:
    return [Shape(shape, dtype) for shape in shapes]

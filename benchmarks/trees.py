"""Shapes of the trees on which the kernels are compiled and timed."""

from jax import ShapeDtypeStruct as Shape
from jax import numpy as jnp


def gpt2_small(dtype):
    """The shapes of the 148 parameters of GPT-2 small, 124 million values."""
    dim, layers, length, vocab = 768, 12, 1024, 50257
    layer = [shape for n, m in ((1, 3), (1, 1), (1, 4), (4, 1)) for shape in ((n * dim, m * dim), (m * dim,))]
    shapes = [(vocab, dim), (length, dim), *layers * [*layer, *4 * [(dim,)]], (dim,), (dim,)]
    return [Shape(shape, dtype) for shape in shapes]


def resnet50(dtype):
    """The shapes of the 161 parameters of a ResNet-50, 25.6 million values."""

    def convolution(size, n, m):
        """Without bias, and with the scale and bias of its norm."""
        return [(size, size, n, m), (m,), (m,)]

    shapes = convolution(7, 3, 64)
    features = 64
    for blocks, width in zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True):
        for block in range(blocks):
            shapes += convolution(1, features, width) + convolution(3, width, width) + convolution(1, width, 4 * width)
            if block == 0:
                shapes += convolution(1, features, 4 * width)
            features = 4 * width
    return [Shape(shape, dtype) for shape in [*shapes, (features, 1000), (1000,)]]


TREES = {
    "GPT-2 small, 148 leaves": gpt2_small,
    "ResNet-50, 161 leaves": resnet50,
    "one leaf of 1 GiB": lambda dtype: [Shape((2**30 // jnp.dtype(dtype).itemsize,), dtype)],
}

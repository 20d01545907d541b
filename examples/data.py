"""Data that comes with scikit-learn and with Python."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Handwritten digits: images f32[1437, 8, 8, 1] of mean 0 and labels i32[1437] to train on, 360 to test with."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = (images.reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32), labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def library_text(limit: int = 1_000_000) -> tuple[np.ndarray, np.ndarray]:
    """The source text of Python's standard library as bytes: nine tenths to train on, one to test with."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files)[:limit], np.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def batches(*arrays: np.ndarray, size: int, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Endless random batches of the rows of arrays, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        rows = rng.integers(len(arrays[0]), size=size)
        yield tuple(array[rows] for array in arrays)


def windows(text: np.ndarray, length: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Endless random windows i32[size, length] of a text, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(text) - length + 1, size=(size, 1))
        yield text[starts + np.arange(length)].astype(np.int32)

"""Ops that read a tree once: a check that all values are finite, the sum of their squares, and the unscaled values."""

"""Products of float8 matrices with a scale for each operand; nothing here knows of autocast."""

from jmp_amp._float8._product import PRIMITIVE, emulated, float8_dot

__all__ = ["PRIMITIVE", "emulated", "float8_dot"]

"""Products of float8 matrices with a scale for each operand; nothing here knows of autocast."""

from jmp_amp._float8._product import PRIMITIVE, as_products, emulated, float8_dot

__all__ = ["PRIMITIVE", "as_products", "emulated", "float8_dot"]

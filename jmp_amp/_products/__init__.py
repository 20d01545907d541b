"""The primitives of products: padded for matrix units, and on float8 operands; nothing here knows of autocast."""

from jmp_amp._products._aligned import bind_product, padding
from jmp_amp._products._devices import EMULATE, emulated
from jmp_amp._products._float8 import FLOAT8_DOT, as_products, float8_dot, in_base, is_float8_scale
from jmp_amp._products._primitives import RAGGED_DOT
from jmp_amp._products._quantize import quantize
from jmp_amp._products._ragged import FLOAT8_RAGGED_DOT, float8_ragged_dot

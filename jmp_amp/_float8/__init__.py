"""Products whose operands are cast to float8 with scales; nothing here knows of autocast."""

from jmp_amp._float8._devices import EMULATE, emulated, is_emulated, without_float8
from jmp_amp._float8._product import PLAIN_PRIMITIVE, PRIMITIVE, as_products, float8_dot, in_base, is_float8_scale
from jmp_amp._float8._quantize import BLOCK, power_of_two, quantize, quantize_blocks
from jmp_amp._float8._ragged import RAGGED_PRIMITIVE, float8_ragged_dot

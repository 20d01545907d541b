"""Compiles small programs for TPUs, in a process of its own: libtpu and the CUDA plugin do not load into one.

Prints {target: {dtypes of the operands: number of products}}.
"""

import collections
import json

import hlo
import jax
import tpu_aot
from small_net import ARGS, loss_fn

import jmp_amp as amp

figures = {}
for target in tpu_aot.TPUS:
    compiled = tpu_aot.compile_for(jax.value_and_grad(amp.autocast(loss_fn, "bfloat16")), *ARGS, target=target)
    dtypes = [" ".join(dtypes) for _, _, dtypes in hlo.products(compiled)]
    figures[target] = collections.Counter(dtypes)
print(json.dumps(figures))

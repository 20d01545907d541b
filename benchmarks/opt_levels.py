"""What training at each of apex's levels needs on a GPU, by the compiler: memory and bytes moved of a whole train step.

    python benchmarks/opt_levels.py [--out docs/benchmarks/opt_levels.md]

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is.
"""

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
import optax
from models import CASES, train_step
from report import arguments, head, report

import jmp_amp as amp

CASE = "GPT-2 small, scanned"
LEVELS = {level: (level, optax.adamw(1e-3)) for level in ("O0", "O1", "O2", "O3")}
LEVELS["O2, first moments in bfloat16"] = "O2", optax.adamw(1e-3, mu_dtype=jnp.bfloat16)

WHY = """How much memory a train step needs at each of apex's levels.
For you: O1, which is `autocast` alone, saves most of the memory; O2 and O3 save little more."""
NOTES = """
One train step of {case} (batch 8, 1024 tokens, AdamW, parameters and state donated), assembled by
`interop.apex.initialize(loss_fn, params, tx, level)`. Parameters and state are what stays between steps: bytes a
parameter are 4 for a float32 parameter or master, 2 for a float16 one, 8 for AdamW's two moments. Temporary
memory holds activations and gradients. Bytes moved are the bytes that all kernels read and write, counted by one rule
for all programs (`gpu_aot.cost`): good for ratios.
"""


def assemble(loss_fn, params, level, tx):
    """Returns the loss, the transformation, and the shapes of what stays between steps: parameters and state."""
    fun, _, scaled_tx = amp.interop.apex.initialize(loss_fn, {}, tx, level)
    params = jax.eval_shape(lambda params: amp.interop.apex.initialize(loss_fn, params, tx, level)[1], params)
    return fun, scaled_tx, (params, jax.eval_shape(scaled_tx.init, params))


def kept_bytes(carried):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(carried))


def measure(loss_fn, params, args, level, tx):
    """Returns the figures of a compiled train step."""
    fun, tx, carried = assemble(loss_fn, params, level, tx)

    args = gpu_aot.struct(gpu_aot.h200_mesh(), (*carried, *args))
    return gpu_aot.cost(gpu_aot.compile_for(train_step(fun, tx), *args, donate_argnums=(0, 1))) | {
        "kept": kept_bytes(carried)
    }


def table():
    """Yields the lines of a Markdown table; ratios are to O0."""
    yield from head(
        "level", "bytes a parameter, with its state", "GB kept", "temporary GB", "both, x O0", "GB moved", "x O0"
    )
    loss_fn, (params, *args) = CASES[CASE](None)
    base, size = None, sum(x.size for x in jax.tree.leaves(params))
    for name, (level, tx) in LEVELS.items():
        cost = measure(loss_fn, params, args, level, tx)
        memory, moved = cost["kept"] + cost["temp_bytes"], cost["bytes_moved"]
        base = base or (memory, moved)
        yield (
            f"| {name} | {cost['kept'] / size:.2f} | {cost['kept'] / 1e9:.3f} | {cost['temp_bytes'] / 1e9:.3f} "
            f"| {memory / base[0]:.3f} | {moved / 1e9:.1f} | {moved / base[1]:.3f} |"
        )


def main():
    by = f"Compiled for one NVIDIA H200 with JAX {jax.__version__}, by `benchmarks/opt_levels.py`."
    notes = NOTES.format(case=CASE)
    report("Levels O0 to O3", f"{WHY}\n\n{by}", table(), notes, arguments(__doc__).parse_args().out)


if __name__ == "__main__":
    main()

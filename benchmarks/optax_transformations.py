"""Whether optax's transformations train under `dynamic_loss_scale` as they do without it, through overflows.

    python benchmarks/optax_transformations.py [--out docs/benchmarks/optax_transformations.md]

Each makes four steps on true float32 gradients, and six on gradients that are scaled, two of which overflow, under both
ways to skip. Nothing is timed.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
from report import arguments, report

import jmp_amp as amp

BAD = (False, True, False, False, True, False)
PARAMS = {"w": jnp.linspace(0.5, 1.5, 12).reshape(4, 3), "b": jnp.linspace(-1.0, 1.0, 3)}
SKIPS = ("cond", "select")


def loss_fn(params: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(params["w"]) @ jnp.array([1.0, -2.0, 0.5]) - 1) ** 2) + jnp.mean((params["b"] - 2) ** 4)


class Case(NamedTuple):
    """A transformation, the extra arguments of its `update`, from the true loss and the gradients, and a remark."""

    make: Callable[[], optax.GradientTransformation]
    extra: Callable[[jax.Array, Any], dict[str, Any]] = lambda value, grads: {}
    remark: str = ""


def line_search(value: jax.Array, grads: Any) -> dict[str, Any]:
    return {"value": value, "grad": grads, "value_fn": loss_fn}


def with_value(value: jax.Array, grads: Any) -> dict[str, Any]:
    return {"value": value}


def descent(make: Callable[[], optax.GradientTransformation]) -> Callable[[], optax.GradientTransformation]:
    """What does not step down the gradient by itself, with a step behind it."""
    return lambda: optax.chain(make(), optax.scale(-0.01))


def sgd() -> optax.GradientTransformation:
    return optax.sgd(0.01, momentum=0.9)


def muon(updates: Any) -> Any:
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), updates)


PARTS = {"w": "a", "b": "b"}
MASK = {"w": True, "b": False}
KEY = functools.partial(jax.random.key, 0)
# What is called by more than a learning rate, by the name of the transformation.
CASES: dict[str, Case] = {
    "adaptive_grad_clip": Case(descent(lambda: optax.adaptive_grad_clip(0.01))),
    "add_noise": Case(descent(lambda: optax.add_noise(0.01, 0.55, key=0))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(sgd(), 3), remark="inside only"),
    "chain": Case(lambda: optax.chain(optax.clip(0.1), sgd())),
    "clip": Case(descent(lambda: optax.clip(0.1))),
    "clip_by_block_rms": Case(descent(lambda: optax.clip_by_block_rms(0.1))),
    "clip_by_global_norm": Case(descent(lambda: optax.clip_by_global_norm(0.1))),
    "conditionally_mask": Case(lambda: optax.conditionally_mask(sgd(), lambda step: step % 2 == 0)),
    "conditionally_transform": Case(lambda: optax.conditionally_transform(sgd(), lambda step: step % 2 == 0)),
    "ema": Case(descent(lambda: optax.ema(0.9))),
    "flatten": Case(lambda: optax.flatten(sgd())),
    "freeze": Case(descent(lambda: optax.freeze(MASK))),
    "inject_hyperparams": Case(lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01)),
    "inject_stateful_hyperparams": Case(lambda: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=0.01)),
    "lbfgs": Case(optax.lbfgs, line_search, "`grad=` is the gradients that `update` gets"),
    "lookahead": Case(lambda: optax.lookahead(sgd(), 2, 0.5), remark="with `LookaheadParams`"),
    "masked": Case(descent(lambda: optax.masked(sgd(), MASK))),
    "measure_with_ema": Case(descent(lambda: optax.measure_with_ema(lambda updates: updates, 0.9))),
    "multi_transform": Case(lambda: optax.multi_transform({"a": sgd(), "b": optax.adam(0.01)}, PARTS)),
    "named_chain": Case(lambda: optax.named_chain(("clip", optax.clip(0.1)), ("sgd", sgd()))),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(0.01)),
    "partition": Case(lambda: optax.partition({"a": sgd(), "b": optax.adam(0.01)}, PARTS)),
    "polyak_sgd": Case(optax.polyak_sgd, with_value),
    "scale": Case(lambda: optax.scale(-0.01)),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(sgd(), optax.scale_by_backtracking_linesearch(5)), line_search, "as for `lbfgs`"
    ),
    "scale_by_learning_rate": Case(lambda: optax.scale_by_learning_rate(0.01)),
    "scale_by_polyak": Case(optax.scale_by_polyak, with_value),
    "scale_by_schedule": Case(lambda: optax.scale_by_schedule(optax.linear_schedule(-0.1, 0.0, 4))),
    "scale_by_zoom_linesearch": Case(
        lambda: optax.chain(sgd(), optax.scale_by_zoom_linesearch(5)), line_search, "as for `lbfgs`"
    ),
    "selective_transform": Case(lambda: optax.selective_transform(sgd(), freeze_mask=MASK)),
    "snapshot": Case(descent(lambda: optax.snapshot("norm", lambda updates, *_: optax.tree.norm(updates)))),
    "stateless": Case(lambda: optax.stateless(lambda updates, params: jax.tree.map(lambda g: -0.01 * g, updates))),
    "stateless_with_tree_map": Case(lambda: optax.stateless_with_tree_map(lambda g, p: -0.01 * g)),
    "trace": Case(descent(lambda: optax.trace(0.9))),
    "with_extra_args_support": Case(lambda: optax.with_extra_args_support(sgd())),
    "MultiSteps": Case(lambda: optax.MultiSteps(sgd(), 2).gradient_transformation(), remark="inside only"),
    "contrib.differentially_private_aggregate": Case(
        lambda: optax.chain(contrib.differentially_private_aggregate(1.0, 0.1, key=KEY()), sgd()),
        remark="with gradients of single examples",
    ),
    "contrib.mechanize": Case(lambda: contrib.mechanize(optax.sgd(0.01)), remark="inside only"),
    "contrib.momo": Case(contrib.momo, with_value),
    "contrib.momo_adam": Case(contrib.momo_adam, with_value),
    "contrib.reduce_on_plateau": Case(lambda: optax.chain(sgd(), contrib.reduce_on_plateau()), with_value),
    "contrib.sam": Case(
        lambda: contrib.sam(sgd(), optax.chain(contrib.normalize(), optax.sgd(0.05))), remark="inside only"
    ),
    "contrib.schedule_free": Case(lambda: contrib.schedule_free(optax.sgd(0.01), 0.01)),
    "contrib.scale_by_muon": Case(
        descent(lambda: optax.masked(contrib.scale_by_muon(weight_dimension_numbers=muon), MASK))
    ),
    "contrib.sophia": Case(
        lambda: contrib.sophia(0.01), lambda value, grads: {"obj_fn": loss_fn}, "`obj_fn=` is the loss in float32"
    ),
    "contrib.split_real_and_imaginary": Case(lambda: contrib.split_real_and_imaginary(sgd())),
}
# What returns a transformation, but is none that could be tried alone.
LEFT_OUT = {"contrib.dpsgd": "a chain of `differentially_private_aggregate`"}


def public_names() -> Iterator[str]:
    """The public functions of optax that return a transformation."""
    for module, prefix in ((optax, ""), (contrib, "contrib.")):
        for name, value in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(value):
                continue
            if "GradientTransformation" in str(inspect.signature(value).return_annotation):
                yield prefix + name


def case_of(name: str) -> Case:
    module, _, short = name.rpartition(".")
    make = getattr(contrib if module else optax, short)
    takes_rate = "learning_rate" in inspect.signature(make).parameters
    return CASES.get(name) or Case(functools.partial(make, learning_rate=0.01) if takes_rate else descent(make))


def parameters(name: str) -> Any:
    return optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS


def gradients(name: str, params: Any, scale: Any) -> tuple[jax.Array, Any]:
    params = params.fast if name == "lookahead" else params
    value, grads = amp.value_and_grad(loss_fn, loss_scale=scale)(params)
    if name == "contrib.differentially_private_aggregate":
        grads = jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), grads)
    return value, grads


def train(name: str, skip: str | None) -> Any:
    """Parameters after four good steps: without the wrapper, or with it and two more that overflow between them."""
    case, params = case_of(name), parameters(name)
    tx = case.make() if skip is None else amp.dynamic_loss_scale(case.make(), skip=skip)

    def step(params: Any, state: Any, bad: jax.Array) -> tuple[Any, Any]:
        scale = 1.0 if skip is None else amp.get_loss_scale(state)
        value, grads = gradients(name, params, scale)
        grads = jax.tree.map(lambda g: jnp.where(bad, jnp.inf, g), grads)
        update = optax.with_extra_args_support(tx).update
        updates, state = update(grads, state, params, **case.extra(value, grads))
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params) if skip is None else tx.init(params)
    step = jax.jit(step)
    for bad in BAD:
        if bad and skip is None:
            continue
        before = params, state
        params, state = step(params, state, jnp.asarray(bad))
        if bad:
            same = jax.tree.map(_same_bits, before, (params, state._replace(loss_scale=before[1].loss_scale)))
            frozen = same[0], same[1].inner_state
            if not all(jax.tree.leaves(frozen)):
                raise AssertionError(f"{name}: an overflow changed parameters or state")
    return params


def _same_bits(x: Any, y: Any) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()


def verdict(name: str, skip: str) -> str:
    """What the table says: "ok", or what went wrong."""
    try:
        want, got = train(name, None), train(name, skip)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:120]
    close = jax.tree.map(functools.partial(np.allclose, rtol=1e-4, atol=1e-6), got, want)
    return "ok" if all(jax.tree.leaves(close)) else "differs"


def names() -> list[str]:
    return sorted({*public_names(), *CASES} - {*LEFT_OUT}, key=lambda name: (name.startswith("contrib"), name.lower()))


def table() -> Iterator[str]:
    yield '| transformation | `skip="cond"` | `skip="select"` | |'
    yield "|---|---|---|---|"
    for name in names():
        yield f"| `{name}` | {verdict(name, 'cond')} | {verdict(name, 'select')} | {case_of(name).remark} |"


WHY = """Which of optax's transformations work inside `dynamic_loss_scale`, and whether a skipped step changes their
state. For you: all that were tried do, and no skipped step does."""
NOTES = """
Each takes four steps in float32 without a loss scale, and six steps on scaled gradients under `dynamic_loss_scale`, two
of which overflow. "ok": the final parameters agree to 1e-4, and an overflow changed no bit of the parameters and of the
transformation's state. "Inside only": around `dynamic_loss_scale` it raises, or `check_loss_scaling` finds it. In
front of it in a chain, all that read the size of gradients, replace what is not finite, or keep gradients in their
state raise in a jitted step; `acprop`, which divides by what it kept, is found by `check_loss_scaling`.
"""


def main() -> None:
    options = arguments(__doc__).parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        by = f"By `benchmarks/optax_transformations.py`, jax {jax.__version__}, optax {optax.__version__}."
        report("Optax transformations", f"{WHY}\n\n{by}", table(), NOTES, options.out)


if __name__ == "__main__":
    main()

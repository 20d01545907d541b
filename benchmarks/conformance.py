"""What libraries for mixed precision make of small programs (`programs.py`), and how their loss scales behave.

    python benchmarks/conformance.py --environments DIR [--out docs/benchmarks/conformance.md]

Each peer runs in an environment of its own under DIR, made from PyPI if it is not there, on a JAX that it runs on.
Nothing is timed; a minute a library.
"""

import contextlib
import importlib.metadata
import io
import json
import os
import pathlib
import subprocess
import sys
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from programs import PROGRAMS
from report import arguments, head, report, row

SECONDS = 60  # for a program that may never end
DOES_NOT_END = "does not end"
ENDLESS = "loops that end by a float"
PARTLY = {"angles", "decompositions", "large constants", ENDLESS}  # where some of the products cannot be low
# Where each product should be float32: a logarithm or a decomposition reads it, it reads what a decomposition returns,
# its few columns are chosen from by their order, or a loop replaces a carry with it.
FULL = ("epsilon of 1e 12 in a logarithm", "custom jvp", "cholesky", "sort and top k", "gradient descent from zeros")
FULL = [PROGRAMS[name] for name in FULL]
HERE = pathlib.Path(__file__).parent
OLD = "flax==0.10.2 dm-haiku==0.0.13 optax==0.2.4 chex==0.1.87 orbax-checkpoint==0.10.2 equinox==0.11.10"
MIDDLE = "flax==0.10.6 dm-haiku==0.0.14 optax==0.2.5 chex==0.1.90 orbax-checkpoint==0.11.20 equinox==0.13.2"
NEW = "flax dm-haiku equinox"
ENVIRONMENTS = {  # what a library is installed with
    "jmp": f"jmp==0.0.4 jax==0.10.2 {NEW}",
    "mpx": f"mixed-precision-for-JAX==0.1.8 jax==0.10.2 {NEW}",
    "jaxamp": f"jaxamp==0.0.4 jax==0.4.35 jaxlib==0.4.35 numpy<2.3 {OLD}",
    "grampax": f"grampax==0.1.0 quax==0.2.1 jax==0.6.2 jaxlib==0.6.2 {MIDDLE}",
    "torch": f"torch==2.13.0 jax==0.10.2 {NEW}",  # for its GradScaler
}
LIBRARIES = ("jmp_amp", *ENVIRONMENTS, "flax dtype=")
PRODUCTS = {"dot_general", "conv_general_dilated"}
SENSITIVE = {"exp", "exp2", "expm1", "log", "log1p", "rsqrt", "pow", "cumsum", "cumlogsumexp", "erf_inv", "reduce_sum"}
LOW = (jnp.float16, jnp.bfloat16)
TOLERANCE = 0.02
QUESTIONS = {  # and what a table says where the answer is no
    "runs, and its gradient": "raises",
    "products in 16 bits": "products float32",
    "exp, log, sums in float32": "sensitive ops low",
    "finite": "not finite",
    "shapes and dtypes kept": "dtype",
    "within 2% of float32": "far off",
}
COLOURS = {  # of a cell; the worst answer first
    "raises": "red",
    DOES_NOT_END: "red",
    "not finite": "red",
    "far off": "red",
    "dtype": "red",
    "sensitive ops low": "orange",
    "products float32": "yellow",
    "ok": "green",
}
SHARES = {"green": 1, "yellow": 0.75, "orange": 0.5, "red": 0}  # the least share of a colour


# Each library by what its own pages say.


def under_jmp_amp(fun):
    import jmp_amp

    return jmp_amp.autocast(fun)


def under_jmp(fun):
    import jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    return lambda *args: policy.cast_to_output(fun(*policy.cast_to_compute(args)))


def under_mpx(fun):
    import mpx

    return mpx.cast_function(fun, jnp.float16, return_dtype=jnp.float32)


def under_jaxamp(fun):
    import jaxamp

    return jaxamp.amp(fun, compute_dtype=jnp.float16)


def under_grampax(fun):
    import grampax

    return grampax.autocast(fun, dtype=jnp.float16)


def by_hand(fun):
    def full(x):
        return x.astype(jnp.float32) if x.dtype in LOW else x

    return lambda *args: jax.tree_util.tree_map(full, fun(*args))


ADAPTERS = {
    "jmp_amp": under_jmp_amp,
    "jmp": under_jmp,
    "mpx": under_mpx,
    "jaxamp": under_jaxamp,
    "grampax": under_grampax,
    "flax dtype=": by_hand,
}


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            for sub in param if isinstance(param, (tuple, list)) else [param]:
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from equations(sub)


def operands(fun, args, primitives):
    """The dtypes of the floating operands of each equation of these primitives that does not ask for precision."""
    found = []
    for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr):
        if eqn.primitive.name in primitives and "HIGHEST" not in str(eqn.params.get("precision")) and sums(eqn):
            dtypes = [x.aval.dtype for x in eqn.invars]
            found.append([d for d in dtypes if jnp.issubdtype(d, jnp.inexact)])
    return found


def sums(eqn):
    """Whether an equation is more than a multiplication, as an outer product is."""
    if eqn.primitive.name != "dot_general":
        return True
    (contracting, _), _ = eqn.params["dimension_numbers"]
    return any(eqn.invars[0].aval.shape[axis] != 1 for axis in contracting)


def floats(tree):
    return [x for x in jax.tree_util.tree_leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def gradient(fun, scale=1.0):
    """Of a weighted mean of the results, scaled and unscaled: what a train step would have."""

    def weighted(x):
        return jnp.mean(jnp.real(x).astype(jnp.float32) * jnp.cos(jnp.arange(x.size)).reshape(x.shape))

    def loss(*args):
        return scale * sum(weighted(x) for x in floats(fun(*args)))

    def grads(*args):
        return jax.tree_util.tree_map(lambda g: g.astype(jnp.float32) / scale, jax.grad(loss)(*args))

    return grads


def scaled_gradient(fun, args):
    """At the largest of three scales that does not overflow, which dynamic loss scaling would find."""
    for scale in (2.0**10, 1.0, 2.0**-10):
        grads = jax.jit(gradient(fun, scale))(*args)
        if all(bool(jnp.isfinite(g).all()) for g in floats(grads)):
            break
    return grads


def far(got, want):
    got, want = (np.concatenate([np.ravel(np.asarray(x, np.complex128)) for x in floats(t)]) for t in (got, want))
    seen = np.isfinite(want)
    return np.linalg.norm((got - want)[seen]) > TOLERANCE * np.linalg.norm(want[seen])


def finite_where(got, want):
    return all(
        bool(jnp.all(jnp.isfinite(g) | ~jnp.isfinite(w))) for g, w in zip(floats(got), floats(want), strict=True)
    )


def avals(tree):
    return [(x.shape, str(x.dtype)) for x in jax.tree_util.tree_leaves(tree)]


def examine(program, adapter, hand=False):
    """Returns the answer to each question, in their order: True, False, or None where it does not arise."""
    fun, args = program.make()
    low_fun, low_args = program.by_hand() if hand else (fun, args)
    low = adapter(low_fun)
    want = jax.jit(fun)(*args)
    try:
        want_grads = jax.jit(gradient(fun))(*args)
    except (TypeError, ValueError):  # a `while_loop` has no gradient
        want_grads = None
    try:
        got = jax.jit(low)(*low_args)
        grads = scaled_gradient(low, low_args) if want_grads is not None else None
        products = operands(low, low_args, PRODUCTS)
        sensitive = operands(low, low_args, SENSITIVE)
    except Exception as error:
        return [False, None, None, None, None, None], f"{type(error).__name__}: {error}".split("\n")[0][:120]
    eligible = [o for o in operands(fun, args, PRODUCTS) if set(o) == {np.dtype("float32")}]
    low_products = [np.dtype("float32") not in o for o in products]
    is_asked = eligible and program not in FULL
    low_products = (any if program.group in PARTLY else all)(low_products) if is_asked else None
    full = not any(d in LOW for o in sensitive for d in o) if operands(fun, args, SENSITIVE) else None
    finite = finite_where(got, want) and (grads is None or finite_where(grads, want_grads))
    close = not far(got, want) and (grads is None or not far(grads, want_grads))
    return [True, low_products, full, finite, avals(got) == avals(want), close if finite else None], ""


# Loss scales: a rule that grows after 3 finite steps, as each library spells it. `step(state, w, bad)` returns the new
# state, the gradient of 3 * w (or NaN), unscaled, and the scale that the next step has.


def scale_of_jmp_amp(scale, loss):
    import jmp_amp

    rule = jmp_amp.LossScale(init_scale=scale, growth_interval=3)

    def step(state, w):
        _, grad = jmp_amp.value_and_grad(loss, loss_scale=state.loss_scale)(w)
        grad, finite = rule.unscale(state, grad)
        return rule.update(state, finite), grad

    return rule.init(), jax.jit(step), lambda state: state.loss_scale


def scale_of_jmp(scale, loss):
    import jmp

    def step(state, w):
        grad = state.unscale(jax.grad(lambda w: state.scale(loss(w)))(w))
        return state.adjust(jmp.all_finite(grad)), grad

    return jmp.DynamicLossScale(jnp.float32(scale), period=3), step, lambda state: state.loss_scale


def scale_of_mpx(scale, loss):
    import mpx

    def step(state, w):
        state, _, grad = mpx.filter_grad(loss, state)(w)
        return state, grad

    state = mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(1), period=3)
    return state, step, lambda state: state.loss_scaling


def scale_of_jaxamp(scale, loss):
    import jaxamp

    def step(state, w):
        return jaxamp.dynamic_scale_grad(loss, filter=False)(w, dynamic_scaler_state=state)

    return jaxamp.DynamicScalerState(patience=3, scaler=jnp.float32(scale)), step, lambda state: state.scaler


def scale_of_flax(scale, loss):
    from flax.training.dynamic_scale import DynamicScale

    def step(state, w):
        state, _, _, grad = state.value_and_grad(loss)(w)
        return state, grad

    return DynamicScale(scale=jnp.float32(scale), growth_interval=3), step, lambda state: state.scale


def scale_of_torch(scale, loss):
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)

    def step(state, w):
        w = torch.tensor(float(w), requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=1.0)
        scaler.scale(loss(w)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return state, w.grad

    return None, step, lambda state: scaler.get_scale()


SCALES = {
    "jmp_amp": scale_of_jmp_amp,
    "jmp": scale_of_jmp,
    "mpx": scale_of_mpx,
    "jaxamp": scale_of_jaxamp,
    "flax dtype=": scale_of_flax,
    "torch": scale_of_torch,
}


def half(x):
    return x.half() if hasattr(x, "half") else x.astype(jnp.float16)


def behaviour(make):
    """What a loss scale does, as strings by question."""

    def run(steps, scale=2.0**10, loss=lambda w: 3 * w, start=1.0):
        state, step, scale_of = make(scale, loss)
        scales, grads = [float(scale)], []
        for bad in steps:
            state, grad = step(state, jnp.float32(jnp.nan if bad else start) * 1.0)
            scales.append(float(scale_of(state)))
            grads.append(float(grad))
        return scales, grads

    answers = {}

    def ask(question, answer):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers[question] = answer()
        except Exception as error:
            answers[question] = f"raises {type(error).__name__}"

    def squares(w):
        return 1.5 * w * w  # whose gradient is NaN where w is

    def finite_steps_to_growth():
        scales, _ = run([False] * 8)
        return f"{next(i for i, s in enumerate(scales) if s > scales[0])} steps"

    def growth_step():
        _, grads = run([False] * 8)
        wrong = sorted({g / 3 for g in grads} - {1.0})
        return "right" if not wrong else "x " + ", ".join(f"{g:g}" for g in wrong)

    def float16_loss():
        _, grads = run([False], 2.0**16, lambda w: half(2 * w))
        return "right" if grads == [2.0] else f"{grads[0]}"

    def show(s):
        return f"2^{np.log2(s):g}" if 0 < s < np.inf and np.log2(s) % 1 == 0 else f"{s:g}"

    ask("grows after (asked for 3)", finite_steps_to_growth)
    ask("gradient on the step on which it grows", growth_step)
    ask("gradient of a float16 loss of 2 at 2^16", float16_loss)
    ask("after a NaN at 2^10", lambda: show(run([True], loss=squares)[0][-1]))
    ask("after 300 overflows", lambda: show(run([True] * 300, loss=squares)[0][-1]))
    ask("after 900 finite steps", lambda: show(run([False] * 900, loss=lambda w: 1e-8 * w)[0][-1]))
    return answers


def may_not_end(title):
    """Whether a program is a process of its own, which can be stopped."""
    return PROGRAMS[title].group == ENDLESS


def is_shown(title, name):
    return name in ADAPTERS and (name != "flax dtype=" or PROGRAMS[title].by_hand is not None)


def examine_library(name, only=None):
    rows = {}
    for title, program in PROGRAMS.items():
        hand = name == "flax dtype="
        if not is_shown(title, name) or (may_not_end(title) if only is None else title != only):
            continue
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows[title] = examine(program, ADAPTERS[name], hand)
    versions = {"jax": jax.__version__} if name in ADAPTERS else {}
    package = {"mpx": "mixed-precision-for-JAX", "flax dtype=": "flax", "jmp_amp": "jmp-amp"}.get(name, name)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions[package] = importlib.metadata.version(package)
    scale = behaviour(SCALES[name]) if name in SCALES and only is None else None
    return {"rows": rows, "scale": scale, "versions": versions}


def python_of(name, environments):
    """The interpreter of a library's environment, which is made if it is not there."""
    if name not in ENVIRONMENTS:
        return sys.executable
    python = environments / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environments / name], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *ENVIRONMENTS[name].split()], check=True)
    return python


def ask(name, environments):
    python = python_of(name, environments)
    found = asked(python, name)
    apart = [title for title in PROGRAMS if may_not_end(title) and is_shown(title, name)]
    rows = found["rows"] | {title: examine_apart(title, name, python) for title in apart}
    return found | {"rows": {title: rows[title] for title in PROGRAMS if title in rows}}


def asked(python, name, *options, timeout=None):
    """What this program prints of a library under another interpreter."""
    command = [python, __file__, "--library", name, *options]
    env = os.environ | {"PYTHONPATH": str(HERE.parent) if name not in ENVIRONMENTS else ""}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=timeout).stdout
    return json.loads(output.splitlines()[-1])


def examine_apart(title, name="jmp_amp", python=sys.executable):
    """As `examine`, in a process that is stopped if the program does not end."""
    try:
        return asked(python, name, "--program", title, timeout=SECONDS)["rows"][title]
    except subprocess.TimeoutExpired:
        return [False, None, None, None, None, None], DOES_NOT_END


def verdict(answers):
    if answers[1] == DOES_NOT_END:
        return DOES_NOT_END
    failed = [short for answer, short in zip(answers[0], QUESTIONS.values(), strict=True) if answer is False]
    return ", ".join(failed) or "ok"


def coloured(text, colour):
    """A cell of a table whose class `docs/css/site.css` colours."""
    return f"{text} {{ .{colour} }}"


def cell(answers):
    said = verdict(answers)
    colour = next(colour for answer, colour in COLOURS.items() if answer in said)
    return coloured("✓" if said == "ok" else said, colour)


def share(part, whole):
    """How many of how many, in the colour of that share."""
    colour = next(colour for colour, least in SHARES.items() if part >= least * whole)
    return coloured(f"{part} of {whole}", colour)


def passed(answers, titles):
    found = [verdict(answers["rows"][title]) == "ok" for title in titles if title in answers["rows"]]
    return share(sum(found), len(found)) if found else ""


def answered(answers, question):
    i = list(QUESTIONS).index(question)
    given = [given[i] for given, _ in answers["rows"].values()]
    return share(sum(answer is True for answer in given), sum(answer is not None for answer in given))


def tables(found):
    scales = {name: answers["scale"] for name, answers in found.items() if answers["scale"]}
    found = {name: answers for name, answers in found.items() if answers["rows"]}
    groups = {
        group: [title for title, program in PROGRAMS.items() if program.group == group]
        for group in dict.fromkeys(program.group for program in PROGRAMS.values())
    }
    yield from head("programs that pass", *found)
    yield row("**all**", *(passed(answers, PROGRAMS) for answers in found.values()))
    for group, titles in groups.items():
        yield row(group, *(passed(answers, titles) for answers in found.values()))
    yield from ("", "## What a program is asked", "")
    yield from head("", *found)
    for question in QUESTIONS:
        yield row(question, *(answered(answers, question) for answers in found.values()))
    yield from ("", "## Program by program", "", KEY)
    for group, titles in groups.items():
        yield from ("", f"### {group.capitalize()}", "")
        yield from head("", *found)
        for title in titles:
            name = title.partition(": ")[2] or title
            yield row(name, *(cell(a["rows"][title]) if title in a["rows"] else "" for a in found.values()))
    yield from ("", "## Loss scales", "")
    yield from head("", *scales)
    for question in scales["jmp_amp"]:
        yield row(question, *(scale[question] for scale in scales.values()))


def versions(found):
    installed = {name: ", ".join(f"{package} {v}" for package, v in a["versions"].items()) for name, a in found.items()}
    return "; ".join(f"{name}: {packages}" for name, packages in installed.items())


WHY = """How many of {n} small programs run as they should under a library for mixed precision. A program passes if it
runs, with its gradient, has its products in 16 bits and its sums in float32, stays finite, keeps its shapes and dtypes,
and comes within 2% of float32. For you: what you write in JAX is likely to work here as it stands."""

KEY = """<span class="green">✓: passes</span>, <span class="yellow">products float32: nothing gained</span>,
<span class="orange">sensitive ops low: may overflow</span>, <span class="red">a wrong result or none</span>"""

NOTES = """
## How it was done

By `benchmarks/conformance.py`. {versions}.

Each program is written for float32, and each library is applied as its own documentation says, with float16:
`jmp_amp.autocast(fun)`; a `jmp` policy that casts arguments and results; `mpx.cast_function`; `jaxamp.amp`;
`grampax.autocast`; and, for modules of Flax, the layers' own `dtype=float16`. The answers come from the jaxpr and
from the results. A question is left out where it does not apply: a program without products has no answer about
products. Nor have five programs whose products should be float32: logarithms and decompositions read or make them,
their few columns are chosen from by their order, or a loop of 2000 steps replaces its carry with them. A program that
raises has no other answers. "Sensitive" are exponentials, logarithms, powers, `rsqrt`, sums and cumulative sums.
Gradients are those of a weighted mean of the results, scaled by 2^10, or by less if that overflows. A loop that has
not ended after 60 seconds counts as a loop that does not end.

`jmp` and `mpx` cast whole arguments, and the model must cast back around its norms and sums. These programs do not cast
back, because autocast needs no such casts. `grampax` casts the operands of products only. torch cannot run the
programs, so only its `GradScaler` is tested. We chose the programs and the questions; another choice would give other
figures.
"""


def main():
    parser = arguments(__doc__)
    parser.add_argument("--environments", type=pathlib.Path, default=pathlib.Path("runs/environments"))
    parser.add_argument("--library", choices=LIBRARIES, help="examine this one here, and print JSON")
    parser.add_argument("--program", choices=PROGRAMS, help="with --library, examine this one only")
    parser.add_argument("--only", choices=LIBRARIES, nargs="*", default=LIBRARIES)
    options = parser.parse_args()
    if options.library:
        print(json.dumps(examine_library(options.library, options.program)))
        return
    found = {name: ask(name, options.environments.absolute()) for name in options.only}
    report(
        "Conformance", WHY.format(n=len(PROGRAMS)), tables(found), NOTES.format(versions=versions(found)), options.out
    )


if __name__ == "__main__":
    main()

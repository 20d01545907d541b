"""Ten small programs in the style of public projects, their conversion to jmp_amp, and their losses in three dtypes.

    JAX_PLATFORMS=cpu python benchmarks/adopters.py [--out docs/adopters.md] [--only NAME,NAME]

The programs are those of `benchmarks/adopted/`. It fetches nothing, and takes a few minutes. `--kfac` prints the table
of the last section, which stands in `KFAC`: it needs `pip install kfac_jax`, whose release 0.0.8 does not import with
JAX 0.11; what it needs of JAX before 0.10 is put back.
"""

import collections
import difflib
import itertools
import pathlib
import platform

import jax
import jax.numpy as jnp
import numpy as np
from report import arguments, head, report, row
from scipy.spatial.transform import Rotation
from sklearn.datasets import load_digits

import jmp_amp as amp

FOLDER = pathlib.Path(__file__).parent / "adopted"
STEPS, LAST = 60, 10  # the loss of a run is the mean of its last ones
AMP = ("import optax\n", "import jmp_amp as amp\nimport optax\n")


def grad(args):
    """The line that differentiates `loss_fn` in most programs, before and after."""
    return (
        f"jax.value_and_grad(loss_fn)({args})",
        f'amp.value_and_grad(amp.autocast(loss_fn, "float16"), opt_state=opt_state)({args})',
    )


# What a program shows, and what is replaced in it by what.
CONVERSIONS = {
    "flax_language_model": (
        "Flax Linen's `TrainState`, a schedule that reads the count of steps, embeddings that are used twice",
        [
            AMP,
            ("    def loss_fn(params):\n", '    @amp.autocast(dtype="float16")\n    def loss_fn(params):\n'),
            ("jax.value_and_grad(loss_fn)(", "amp.value_and_grad(loss_fn, opt_state=state)("),
            (
                "optax.adamw(schedule, b1=0.9, b2=0.98)",
                "amp.dynamic_loss_scale(optax.adamw(schedule, b1=0.9, b2=0.98))",
            ),
        ],
    ),
    "flax_graph_network": (
        "graphs padded to one size, sums over edges, missing labels that are NaN",
        [
            AMP,
            ("    def loss_fn(params):\n", '    @amp.autocast(dtype="float16")\n    def loss_fn(params):\n'),
            ("jax.value_and_grad(loss_fn)(", "amp.value_and_grad(loss_fn, opt_state=state)("),
            ("optax.adam(1e-3)", "amp.dynamic_loss_scale(optax.adam(1e-3))"),
        ],
    ),
    "equinox_diffusion": (
        "a module of Equinox as the parameters, `filter_value_and_grad`, `vmap` over examples and keys",
        [
            ("import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport jmp_amp as amp\n"),
            (
                "    loss, grads = eqx.filter_value_and_grad(batch_loss)(model, data, key)\n",
                '    loss_fn = amp.autocast(batch_loss, "float16")\n'
                "    transform = eqx.filter_value_and_grad\n"
                "    value_and_grad = amp.value_and_grad(loss_fn, opt_state=opt_state, transform=transform)\n"
                "    loss, grads = value_and_grad(model, data, key)\n",
            ),
            ("optax.adabelief(3e-3)", "amp.dynamic_loss_scale(optax.adabelief(3e-3))"),
        ],
    ),
    "haiku_vqvae": (
        "`transform_with_state`, a codebook with moving averages, gradients that pass straight through",
        [
            AMP,
            (
                "    def loss_fn(params, state, x):\n",
                '    @amp.autocast(dtype="float16")\n    def loss_fn(params, state, x):\n',
            ),
            (
                "jax.value_and_grad(loss_fn, has_aux=True)(",
                "amp.value_and_grad(loss_fn, has_aux=True, opt_state=opt_state)(",
            ),
            ("optax.adam(2e-3)", "amp.dynamic_loss_scale(optax.adam(2e-3))"),
        ],
    ),
    "neural_sde": (
        "Euler-Maruyama in a `scan`, moments of the paths as the loss, clipping inside of the loss scale",
        [
            AMP,
            grad("params, noise, moments"),
            (
                "optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))",
                "amp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))",
            ),
        ],
    ),
    "equivariant_shapes": (
        "products of vectors and scalars on edges, cross products, classes that differ by a mirror",
        [AMP, grad("params, SHAPES"), ("optax.adam(5e-3)", "amp.dynamic_loss_scale(optax.adam(5e-3))")],
    ),
    "recurrent_ppo": (
        "a network that acts and learns in one `jit`, ratios of probabilities, scans from behind; only the network is "
        "under autocast, so that old and new probabilities agree",
        [
            AMP,
            ("def network(", '@amp.autocast(dtype="float16")\ndef network('),
            ("jax.grad(loss_fn)(", "amp.grad(loss_fn, opt_state=opt_state)("),
            (
                "optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))",
                "amp.dynamic_loss_scale(\n"
                "        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))\n"
                "    )",
            ),
        ],
    ),
    "equivariant_potential": (
        "forces, which are gradients inside of the loss, a polynomial cutoff, Bessel functions of distances",
        [AMP, grad("params, *data"), ("optax.adam(3e-3)", "amp.dynamic_loss_scale(optax.adam(3e-3))")],
    ),
    "two_towers": (
        "normalized embeddings, a softmax over the batch, a temperature that is trained as a logarithm",
        [
            AMP,
            grad("params, images, texts"),
            ("optax.adamw(1e-3, weight_decay=0.01)", "amp.dynamic_loss_scale(optax.adamw(1e-3, weight_decay=0.01))"),
        ],
    ),
    "deep_equilibrium": (
        "a `while_loop` that ends by a tolerance, and a rule of its own for the derivative",
        [AMP, grad("params, x, labels"), ("optax.adam(3e-3)", "amp.dynamic_loss_scale(optax.adam(3e-3))")],
    ),
}
WHY = """\
What changes in a program to train it in 16 bits: ten small ones, in the style of public projects. There is a
language model and a graph network as in Flax's examples, Equinox's score-based diffusion, Haiku's VQ-VAE, a
neural SDE, a network for shapes as e3nn's, a recurrent PPO in one `jit`, a potential with forces as NequIP, two
towers as CLIP, and a deep equilibrium model. They were written for this page, and stand in
`benchmarks/adopted/`.

*Lines* are those that the conversion adds. A loss is the mean of the last {last} of {steps} steps on a CPU
({versions}), from the same start, with `dynamic_loss_scale` in both 16-bit dtypes. It depends on roundings as
it depends on a seed. In float16 the first steps are skipped until the loss scale fits: 6 of the 60 in
`equivariant_potential`, which is then where float32 was 6 steps before.
"""
ROTATIONS = """
## What a rotation changes

The scores of `equivariant_shapes` do not depend on how a shape is rotated, but for rounding. The table has how much
they change in {n} rotations of the trained network: the root mean square of the changes, over that of the scores.
The rule is `rules={{"vectors": "full"}}`, for the scope in which the program computes what turns with the shape. What
does not turn, such as functions of distances, may be low: a rotation changes it by the rounding of float32, which now
and then rounds to another number in 16 bits.

{table}
"""


KFAC_SIZES, KFAC_L2 = (64, 50, 50, 10), 1e-3
KFAC = """
## K-FAC

`kfac_jax` finds the layers of a model by their ops in the traced program. Under `autocast` there are casts between
these, so it finds no dense layer, and says nothing: its blocks are diagonal. Register each layer, which gives it the
parameters and the input in float32, as it has them without `autocast`:

```py
x = kfac_jax.register_dense(x @ w + b, x, w, b)
optimizer = kfac_jax.Optimizer(jax.value_and_grad(amp.autocast(loss_fn, "bfloat16")), ...)
```

`amp.explain` names the tags, `layer_tag` and `loss_tag`, among the primitives without a rule: they run in the dtypes
that they were traced in. The table is of the example of kfac_jax 0.0.8 on scikit-learn's digits, after 40 steps:

| dtype | layers | loss | blocks |
|---|---|---|---|
| float32 | as written | 0.108 | 3 `DenseTwoKroneckerFactored` |
| float32 | registered | 0.108 | 3 `DenseTwoKroneckerFactored` |
| bfloat16 | as written | 0.145 | 5 `NaiveDiagonal`, 1 `ScaleAndShiftDiagonal` |
| bfloat16 | registered | 0.108 | 3 `DenseTwoKroneckerFactored` |
| float16 | as written | 0.144 | 5 `NaiveDiagonal`, 1 `ScaleAndShiftDiagonal` |
| float16 | registered | 0.108 | 3 `DenseTwoKroneckerFactored` |

The optimizer differentiates the loss itself, without a loss scale, so bfloat16 is the dtype for it.
"""


def source(name):
    """Returns the source of a program in float32."""
    return (FOLDER / f"{name}.py").read_text()


def converted(name):
    """Returns the source of a program in float16."""
    text = source(name)
    for old, new in CONVERSIONS[name][1]:
        if text.count(old) != 1:
            raise ValueError(f"`{old}` is {text.count(old)} times in {name}")
        text = text.replace(old, new)
    return text


def diff(name):
    """Returns the lines of the conversion of a program as a diff."""
    return list(difflib.unified_diff(source(name).splitlines(), converted(name).splitlines(), lineterm="", n=0))[2:]


def losses(text, steps):
    """Returns the losses of a program, given its source."""
    scope = {"__name__": "adopted"}
    exec(compile(text, "adopted", "exec"), scope)
    return np.array([float(x) for x in scope["main"](steps)])


def run(name, steps=STEPS, dtypes=("float16", "bfloat16")):
    """Returns the losses of a program by dtype, of float32 first."""
    texts = {"float32": source(name)} | {d: converted(name).replace('"float16"', f'"{d}"') for d in dtypes}
    return {dtype: losses(text, steps) for dtype, text in texts.items()}


def rotations(steps=STEPS, n=32):
    """Returns how much rotations change the scores of `equivariant_shapes`, by dtype and whether there is the rule."""
    scope = {"__name__": "adopted"}
    exec(source("equivariant_shapes"), scope)
    params, shapes = scope["train"](steps)[0], np.asarray(scope["SHAPES"])
    turns = Rotation.random(n, random_state=0).as_matrix().astype(np.float32)
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        for rules in ({}, {"vectors": "full"}) if dtype != "float32" else ({},):
            scores = jax.jit(jax.vmap(amp.autocast(scope["logits_of"], dtype, rules=rules), (None, 0)))
            straight = np.asarray(scores(params, shapes))
            turned = [np.asarray(scores(params, shapes @ turn.T)) for turn in turns]
            changes = np.array(turned) - straight
            found[dtype, bool(rules)] = np.sqrt(np.mean(changes**2) / np.mean(straight**2))
    return found


def table(names):
    """Yields the lines of the table."""
    yield from head("program", "lines", *("float32", "float16", "bfloat16"), "what it shows")
    for name in names:
        found = run(name)
        ends = [f"{x[-LAST:].mean():.3g}" for x in found.values()]
        added = sum(line.startswith("+") for line in diff(name))
        yield row(f"[{name}](#{name})", added, *ends, CONVERSIONS[name][0])


def evaluate_eqn(eqn, values):
    """Evaluates an equation; kfac_jax does it as JAX did before 0.9.2."""
    outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]


def import_kfac():
    """Imports kfac_jax for a JAX that is newer than it."""
    import jax.core
    import jax.interpreters.xla

    jax.core.Effects, jax.interpreters.xla.pytype_aval_mappings = set, collections.defaultdict(lambda: None)
    import kfac_jax

    kfac_jax.tag_graph_matcher.eval_jaxpr_eqn = evaluate_eqn
    return kfac_jax


def kfac_loss(registers):
    """Returns the loss function of a network, whose layers are registered or not."""
    kfac_jax = import_kfac()

    def loss_fn(params, batch):
        x, labels = batch
        for i, (w, b) in enumerate(params):
            x = kfac_jax.register_dense(x @ w + b, x, w, b) if registers else x @ w + b
            x = jax.nn.relu(x) if i < len(params) - 1 else x
        kfac_jax.register_softmax_cross_entropy_loss(x, labels)
        loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], axis=1))
        return loss + KFAC_L2 * kfac_jax.utils.inner_product(params, params) / 2

    return loss_fn


def run_kfac(dtype, registers, steps=40):
    """Returns the last loss of K-FAC, and the number of its blocks of each kind."""
    kfac_jax, (x, labels) = import_kfac(), load_digits(return_X_y=True)
    batch = jnp.asarray(x / 16, jnp.float32), jnp.asarray(labels)
    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(amp.autocast(kfac_loss(registers), dtype)),
        l2_reg=KFAC_L2,
        num_burnin_steps=0,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=1.0,
        multi_device=False,
    )
    keys = jax.random.split(jax.random.key(0), len(KFAC_SIZES))
    shapes = itertools.pairwise(KFAC_SIZES)
    params = [
        (jax.random.normal(key, shape) / shape[0] ** 0.5, jnp.zeros(shape[1]))
        for key, shape in zip(keys[1:], shapes, strict=True)
    ]
    state = optimizer.init(params, keys[0], batch)
    for key in jax.random.split(keys[0], steps):
        params, state, stats = optimizer.step(params, state, key, batch=batch)
    return float(stats["loss"]), collections.Counter(type(x).__name__ for x in optimizer._estimator.blocks)


def kfac_table():
    """Yields the table of the section about K-FAC."""
    yield from head("dtype", "layers", "loss", "blocks")
    for dtype in ("float32", "bfloat16", "float16"):
        for registers in (False, True):
            loss, blocks = run_kfac(dtype, registers)
            names = ", ".join(f"{n} `{name}`" for name, n in sorted(blocks.items()))
            yield row(dtype, "registered" if registers else "as written", f"{loss:.3f}", names)


def main():
    parser = arguments(__doc__, "names of programs")
    parser.add_argument("--kfac", action="store_true", help="print the table of K-FAC alone")
    options = parser.parse_args()
    if options.kfac:
        print(*kfac_table(), sep="\n")
        return
    names = options.only.split(",") if options.only else CONVERSIONS
    versions = f"JAX {jax.__version__}, {platform.machine()}"
    why = WHY.format(last=LAST, steps=STEPS, versions=versions)
    diffs = [f"\n## {name}\n\n```diff\n" + "\n".join(diff(name)) + "\n```\n" for name in names]
    rows = [
        row(f"{dtype}{', with the rule' * ruled}", f"{x:.0e}" if x else 0) for (dtype, ruled), x in rotations().items()
    ]
    turned = ROTATIONS.format(n=32, table="\n".join([*head("dtype", "change of the scores"), *rows]))
    report("Ten programs, converted", why, table(names), "\n" + "".join(diffs) + turned + KFAC, options.out)


if __name__ == "__main__":
    main()

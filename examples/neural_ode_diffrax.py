"""Fit a universal differential equation in float16, with diffrax and Equinox, to hares and lynxes counted 1900 to 1920.

    python examples/neural_ode_diffrax.py                # float32 and float16, half a minute on two CPU cores
    python examples/neural_ode_diffrax.py --precision float16

The equations of Lotka and Volterra, and a network for what they leave out. `amp.autocast` is around the vector field:
the network is float16, the solver is not, and neither is the product with the 2 x 2 matrix of the known part. `fit.png`
shows the steps of the solver.

The data are pelts of the Hudson's Bay Company (Odum and Barrett, Fundamentals of Ecology; Howard, Modeling Basics,
2009), the first parameters of Carpenter, Predator-Prey Population Dynamics: the Lotka-Volterra model in Stan, 2018.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import twins
from diffrax import SaveAt
from matplotlib.figure import Figure

import jmp_amp as amp

HARES = "30 47.2 70.2 77.4 36.3 20.6 18.1 21.4 22 25.4 27.1 40.3 57 76.6 52.3 19.5 11.2 7.6 14.6 16.2 24.7"
LYNXES = "4 6.1 9.8 35.2 59.4 41.7 19 13 8.3 9.1 7.4 8 12.3 19.5 45.7 51.1 29.7 15.8 9.7 10.1 8.6"
UNIT = 30  # thousand pelts
DATA = np.log(np.array([HARES.split(), LYNXES.split()], np.float32).T / UNIT)
YEARS, MONTHS = np.linspace(0, 20, 21, dtype=np.float32), np.linspace(0, 20, 241, dtype=np.float32)


class Populations(eqx.Module):
    first: jax.Array
    growth: jax.Array
    interaction: jax.Array
    network: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        self.first = jnp.asarray(DATA[0])
        self.growth = jnp.array([0.55, -0.80])
        self.interaction = UNIT * jnp.array([[0.0, -0.028], [0.024, 0.0]])
        self.network = eqx.nn.MLP(2, 2, width_size=64, depth=2, activation=jnp.tanh, key=key)


def vector_field(t: jax.Array, log_pelts: jax.Array, model: Populations) -> jax.Array:
    known = model.growth + model.interaction @ jnp.exp(log_pelts)
    return known + 0.1 * model.network(log_pelts)


@eqx.filter_jit
def solve(model: Populations, saveat: SaveAt, precision: str) -> diffrax.Solution:
    term = diffrax.ODETerm(amp.autocast(vector_field, precision))
    options = {"args": model, "saveat": saveat, "stepsize_controller": diffrax.PIDController(rtol=1e-5, atol=1e-5)}
    return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 20.0, None, model.first, **options)


def loss_fn(model: Populations, precision: str) -> jax.Array:
    return jnp.mean((solve(model, SaveAt(ts=YEARS), precision).ys - DATA) ** 2)


def fit(precision: str, steps: int, seed: int, log: Callable[..., None]) -> Populations:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    tx = amp.dynamic_loss_scale(optax.adam(optax.cosine_decay_schedule(1e-2, steps)), rule)
    model = Populations(jax.random.key(seed))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(model: Populations, opt_state: optax.OptState) -> tuple:
        value_and_grad = amp.value_and_grad(loss_fn, opt_state=opt_state, transform=eqx.filter_value_and_grad)
        loss, grads = value_and_grad(model, precision)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    for _ in range(steps):
        model, opt_state, loss = train_step(model, opt_state)
        log(loss=loss, **amp.metrics(opt_state))
    amp.check_health(opt_state, eqx.filter(model, eqx.is_inexact_array))
    return model


def trajectory(model: Populations, precision: str) -> dict[str, Any]:
    """The logarithms of the pelts in each month, the times at which the solver stood, and how many steps it tried."""
    saveat = SaveAt(subs=[diffrax.SubSaveAt(ts=MONTHS), diffrax.SubSaveAt(t0=True, steps=True)])
    solution = solve(model, saveat, precision)
    times = np.asarray(solution.ts[1])
    steps = int(solution.stats["num_steps"])
    return {"log_pelts": np.asarray(solution.ys[0]), "times": times[np.isfinite(times)], "steps": steps}


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    figure = Figure((8, 6), dpi=120, layout="constrained")
    curves, sizes = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for i, (run, found) in enumerate(runs.items()):
        style = {"lw": 4, "color": "0.75"} if run == "float32" else {"lw": 1.4, "color": f"C{i}"}
        sizes.step(1900 + found["times"][1:], np.diff(found["times"]), label=run, **style)
        curves.plot(1900 + MONTHS, UNIT * np.exp(found["log_pelts"]), label=[run, None], **style)
    curves.plot(1900 + YEARS, UNIT * np.exp(DATA[:, 0]), "ko", ms=4, label="hares")
    curves.plot(1900 + YEARS, UNIT * np.exp(DATA[:, 1]), "k^", ms=4, label="lynxes")
    curves.set_title("Pelts, in thousands", size=10)
    sizes.set_title("Steps of the solver, in years", size=10)
    sizes.set(yscale="log", xticks=range(1900, 1921, 5))
    for axes in (curves, sizes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> dict[str, twins.Scores]:
    runs = {}

    def train(precision: str, steps: int, seed: int, log: Callable[..., None]) -> twins.Scores:
        model = fit(precision, steps, seed, log)
        exact, low = trajectory(model, "float32"), trajectory(model, precision)
        runs[precision] = low
        return {
            "fit error": float(np.sqrt(np.mean((low["log_pelts"][::12] - DATA) ** 2))),
            "rounding error": float(np.max(np.abs(low["log_pelts"] - exact["log_pelts"]))),
            "steps": low["steps"],
        }

    return twins.main(train, 400, argv, lambda out: draw(runs, out / "fit.png"))


if __name__ == "__main__":
    main()

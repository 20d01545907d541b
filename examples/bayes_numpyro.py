"""Sample a Bayesian regression with NUTS, in numpyro, with the log density in float32, in float16, in both.

    python examples/bayes_numpyro.py                     # three runs, a minute on two CPU cores
    python examples/bayes_numpyro.py --samples 1000

How does the area of a cell's nucleus grow with its radius, its smoothness and its texture? By a power law, to one
percent. float16 rounds the logarithm of an area (about 6) by 0.002 and an exponent (about 2) by 0.001, and nothing
tells autocast that this is too much. `amp.full_precision` around one product gives what float32 gives. NUTS takes
gradients by itself, with no loss scale.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from matplotlib.figure import Figure
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import initialize_model
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer

import jmp_amp as amp

Sites = dict[str, np.ndarray]
CHAINS = 2
RUNS = {
    "float32": ("float32", jnp.matmul),
    "float16": ("float16", jnp.matmul),
    "float16, region": ("float16", amp.full_precision(jnp.matmul)),
}


def nuclei() -> tuple[np.ndarray, np.ndarray]:
    """Predictors f32[569, 4], one and logarithms, first that of the mean radius, and logarithms of the mean areas."""
    cells = load_breast_cancer()
    names = [f"mean {name}" for name in ("radius", "smoothness", "texture", "area")]
    logs = np.log(cells.data[:, [list(cells.feature_names).index(name) for name in names]]).astype(np.float32)
    return np.concatenate([np.ones_like(logs[:, :1]), logs[:, :3]], -1), logs[:, 3]


def model(x: np.ndarray, y: np.ndarray, matmul: Callable[..., jax.Array]) -> None:
    weights = numpyro.sample("weights", dist.Normal(0.0, 3.0).expand([4]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    freedom = numpyro.sample("freedom", dist.Gamma(2.0, 0.1))
    numpyro.sample("y", dist.StudentT(freedom, matmul(x, weights), scale), obs=y)


def sample(
    potential: Callable[[Any], jax.Array], start: Any, samples: int, seed: int
) -> tuple[Sites, dict[str, float]]:
    """Samples of the unconstrained parameters, `[chain, sample, ...]`, and how well the sampler moved."""
    kernel = NUTS(potential_fn=potential, max_tree_depth=8)
    mcmc = MCMC(kernel, num_warmup=samples, num_samples=samples, num_chains=CHAINS, chain_method="vectorized")
    fields = ("accept_prob", "diverging", "adapt_state.step_size", "num_steps")
    mcmc.run(jax.random.key(seed), init_params=start, extra_fields=fields)
    sites, moves = jax.device_get((mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields()))
    return sites, {
        "acceptance": float(moves["accept_prob"].mean()),
        "divergences": int(moves["diverging"].sum()),
        "step size": float(moves["adapt_state.step_size"].mean()),
        "leapfrogs": float(moves["num_steps"].mean()),
        "ESS": min(float(np.min(effective_sample_size(x))) for x in sites.values()),
    }


def bias(sites: Sites, reference: Sites) -> float:
    """How far the posterior means are off, at worst, in standard deviations of the posterior."""
    axes = (0, 1)
    off = {name: np.abs(x.mean(axes) - reference[name].mean(axes)) for name, x in sites.items()}
    return max(float(np.max(off[name] / x.std(axes))) for name, x in reference.items())


def draw(found: dict[str, Sites], potentials: dict[str, Callable], path: Path) -> None:
    figure = Figure((8, 3.6), dpi=120, layout="constrained")
    posterior, density = figure.subplots(1, 2)
    mean = {name: x.mean((0, 1)) for name, x in found["float32"].items()}
    exponents = np.linspace(-0.005, 0.005, 401, dtype=np.float32) + mean["weights"][1]
    weights = np.tile(mean["weights"], (len(exponents), 1))
    weights[:, 1] = exponents
    for i, (run, sites) in enumerate(found.items()):
        style = {"lw": 4, "color": "0.75"} if i == 0 else {"lw": 1.4, "color": f"C{i}"}
        posterior.hist(sites["weights"][..., 1].ravel(), 40, histtype="step", density=True, label=run, **style)
        potential = jax.jit(jax.vmap(lambda w, run=run: potentials[run](mean | {"weights": w})))
        density.plot(exponents, -potential(weights), **style)
    posterior.set_title("Posterior of the exponent", size=10)
    posterior.set_yscale("log")
    posterior.legend(frameon=False, fontsize=8)
    density.set_title("Log density along the exponent", size=10)
    for axes in (posterior, density):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=500, help="of each chain, after as many to warm up")
    parser.add_argument("--seed", type=int, default=0, help="of the chains")
    parser.add_argument("--out", type=Path, default=Path("runs", Path(__file__).stem), help="where the picture goes")
    config = parser.parse_args(argv)
    found, scores, potentials = {}, {}, {}
    for run, (precision, matmul) in RUNS.items():
        print(run, flush=True)
        keys = jax.random.split(jax.random.key(config.seed), CHAINS)
        info = initialize_model(keys, model, model_args=(*nuclei(), matmul))
        potentials[run] = amp.autocast(info.potential_fn, precision)
        found[run], scores[run] = sample(potentials[run], info.param_info.z, config.samples, config.seed)
        scores[run]["bias"] = bias(found[run], found["float32"])
    table = Table("run", *scores["float32"], box=SIMPLE_HEAD)
    for run, values in scores.items():
        table.add_row(run, *(f"{value:.3g}" for value in values.values()))
    Console().print(table)
    config.out.mkdir(parents=True, exist_ok=True)
    draw(found, potentials, config.out / "posterior.png")
    print(f"Wrote {config.out / 'posterior.png'}")
    return scores


if __name__ == "__main__":
    main()

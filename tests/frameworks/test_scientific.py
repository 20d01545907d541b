"""Solvers and samplers around networks under autocast: diffrax and numpyro."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from agreement import assert_close
from jaxprs import row, scoped_equations

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

LOW, FULL = "float16 float16 -> float16", "float32 float32 -> float32"
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "inner": jax.random.normal(KEYS[0], (4, 16)) / 2,
    "bias": jax.random.normal(KEYS[1], (16,)) / 2,
    "outer": jax.random.normal(KEYS[2], (16, 4)) / 4,
}
X = jax.random.normal(KEYS[3], (8, 4))


def network(params, x, region=contextlib.nullcontext):
    with jax.named_scope("network"), region():
        return jnp.tanh(x @ params["inner"] + params["bias"]) @ params["outer"]


def products(fun, *args):
    """The dtypes of the products of the network, its backward pass included; a solver has products of its own."""
    equations = scoped_equations(fun, *args)
    return {row(e) for scope, e in equations if "network" in scope and e.primitive.name == "dot_general"}


@pytest.mark.parametrize(
    ("region", "dtypes"),
    [
        pytest.param(contextlib.nullcontext, FULL, id="the field decides on the steps"),
        pytest.param(
            functools.partial(amp.precision, "float16"), LOW, id="a region comes first", marks=pytest.mark.slow
        ),
    ],
)
def test_neural_ode_with_adaptive_steps_is_solved_and_differentiated_either_way_round(region, dtypes):
    loss = neural_ode(adaptive=True, region=region)
    gradient = functools.partial(jax.value_and_grad, has_aux=True)
    want = jax.jit(gradient(loss))(PARAMS, X)
    for fun in (gradient(amp.autocast(loss)), amp.autocast(gradient(loss))):
        low = jax.jit(fun)
        assert_close(low(PARAMS, X), want)
        assert dtypes in products(low, PARAMS, X)
    assert products(amp.autocast(loss), PARAMS, X) == {dtypes}


def test_neural_ode_with_constant_steps_is_solved():
    loss = neural_ode(adaptive=False)
    low = jax.jit(amp.autocast(loss))
    assert_close(low(PARAMS, X), jax.jit(loss)(PARAMS, X))
    assert products(low, PARAMS, X) == {LOW}


def neural_ode(adaptive, region=contextlib.nullcontext):
    """A loss that returns the solution and the numbers of steps too."""
    diffrax = pytest.importorskip("diffrax", reason="needs diffrax")
    controller = diffrax.PIDController(rtol=1e-2, atol=1e-2) if adaptive else diffrax.ConstantStepSize()

    def loss(params, x):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, params: network(params, y, region)),
            diffrax.Bosh3(),
            t0=0.0,
            t1=1.0,
            dt0=0.25,
            y0=x,
            args=params,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 3)),
            stepsize_controller=controller,
            adjoint=diffrax.RecursiveCheckpointAdjoint(),
            max_steps=16,
        )
        return jnp.mean(solution.ys**2), (solution.ys, solution.stats)

    return loss


@pytest.fixture
def regression():
    numpyro = pytest.importorskip("numpyro", reason="needs numpyro")
    dist = numpyro.distributions
    y = network(PARAMS, X) + jax.random.normal(KEYS[0], (8, 4))

    def model(network, x, y):
        params = {
            name: numpyro.sample(name, dist.Normal(jnp.zeros(p.shape), 1.0).to_event(p.ndim))
            for name, p in PARAMS.items()
        }
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(network(params, x), scale).to_event(2), obs=y)

    return numpyro, model, y


@pytest.mark.parametrize("around", ["network", "log density"])
def test_log_density_and_its_gradient_are_close_to_float32(regression, around):
    numpyro, model, y = regression

    def log_density(network, params):
        return numpyro.infer.util.log_density(model, (network, X, y), {}, params)[0]

    exact = functools.partial(log_density, network)
    low = functools.partial(log_density, amp.autocast(network)) if around == "network" else amp.autocast(exact)
    sites = PARAMS | {"scale": jnp.float32(0.5)}
    assert_close(jax.jit(jax.value_and_grad(low))(sites), jax.jit(jax.value_and_grad(exact))(sites))
    assert products(jax.grad(low), sites) == {LOW}


def test_variational_inference_is_close_to_float32(regression):
    numpyro, model, y = regression

    def after_updates(network):
        guide = numpyro.infer.autoguide.AutoNormal(model)
        svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(1e-2), numpyro.infer.Trace_ELBO())
        state = svi.init(jax.random.key(0), network, X, y)
        state, losses = jax.lax.scan(lambda state, _: svi.update(state, network, X, y), state, length=5)
        return losses, svi.get_params(state)

    assert_close(jax.jit(lambda: after_updates(amp.autocast(network)))(), jax.jit(lambda: after_updates(network))())


def test_a_model_under_autocast_is_named_and_the_loss_under_it_is_the_cure(regression):
    numpyro, model, y = regression
    key, args = jax.random.key(0), (network, X, y)

    def svi(model):
        guide = numpyro.infer.autoguide.AutoNormal(regression[1])
        return numpyro.infer.SVI(model, guide, numpyro.optim.Adam(1e-2), numpyro.infer.Trace_ELBO())

    def loss_fn(params):
        return inference.loss.loss(key, inference.constrain_fn(params), model, inference.guide, *args) / len(y)

    low = svi(amp.autocast(model))
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"leaked was model at .* traced for autocast"):
        low.evaluate(low.init(key, *args), *args)
    inference = svi(model)
    params = inference.get_params(inference.init(key, *args))
    assert_close(*(jax.jit(jax.value_and_grad(f))(params) for f in (amp.autocast(loss_fn), loss_fn)))

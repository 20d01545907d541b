# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Mixed precision in ten minutes
#
# Numbers of 16 bits take half the memory of float32, and the matrix units of
# GPUs and TPUs are made for them. *Mixed* precision uses them where they are
# good enough, and float32 where they are not.
#
# With jmp_amp this takes two calls: `autocast` around the loss function,
# `dynamic_loss_scale` around the optimizer. This notebook shows what each of
# them does, and why you need both. It runs anywhere. On a CPU it takes half a
# minute, and float16 is not faster there.

# %% [markdown]
# ## Install
#
# Start this notebook from a clone of the repository. Elsewhere, replace the
# path by that of your clone.

# %% tags=["skip-execution"]
# %pip install -q "../..[demo]"

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import jmp_amp as amp

# %matplotlib inline

# %% [markdown]
# ## Two formats of 16 bits
#
# A floating-point format spends its bits on *range* (how large, how small)
# and on *digits* (how fine). float16 has the finer digits, bfloat16 the wider
# range.

# %%
colors = {"float32": "0.75", "bfloat16": "C2", "float16": "C0"}

figure = Figure(figsize=(8, 1.9), layout="constrained")
axes = figure.subplots()
for name, color in colors.items():
    info = jnp.finfo(name)
    smallest = np.log10(float(info.smallest_subnormal))
    largest = np.log10(float(info.max))
    label = f"{name}: {info.nmant + 1} significant bits"
    axes.barh(label, largest - smallest, left=smallest, color=color)
axes.set(title="Range of the formats", xlabel="power of ten")
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
figure

# %% [markdown]
# So float16 fails in three ways: large values become infinite, small ones
# become 0, and small changes get lost.


# %%
def in_float16(x):
    return jnp.float32(x).astype(jnp.float16)


print("70,000   becomes", in_float16(70_000))
print("1e-8     becomes", in_float16(1e-8))
print("1 + 1e-4 becomes", in_float16(1) + in_float16(1e-4))

# %% [markdown]
# Each failure has its cure:
#
# | failure | where it hurts | cure |
# |---|---|---|
# | large values | sums, exponentials, norms | run these ops in float32: `autocast` |
# | small values | gradients | multiply the loss: `dynamic_loss_scale` |
# | small changes | updates of parameters | keep the parameters in float32, as you do now |

# %% [markdown]
# ## A model
#
# A network with one hidden layer reads scikit-learn's handwritten digits. It
# is written for float32.

# %%
images, labels = load_digits(return_X_y=True)
images, labels = (images / 8 - 1).astype(np.float32), labels.astype(np.int32)
test_images, images = images[:360], images[360:]
test_labels, labels = labels[:360], labels[360:]

figure = Figure(figsize=(8, 1.2), layout="constrained")
for i, axes in enumerate(figure.subplots(1, 10)):
    axes.imshow(images[i].reshape(8, 8), cmap="gray_r")
    axes.set_title(labels[i])
    axes.axis("off")
figure


# %%
def init_params(seed=0):
    rng = np.random.default_rng(seed)

    def dense_params(n_in, n_out):
        w = rng.standard_normal((n_in, n_out)) / np.sqrt(n_in)
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(n_out)}

    return {"hidden": dense_params(64, 256), "output": dense_params(256, 10)}


def model(params, x):
    x = jax.nn.gelu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return x @ params["output"]["w"] + params["output"]["b"]


def loss_fn(params, x, labels):
    logits = model(params, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


params = init_params()

# %% [markdown]
# ## First call: `autocast`
#
# `amp.autocast` returns a function that computes the same in mixed precision.
# It looks the same from outside: float32 goes in, float32 comes out.

# %%
low_loss_fn = amp.autocast(loss_fn, dtype="float16")

batch = images[:128], labels[:128]
print("float32:", jax.jit(loss_fn)(params, *batch))
print("float16:", jax.jit(low_loss_fn)(params, *batch))

# %% [markdown]
# Inside, each op has the dtype that suits it. `amp.explain` lists them,
# without running anything.

# %%
report = amp.explain(loss_fn, "float16")(params, *batch)
for row in report.select(direction="forward").rows:
    if row.primitive in ("dot_general", "tanh", "exp", "log", "reduce_sum"):
        print(f"{row.primitive:12} {row.compute}")

# %% [markdown]
# Both products (`dot_general`) run in float16, and so does the activation
# function between them. The sums, exponentials and logarithms of the loss run
# in float32. `print(report)` shows every op, its line and the reason.

# %% [markdown]
# ## Second call: `dynamic_loss_scale`
#
# The better a model fits its data, the smaller its gradients. Train in
# float32 for a moment, and compare the gradients of both loss functions.


# %%
@jax.jit
def gradient_error(grads, full_grads):
    difference = jax.tree.map(jnp.subtract, grads, full_grads)
    return optax.global_norm(difference) / optax.global_norm(full_grads)


@jax.jit
def adam_step(params, opt_state):
    grads = jax.grad(loss_fn)(params, images, labels)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


adam = optax.adam(3e-3)
trained, opt_state = params, adam.init(params)
for _ in range(600):
    trained, opt_state = adam_step(trained, opt_state)

full_grads = jax.jit(jax.grad(loss_fn))(trained, images, labels)
low_grads = jax.jit(jax.grad(low_loss_fn))(trained, images, labels)
error = gradient_error(low_grads, full_grads)
print(f"error of the gradients in float16: {error:.1%}")

# %% [markdown]
# Where does this error come from? `amp.debug.underflow` counts how many
# gradients are too small for float16, and draws them.

# %%
amp.debug.underflow(full_grads).plot()

# %% [markdown]
# In the dark area float16 has all its digits, in the light area it has fewer,
# and left of the dashed line it has only 0.
#
# The cure is simple. Multiply the loss by a *loss scale*: by the chain rule,
# this multiplies all gradients. Afterwards divide them by the scale, in
# float32. Seen from the gradients, the range of float16 moves to the left.

# %%
scale = 2.0**16
scaled_grad = jax.jit(amp.grad(low_loss_fn, loss_scale=scale))
scaled_grads = scaled_grad(trained, images, labels)
low_grads = jax.tree.map(lambda g: g / scale, scaled_grads)
error = gradient_error(low_grads, full_grads)
print(f"error of the gradients in float16, with a loss scale: {error:.1%}")

amp.debug.underflow(scaled_grads, loss_scale=scale).plot()

# %% [markdown]
# But how large may the scale be? Too large, and the gradients overflow.
# `amp.dynamic_loss_scale` finds out by trying: it doubles the scale every now
# and then. If a gradient overflows, it skips the step and halves the scale.

# %% [markdown]
# ## The train step
#
# It differs from a train step in float32 only where it names `amp`.


# %%
def train(dtype, loss_scale, steps=200):
    low_loss_fn = amp.autocast(loss_fn, dtype)
    tx = amp.dynamic_loss_scale(optax.adam(3e-3), loss_scale)

    @jax.jit
    def train_step(params, opt_state, x, labels):
        scale = amp.get_loss_scale(opt_state)
        value_and_grad = amp.value_and_grad(low_loss_fn, loss_scale=scale)
        loss, grads = value_and_grad(params, x, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, {"loss": loss, **amp.metrics(opt_state)}

    params = init_params()
    opt_state, rng, rows = tx.init(params), np.random.default_rng(0), []
    for _ in range(steps):
        index = rng.integers(len(images), size=128)
        batch = images[index], labels[index]
        params, opt_state, row = train_step(params, opt_state, *batch)
        rows.append({"run": dtype, **row})
    return params, rows


# %% [markdown]
# Train in float32, which needs no scale, and in float16. The scale doubles
# after 20 clean steps here; the default is 2,000.

# %%
full_params, full_rows = train("float32", amp.LossScale.none())
low_params, low_rows = train("float16", amp.LossScale(growth_interval=20))
amp.watch.plot_history(full_rows + low_rows)

# %% [markdown]
# The losses lie on each other. Each cross is a step that was skipped because
# the scale had grown too large. A skipped step changes neither the parameters
# nor the state of Adam, and the loss does not notice.


# %%
def accuracy(params, dtype):
    logits = jax.jit(amp.autocast(model, dtype))(params, test_images)
    return np.mean(np.argmax(logits, -1) == test_labels)


print(f"test accuracy in float32: {accuracy(full_params, 'float32'):.1%}")
print(f"test accuracy in float16: {accuracy(low_params, 'float16'):.1%}")

# %% [markdown]
# ## bfloat16
#
# bfloat16 has the range of float32, so its gradients do not underflow, and it
# needs no scale. Where your device has it, this is all:

# %%
bfloat16_params, _ = train("bfloat16", amp.LossScale.none())
print(f"test accuracy in bfloat16: {accuracy(bfloat16_params, 'bfloat16'):.1%}")

# %% [markdown]
# ## In short
#
# 1. `amp.autocast(loss_fn, dtype)`: products in 16 bits, the rest where it
#    belongs.
# 2. `amp.dynamic_loss_scale(tx)`: scales, checks, skips. For bfloat16, with
#    `amp.LossScale.none()`.
# 3. `amp.value_and_grad(loss_fn, loss_scale=scale)`: the loss unscaled, the
#    gradients scaled, ready for `tx.update`.
#
# Next:
#
# - [float16 on a T4](float16_on_a_t4.ipynb): a GPT, and the memory that
#   float16 saves.
# - [Why is my loss NaN?](why_is_my_loss_nan.ipynb): when a run fails.
# - [The tutorial](../tutorial/policies.md): the same in more depth.
# - [Your framework](../frameworks/plain-jax.md): Flax, Equinox, Haiku, Keras.

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
# # Why is my loss NaN?
#
# A NaN does not say where it comes from. It passes through every later op,
# and within one step all parameters are NaN. Printing values finds the place
# where you notice it, not the place where it began.
#
# Here are eight runs, most of them broken, and the call that explains each.
# The model is always the same, a small network with attention. First find
# your case:
#
# | what you see | the call |
# |---|---|
# | the loss is NaN or infinite | `amp.debug.first_nonfinite` of the loss function |
# | the loss is finite, the gradients are not | `amp.debug.first_nonfinite` of the loss function and its gradients |
# | steps are skipped | look at the loss scale: `amp.watch.plot_history` |
# | steps are skipped without end | `amp.check_health` |
# | no NaN, but the step may be wrong | `amp.debug.check_loss_scaling` |
# | no NaN, but it does not learn | `amp.debug.underflow` |
# | no NaN, but worse than float32 | `amp.debug.compare`, `amp.debug.suggest_rules` |

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
from sklearn.datasets import load_digits

import jmp_amp as amp

# %matplotlib inline

# %% [markdown]
# ## A model that works
#
# The network reads handwritten digits. Each of the eight rows of an image is
# a token.

# %%
pixels, labels = load_digits(return_X_y=True)
pixels = pixels.reshape(-1, 8, 8).astype(np.float32)[:256]  # 0 to 16
labels = labels.astype(np.int32)[:256]
images = pixels / 8 - 1  # -1 to 1


# %%
def init_params(seed=0):
    rng = np.random.default_rng(seed)

    def dense_params(n_in, n_out):
        w = rng.standard_normal((n_in, n_out)) / np.sqrt(n_in)
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(n_out)}

    return {
        "embed": dense_params(8, 32),
        "query": dense_params(32, 32),
        "key": dense_params(32, 32),
        "value": dense_params(32, 32),
        "output": dense_params(256, 10),
    }


# %%
def dense(p, x):
    return x @ p["w"] + p["b"]


def model(params, images):
    with jax.named_scope("embed"):
        x = dense(params["embed"], images)
    with jax.named_scope("attention"):
        q, k, v = (dense(params[name], x) for name in ("query", "key", "value"))
        scores = q @ k.mT
        x = x + jax.nn.softmax(scores / np.sqrt(32)) @ v
    with jax.named_scope("output"):
        return dense(params["output"], x.reshape(len(x), -1))


@jax.jit
def loss_fn(params, images, labels):
    logits = model(params, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


# %%
params = init_params()
low_loss_fn = jax.jit(amp.autocast(loss_fn, "float16"))
print("float32:", loss_fn(params, images, labels))
print("float16:", low_loss_fn(params, images, labels))

# %% [markdown]
# ## 1. An overflow in float16
#
# Someone forgot to scale the images to -1 to 1, and takes them as bytes, 0 to
# 255. In float32 this works. In float16 it does not.

# %%
raw = pixels * (255 / 16)
print("float32:", loss_fn(params, raw, labels))
print("float16:", low_loss_fn(params, raw, labels))

# %% [markdown]
# `first_nonfinite` takes the function and the arguments of the step that
# failed. It evaluates one op after the other, and reports the one where it
# began.

# %%
report = amp.debug.first_nonfinite(low_loss_fn)(params, raw, labels)
print(report)

# %% [markdown]
# It is the product `q @ k.mT` in the attention. float16 ends at 65504. The
# division by `np.sqrt(32)` comes too late.
#
# Two cures. The better one repairs the data. If that is not possible, a rule
# keeps the module in float32:

# %%
rules = {"attention": "full"}
ruled_loss_fn = jax.jit(amp.autocast(loss_fn, "float16", rules=rules))

print("images from -1 to 1: ", low_loss_fn(params, images, labels))
print("attention in float32:", ruled_loss_fn(params, raw, labels))

# %% [markdown]
# ## 2. Not a matter of precision
#
# Here the loss was written by hand.


# %%
@jax.jit
def loss_by_hand(params, images, labels):
    probabilities = jax.nn.softmax(model(params, images))
    return -jnp.mean(jnp.log(probabilities[jnp.arange(len(labels)), labels]))


confident = jax.tree.map(lambda w: 4 * w, params)  # as after long training
print("float32:", loss_by_hand(confident, images, labels))

# %% [markdown]
# The loss is infinite in float32, so precision is not the cause.

# %%
print(amp.debug.first_nonfinite(loss_by_hand)(confident, images, labels))

# %% [markdown]
# A softmax can be exactly 0, and the logarithm of 0 is infinite. A function
# that computes both at once does not have the problem:

# %%
print("float32:", loss_fn(confident, images, labels))
print("float16:", low_loss_fn(confident, images, labels))

# %% [markdown]
# ## 3. A finite loss, and gradients that are NaN
#
# This loss also keeps the norm of each bias small.


# %%
def penalized_loss_fn(params, images, labels):
    penalty = sum(jnp.linalg.norm(p["b"]) for p in params.values())
    return loss_fn(params, images, labels) + 1e-3 * penalty


step = jax.jit(jax.value_and_grad(penalized_loss_fn))
loss, grads = step(params, images, labels)
print("loss:", loss)
print("gradients are finite:", amp.all_finite(grads))

# %% [markdown]
# Pass the function that returns the gradients, so that the backward pass is
# evaluated, too.

# %%
print(amp.debug.first_nonfinite(step)(params, images, labels))

# %% [markdown]
# A norm is a square root, and the derivative of a square root at 0 is
# infinite. All biases start at 0. The sum of squares has no such corner:


# %%
def smooth_loss_fn(params, images, labels):
    penalty = sum(jnp.sum(p["b"] ** 2) for p in params.values())
    return loss_fn(params, images, labels) + 1e-3 * penalty


grads = jax.jit(jax.grad(smooth_loss_fn))(params, images, labels)
print("gradients are finite:", amp.all_finite(grads))

# %% [markdown]
# ## 4. Steps that are skipped now and then
#
# Nothing is broken here. The loss scale searches for the largest scale that
# does not overflow, so it has to overflow now and then.

# %%
loss_scale = amp.LossScale(init_scale=2.0**24, growth_interval=10)
tx = amp.dynamic_loss_scale(optax.adam(1e-3), loss_scale)


@jax.jit
def train_step(params, opt_state, images, labels):
    scale = amp.get_loss_scale(opt_state)
    value_and_grad = amp.value_and_grad(low_loss_fn, loss_scale=scale)
    loss, grads = value_and_grad(params, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, {"loss": loss, **amp.metrics(opt_state)}


def train(images, steps):
    state, rows = (params, tx.init(params)), []
    for _ in range(steps):
        *state, row = train_step(*state, images, labels)
        rows.append(row)
    return state, rows


_, rows = train(images, steps=150)
amp.watch.plot_history(rows)

# %% [markdown]
# Each cross is a skipped step. Those at the start bring down a scale that is
# much too large, and until then nothing is learned. Later ones test whether
# the scale may grow, and the loss does not notice.

# %% [markdown]
# ## 5. Steps that are skipped without end
#
# One image of the batch has a hole: a pixel is NaN. No loss scale helps
# against that, so every step is skipped.

# %%
broken = images.copy()
broken[17, 3, 3] = np.nan

(_, opt_state), rows = train(broken, steps=40)
columns = "loss_scale", "total_notfinite"
amp.watch.plot_history([{name: row[name] for name in columns} for row in rows])

# %% [markdown]
# Call `amp.check_health` outside of `jit`, every few hundred steps. It raises
# if skipping does not help.

# %%
try:
    amp.check_health(opt_state, params)
except amp.LossScaleError as error:
    print(error)

# %%
print(amp.debug.first_nonfinite(low_loss_fn)(params, broken, labels))

# %% [markdown]
# The cause is no op of the program, but its argument `images`.

# %% [markdown]
# ## 6. No NaN, but wrong
#
# This step clips the gradients while they are still multiplied by the loss
# scale. With a scale of 65536 nearly every gradient is too long, so the
# clipped ones are far too small. Nothing overflows, and the loss goes down
# slowly.


# %%
rule = amp.LossScale()
clip = optax.clip_by_global_norm(1.0)


@jax.jit
def hasty_step(params, state, images, labels):
    def scaled_loss_fn(params):
        return rule.scale(state, low_loss_fn(params, images, labels))

    grads = jax.grad(scaled_loss_fn)(params)
    grads, _ = clip.update(grads, clip.init(params))
    grads, finite = rule.unscale(state, grads)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params, rule.update(state, finite)


check = amp.debug.check_loss_scaling(hasty_step)
try:
    check(params, rule.init(), images, labels)
except ValueError as error:
    print(error)

# %% [markdown]
# `check_loss_scaling` follows the loss scale through the
# step as if it were a physical unit. The step of section 4 passes, because
# `amp.dynamic_loss_scale` unscales before anything else:

# %%
amp.debug.check_loss_scaling(train_step)(params, opt_state, images, labels)

# %% [markdown]
# ## 7. No NaN, but it does not learn
#
# An auxiliary loss has a small weight, and the optimizer has no loss scale.
# Gradients below 6e-8 become 0 in float16.


# %%
@amp.autocast
def auxiliary_loss_fn(params, images, labels):
    return 1e-5 * loss_fn(params, images, labels)


grads = jax.jit(amp.grad(auxiliary_loss_fn))(params, images, labels)
print(amp.debug.underflow(grads))

# %% [markdown]
# The column `zero` is the share of each gradient that is 0. With a loss
# scale, most of it is there:

# %%
scale = 2.0**16
scaled_grad = jax.jit(amp.grad(auxiliary_loss_fn, loss_scale=scale))
grads = scaled_grad(params, images, labels)
report = amp.debug.underflow(grads, scale)
print(f"zero: {report.total.zero:.1%}")
report.plot()

# %% [markdown]
# ## 8. No NaN, but worse than float32
#
# The images come from a camera that counts from 20,000 upwards. The first
# layer turns these counts into -1 to 1.


# %%
def camera_loss_fn(params, counts, labels):
    with jax.named_scope("calibrate"):
        images = counts @ (jnp.eye(8) / 100) - 200
    return loss_fn(params, images, labels)


counts = 20_000 + 100 * images
compare = amp.debug.compare(camera_loss_fn, ["float16"])
comparison = compare(params, counts, labels)
comparison.plot()

# %% [markdown]
# `compare` runs the program in float32 and in float16, and draws the error
# of each module. The module where it begins:

# %%
print(comparison.worst())

# %% [markdown]
# Around 20,000, float16 has steps of 16. `amp.debug.suggest_rules` finds the
# smallest part of the program that has to run in float32.

# %%
suggest = amp.debug.suggest_rules(camera_loss_fn)
rules, suggestion = suggest(params, counts, labels, tol=1e-2)
print(suggestion)
print(rules)

# %% [markdown]
# ## In short
#
# - Run the failing step in float32 first. If it fails there, too, precision
#   is not the cause.
# - `first_nonfinite` names the line. Give it the gradients as well as the
#   loss.
# - A skipped step now and then is healthy. Skips without end are not, and
#   `check_health` raises.
# - A step that scales or clips in the wrong order does not fail.
#   `check_loss_scaling` finds it once, before you train.
#
# More: [My loss is NaN](../my-loss-is-nan.md), [My float16 run is worse than
# float32](../worse-than-float32.md), [Watching a run](../watching.md).

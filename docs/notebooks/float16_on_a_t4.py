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
# # float16 on a T4
#
# The GPU that Colab and Kaggle lend for free is often an NVIDIA T4. It
# multiplies matrices at [65 TFLOPS in float16 and at 8.1 TFLOPS in
# float32](https://www.nvidia.com/en-us/data-center/tesla-t4/), and it has 16
# GB of memory. It has [no
# bfloat16](https://github.com/openxla/xla/issues/12429): XLA converts such
# products to float32.
#
# So float16 is what a T4 is good at. This notebook trains a small GPT in it,
# and shows what it saves.
#
# On another device the notebook adapts. On a CPU it trains a tiny model, in
# less than a minute.

# %% [markdown]
# ## Install
#
# Start this notebook from a clone of the repository. Elsewhere, replace the
# path by that of your clone.
#
# On a GPU or a TPU, JAX has to be installed for it, as [JAX's installation
# guide](https://docs.jax.dev/en/latest/installation.html) says. If it is not,
# the notebook will tell you that your device is a CPU.

# %% tags=["skip-execution"]
# %pip install -q "../..[demo]"

# %%
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import jmp_amp as amp

# %matplotlib inline

# %% [markdown]
# ## Your device
#
# | device | products in 16 bits | this notebook uses |
# |---|---|---|
# | T4 and other GPUs of compute capability 7.5 | float16 | float16, with a loss scale |
# | A100, L4, H100 and newer GPUs, from 8.0 | float16 and bfloat16 | bfloat16, without a loss scale |
# | TPU | bfloat16 | bfloat16, without a loss scale |
# | CPU | computed in float32 | float16, and a tiny model |
#
# Sources: [NVIDIA's table of
# formats](https://nvidia.github.io/TransformerEngine/support_matrix.html),
# [bfloat16 on TPUs](https://cloud.google.com/tpu/docs/bfloat16).

# %%
device = jax.devices()[0]
# Of NVIDIA's GPUs: "7.5" for a T4, "8.0" for an A100.
capability = getattr(device, "compute_capability", "")
is_new_gpu = capability[:1].isdigit() and float(capability) >= 8
has_bfloat16 = device.platform == "tpu" or is_new_gpu

dtype = "bfloat16" if has_bfloat16 else "float16"
print(f"{device.platform.upper()} ({device.device_kind}): {dtype}")

# %%
if device.platform == "cpu":
    layers, dim, heads, context = 2, 64, 2, 64
    batch_size, steps, peak_rate = 16, 150, 3e-3
else:
    layers, dim, heads, context = 8, 512, 8, 512
    batch_size, steps, peak_rate = 16, 300, 1e-3

# %% [markdown]
# ## Data
#
# The text to learn is the source code of Python's standard library, byte by
# byte.

# %%
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batches(seed=0):
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(text) - context, size=(batch_size, 1))
        yield text[starts + np.arange(context + 1)].astype(np.int32)


# %% [markdown]
# ## Model
#
# A GPT in plain JAX. It holds no cast, and nothing in it knows of float16.


# %%
def init_params(seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(0.02 * rng.standard_normal(shape), jnp.float32)

    def dense_params(n_in, n_out):
        w, b = normal(layers, n_in, n_out), jnp.zeros((layers, n_out))
        return {"w": w, "b": b}

    return {
        "embed": normal(256, dim),
        "position": normal(context, dim),
        "layers": {
            "qkv": dense_params(dim, 3 * dim),
            "out": dense_params(dim, dim),
            "up": dense_params(dim, 4 * dim),
            "down": dense_params(4 * dim, dim),
        },
    }


# %%
def dense(p, x):
    return x @ p["w"] + p["b"]


@jax.named_scope("attention")
def attention(p, x):
    q, k, v = (
        y.reshape(*x.shape[:2], heads, -1)
        for y in jnp.split(dense(p["qkv"], x), 3, axis=-1)
    )
    x = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return dense(p["out"], x.reshape(*x.shape[:2], -1))


@jax.named_scope("mlp")
def mlp(p, x):
    return dense(p["down"], jax.nn.gelu(dense(p["up"], x)))


@jax.named_scope("layer")
def layer(x, p):
    x = x + attention(p, jax.nn.standardize(x))
    x = x + mlp(p, jax.nn.standardize(x))
    return x, None


def gpt(params, tokens):
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jax.nn.standardize(x) @ params["embed"].T


def loss_fn(params, tokens):
    logits, labels = gpt(params, tokens[:, :-1]), tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


# %% [markdown]
# ## What will run in 16 bits
#
# `amp.autocast(loss_fn, dtype)` runs each op in the dtype that suits it.
# `amp.explain` lists its decisions, and runs nothing. Open a section to see
# its lines of code. (The backward pass has sections of its own, left out here.)

# %%
params, batch = init_params(), next(batches())

report = amp.explain(loss_fn, dtype)(params, batch)
report.select(direction="forward")

# %% [markdown]
# All matrix products run in 16 bits: these are what tensor cores are for.
# Softmax, norms and the loss run in float32, because sums and exponentials
# need it.

# %% [markdown]
# ## The train step
#
# `amp.dynamic_loss_scale` wraps an optimizer. The step scales the loss, so
# that small gradients do not become 0 in float16. `tx.update` unscales them,
# and skips the update if one of them is not finite.


# %%
def make_optimizer(loss_scale):
    warmup = steps // 10
    rate = optax.warmup_cosine_decay_schedule(0, peak_rate, warmup, steps)
    return amp.dynamic_loss_scale(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(rate),
        ),
        loss_scale,
    )


def make_train_step(dtype, tx):
    low_loss_fn = amp.autocast(loss_fn, dtype)

    @jax.jit
    def train_step(params, opt_state, tokens):
        scale = amp.get_loss_scale(opt_state)
        value_and_grad = amp.value_and_grad(low_loss_fn, loss_scale=scale)
        loss, grads = value_and_grad(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, {"loss": loss, **amp.metrics(opt_state)}

    return train_step


# %% [markdown]
# float16 gets a scale that doubles after 25 clean steps (2,000 by default,
# for longer runs than this one). float32 and bfloat16 need none.

# %%
no_scale = amp.LossScale.none()
loss_scale = amp.LossScale(growth_interval=25)

optimizers = {
    "float32": make_optimizer(no_scale),
    dtype: make_optimizer(loss_scale if dtype == "float16" else no_scale),
}

# %% [markdown]
# ## The memory that it saves
#
# XLA knows how much memory a step needs as soon as it has compiled it. This
# is the temporary memory: mostly what the forward pass keeps for the backward
# pass. It grows with the batch, so it decides how large a batch fits.

# %%
compiled, megabytes = {}, {}
for name, tx in optimizers.items():
    train_step = make_train_step(name, tx)
    compiled[name] = train_step.lower(params, tx.init(params), batch).compile()
    memory = compiled[name].memory_analysis()
    megabytes[name] = memory.temp_size_in_bytes / 1e6

# %%
figure = Figure(figsize=(8, 1.6), layout="constrained")
axes = figure.subplots()
names, sizes = list(megabytes), list(megabytes.values())
bars = axes.barh(names, sizes, color=["0.75", "C0"])
axes.bar_label(bars, fmt="{:,.0f} MB", padding=4)
axes.set(title="Temporary memory of a train step", xlim=(0, 1.2 * max(sizes)))
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
figure

# %%
share = megabytes[dtype] / megabytes["float32"]
print(f"{dtype} needs {share:.0%} of the temporary memory of float32")

# %% [markdown]
# ## Train
#
# Both runs start from the same parameters and see the same batches.


# %%
def train(name):
    trained, opt_state, rows = params, optimizers[name].init(params), []
    start = time.perf_counter()
    for _, tokens in zip(range(steps), batches(), strict=False):
        trained, opt_state, row = compiled[name](trained, opt_state, tokens)
        rows.append({"run": name, **row})
    jax.block_until_ready(trained)
    if device.platform != "cpu":  # which has no units for 16 bits
        seconds = time.perf_counter() - start
        tokens = steps * batch_size * context
        print(f"{name}: {tokens / seconds:,.0f} tokens a second")
    return trained, rows


_, full_rows = train("float32")
trained, low_rows = train(dtype)
amp.watch.plot_history(full_rows + low_rows)

# %% [markdown]
# The loss curves lie on each other. The loss scale of float16 doubles until
# the gradients overflow. A cross is a step that was skipped for it: the scale
# halves, and training goes on. This is how the scale finds its place, and it
# goes on finding it while the model learns.

# %%
for row in full_rows[-1], low_rows[-1]:
    print(f"{row['run']}: final loss {row['loss']:.3f}")

# %% [markdown]
# ## What it has learned
#
# Autocast works for inference as well. The model writes 200 bytes. (The tiny
# one for a CPU knows little more than which letters go together.)


# %%
@jax.jit
def write(params, prompt, key):
    def write_byte(window, key):
        logits = amp.autocast(gpt, dtype)(params, window[None])[0, -1]
        byte = jax.random.categorical(key, logits / 0.7)
        return jnp.append(window[1:], byte), byte

    return jax.lax.scan(write_byte, prompt, jax.random.split(key, 200))[1]


written = write(trained, batch[0, :context], jax.random.key(0))
print(bytes(written.tolist()).decode(errors="replace"))

# %% [markdown]
# ## Where to go from here
#
# - [Mixed precision in ten minutes](mixed_precision_in_ten_minutes.ipynb):
#   why a loss scale, and why not cast by hand.
# - [Why is my loss NaN?](why_is_my_loss_nan.ipynb): what to do when a run
#   fails.
# - [Your framework](../frameworks/plain-jax.md): Flax, Equinox, Haiku, Keras.
# - [What autocast costs](../benchmarks/autocast_cost.md): bytes and memory of
#   larger models, compiled for an H200.

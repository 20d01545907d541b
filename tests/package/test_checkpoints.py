"""Every state of the package goes through the libraries that save pytrees, and comes back bit for bit."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")  # optax adds arrays of different ranks

PARAMS = {"w": jnp.full((64, 128), 0.3, jnp.bfloat16), "b": jnp.ones(3, jnp.float16), "f": jnp.ones(3)}
ADAM = optax.adam(1e-2)
STATES = {
    "dynamic_loss_scale": amp.dynamic_loss_scale(ADAM, nonfinite_leaves=True),
    "unscale_and_check": optax.chain(amp.unscale_and_check(), ADAM),
    "low_precision_params": amp.low_precision_params(ADAM),
    "remainder": amp.low_precision_params(ADAM, remainder=True),
    "masters=False": amp.low_precision_params(ADAM, masters=False, rounding="stochastic"),
    "float8": amp.low_precision_params(amp.low_precision_state(ADAM)),
    "bfloat16": amp.low_precision_params(amp.low_precision_state(ADAM, "bfloat16")),
    "all": amp.dynamic_loss_scale(
        amp.low_precision_params(amp.low_precision_state(ADAM, "bfloat16"), remainder=True), clip_global_norm=1.0
    ),
}


def orbax(state, like, folder):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def flax(state, like, folder):
    serialization = pytest.importorskip("flax.serialization")
    return serialization.from_bytes(like, serialization.to_bytes(state))


def safetensors(state, like, folder):
    """The format itself, a header in JSON and the bytes: arrays by the path of a leaf, each of at least one byte."""
    leaves = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(state)}
    header, start = {}, 0
    for path, x in leaves.items():
        header[path] = {
            "dtype": x.dtype.name,
            "shape": x.shape,
            "data_offsets": (start, start := start + x.nbytes),
        }
    text = json.dumps(header).encode()
    saved = struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for x in leaves.values())
    size = struct.unpack("<Q", saved[:8])[0]
    header, data = json.loads(saved[8 : 8 + size]), saved[8 + size :]

    def read(path, x):
        entry = header[jax.tree_util.keystr(path)]
        return jnp.asarray(np.frombuffer(data[slice(*entry["data_offsets"])], entry["dtype"]).reshape(entry["shape"]))

    return jax.tree.map_with_path(read, like)


LIBRARIES = [orbax, flax, safetensors]


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_saved_and_restored(name, tmp_path):
    tx = STATES[name]
    init, extra = jax.jit(tx.init), {"loss_scale": 8.0} if name == "unscale_and_check" else {}
    is_wrapped = name not in ("dynamic_loss_scale", "unscale_and_check")
    params = PARAMS if is_wrapped else jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
    _, state = tx.update(jax.tree.map(jnp.ones_like, params), init(params), params, **extra)
    assert all(x.size for x in jax.tree.leaves(state))
    for library in LIBRARIES:
        restored = library(state, init(params), tmp_path)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            assert x.dtype == y.dtype
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


FORMS = {"masters": False, "remainders": True}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("saved", FORMS)
def test_a_checkpoint_of_masters_is_none_of_remainders_nor_the_reverse(saved, library, tmp_path):
    forms = {name: amp.low_precision_params(ADAM, remainder=remainder) for name, remainder in FORMS.items()}
    state = forms.pop(saved).init(PARAMS)
    (tx,) = forms.values()
    with pytest.raises((ValueError, KeyError), match=r"masters|remainders"):
        library(state, tx.init(PARAMS), tmp_path)
    cast = state._replace(**{saved: jax.tree.map(lambda x: x.astype(jnp.float32), getattr(state, saved))})
    if saved == "remainders":
        with pytest.raises(ValueError, match=r"remainders of bfloat16 .* uint16, got float32; .*`with_float32`"):
            jax.jit(tx.update)(PARAMS, cast, PARAMS)


@pytest.mark.parametrize("library", [flax, safetensors])
@pytest.mark.parametrize("saved", ["float8", "bfloat16"])
def test_a_checkpoint_of_codes_is_none_of_bfloat16_nor_the_reverse(saved, library, tmp_path):
    params = {"w": jnp.full((64, 128), 0.3)}
    inner = optax.sgd(0.1, momentum=0.9)
    forms = {dtype: amp.low_precision_state(inner, dtype) for dtype in ("float8", "bfloat16")}
    tx = forms.pop(saved)
    _, state = tx.update(params, tx.init(params), params)
    (other,) = forms.values()
    like = other.init(params)
    # Orbax refuses a leaf of another shape, with reads that it never awaits. It leaves out one that should be None.
    (saved_formats,), (other_formats,) = state.formats.values(), like.formats.values()
    assert saved_formats.shape != other_formats.shape
    restored = library(state, like, tmp_path)  # in the form that was saved
    jax.tree.map(np.testing.assert_array_equal, restored.with_float32(), state.with_float32())


def test_an_old_checkpoint_of_remainders_is_found_before_the_first_step(tmp_path):
    forms = {name: amp.low_precision_params(ADAM, remainder=remainder) for name, remainder in FORMS.items()}
    full, halves = (amp.dynamic_loss_scale(tx) for tx in forms.values())
    updates, state = halves.update(jax.tree.map(jnp.ones_like, PARAMS), halves.init(PARAMS), PARAMS, loss_scale=1.0)
    params = optax.apply_updates(PARAMS, updates)
    # The only class of early versions.
    old = state._replace(inner_state=amp.LowPrecisionParamsState(*state.inner_state))
    restored = orbax(old, full.init(params), tmp_path)
    assert restored.inner_state.masters["w"].dtype == jnp.float32
    with pytest.raises(amp.LossScaleError, match="the masters of parameters in the state are their remainders"):
        amp.check_health(restored, params)

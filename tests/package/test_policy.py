import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from jmp_amp._formats import parse_dtype

F16, BF16, F32, F64 = (np.dtype(t) for t in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
F8 = np.dtype(jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("f16", F16),
        ("bf16", BF16),
        ("f32", F32),
        ("f64", F64),
        ("fp16", F16),
        ("fp32", F32),
        ("fp64", F64),
        ("float16", F16),
        ("bfloat16", BF16),
        ("float32", F32),
        ("float64", F64),
        ("full", F32),
        ("float8_e4m3fn", F8),
        (jnp.float16, F16),
        (jnp.bfloat16, BF16),
        (np.float16, F16),
        (np.half, F16),
        (np.dtype("float32"), F32),
        (np.dtype(">f4"), F32),
        (np.dtype("bfloat16"), BF16),
        (jnp.float8_e4m3fn, F8),
        (float, F64),
    ],
)
def test_parse_dtype_reads_names_and_dtype_likes(value, dtype):
    parsed = parse_dtype(value)
    assert isinstance(parsed, np.dtype)
    assert parsed == dtype
    assert parsed.isnative


@pytest.mark.parametrize(("backend", "dtype"), [("tpu", BF16), ("cpu", F16), ("gpu", F16)])
def test_half_is_the_16_bit_dtype_of_the_backend(monkeypatch, backend, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert parse_dtype("half") == dtype
    assert amp.get_policy("half") == amp.Policy(dtype, dtype, dtype)


def test_numpys_float16_is_never_taken_for_the_string_half(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert parse_dtype(np.dtype("float16")) == F16


@pytest.mark.parametrize("value", ["int32", "f8", "f2", "float128", "complex64", "floating", "F16", "key", ""])
def test_parse_dtype_rejects_strings_that_name_no_floating_dtype(value):
    with pytest.raises(ValueError, match=rf"`compute_dtype` must be .* got `{value}`; allowed: `f16`, .*`full`"):
        parse_dtype(value, "compute_dtype")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (jnp.int32, "int32"),
        (np.dtype("bool"), "bool"),
        (jnp.complex64, "complex64"),
        (np.longdouble, np.dtype(np.longdouble).name),
        (np.dtype([("x", "f4")]), "void32"),
    ],
)
def test_parse_dtype_rejects_dtypes_that_are_not_floating(value, name):
    with pytest.raises(ValueError, match=rf"`dtype` must be .* got `{name}`; allowed: `f16`, .*`full`"):
        parse_dtype(value)


@pytest.mark.parametrize("value", [None, 16, object(), [1], jnp.floating, jax.random.key(0).dtype])
def test_parse_dtype_rejects_values_that_are_no_dtype(value):
    with pytest.raises(TypeError, match=r"`dtype` must be .* of type `\w+`; allowed: .*`jnp.float16`.*`f16`") as info:
        parse_dtype(value)
    assert f"got `{value!r}`" in str(info.value)


def test_policy_normalises_every_dtype():
    policy = amp.Policy("f32", jnp.float16, np.dtype("bfloat16"))
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == (F32, F16, BF16)
    assert all(isinstance(getattr(policy, f.name), np.dtype) for f in dataclasses.fields(policy)[:3])


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
def test_policy_names_the_field_that_is_wrong(field):
    good = {"param_dtype": "f32", "compute_dtype": "f16", "output_dtype": "f32"}
    with pytest.raises(ValueError, match=rf"`{field}` must be a floating dtype, got `int8`"):
        amp.Policy(**(good | {field: "int8"}))
    with pytest.raises(TypeError, match=rf"`{field}` must be a floating dtype, got `None`"):
        amp.Policy(**(good | {field: None}))


def test_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        amp.get_policy("O1").compute_dtype = F32


def test_equal_policies_are_equal_keys_however_they_were_written():
    a, b = amp.Policy("f32", "f16", "f32"), amp.Policy(jnp.float32, np.float16, np.dtype(">f4"))
    assert {a: "found"}[b] == "found"
    assert a != amp.Policy("f32", "bf16", "f32")


def test_policy_survives_pickling():
    policy = amp.Policy("f32", "bf16", F8)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_policy_can_be_a_static_argument_of_jit():
    cast = jax.jit(lambda policy, x: policy.cast_to_compute(x), static_argnums=0)
    assert cast(amp.get_policy("O1"), jnp.ones(2)).dtype == F16


def test_str_spells_the_three_dtypes_in_full():
    assert str(amp.Policy("f32", "f16", "bf16")) == "params=float32,compute=float16,output=bfloat16"


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64, F8], ids=str)
@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
def test_str_parses_back(field, dtype):
    policy = dataclasses.replace(amp.get_policy("O1"), **{field: dtype})
    assert amp.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("method", "dtype"), [("cast_to_param", F32), ("cast_to_compute", F16), ("cast_to_output", BF16)]
)
def test_cast_methods_cast_floating_leaves_to_their_own_dtype(method, dtype):
    tree = {"w": jnp.full((2, 3), 0.5, jnp.float8_e4m3fn), "n": jnp.arange(2), "none": None, "name": "x"}
    cast = getattr(amp.Policy("f32", "f16", "bf16"), method)(tree)
    assert cast["w"].dtype == dtype
    assert jnp.array_equal(cast["w"], jnp.full((2, 3), 0.5, dtype))
    assert all(cast[name] is tree[name] for name in ("n", "none", "name"))


def test_with_output_dtype_changes_only_the_output():
    policy = amp.Policy("f32", "f16", "f32")
    assert policy.with_output_dtype("bf16") == amp.Policy("f32", "f16", "bf16")
    assert policy == amp.Policy("f32", "f16", "f32")


def test_with_output_dtype_names_the_field_that_is_wrong():
    with pytest.raises(ValueError, match=r"`output_dtype` must be a floating dtype, got `int32`"):
        amp.get_policy("O1").with_output_dtype(jnp.int32)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("params=float32,compute=float16,output=float32", (F32, F16, F32)),
        ("p=f32,c=f16,o=bf16", (F32, F16, BF16)),
        ("o=f32,p=bf16,compute=f16", (BF16, F16, F32)),
        ("c=f16", (F32, F16, F16)),
        ("p=f16", (F16, F16, F16)),
        ("o=f16", (F32, F32, F16)),
        ("p=f16,c=bf16", (F16, BF16, BF16)),
        ("p=f64,o=f32", (F64, F64, F32)),
        ("c=f16,o=full", (F32, F16, F32)),
        (" p = f32 ,\tc = f16 , o= f32\n", (F32, F16, F32)),
        ("f64", (F64, F64, F64)),
        ("bf16", (BF16, BF16, BF16)),
        ("full", (F32, F32, F32)),
        ("float8_e4m3fn", (F8, F8, F8)),
        ("mixed_float16", (F32, F16, F32)),
        ("mixed_bfloat16", (F32, BF16, F32)),
        ("float32", (F32, F32, F32)),
        ("float16", (F16, F16, F16)),
        ("bfloat16", (BF16, BF16, BF16)),
        ("O0", (F32, F32, F32)),
        ("O1", (F32, F16, F32)),
        ("O2", (F16, F16, F32)),
        ("O3", (F16, F16, F16)),
        (" O2 ", (F16, F16, F32)),
    ],
)
def test_get_policy_reads_jmps_grammar_and_the_named_policies(name, dtypes):
    assert amp.get_policy(name) == amp.Policy(*dtypes)


def test_get_policy_hands_a_policy_back():
    policy = amp.Policy("f32", "f16", "f32")
    assert amp.get_policy(policy) is policy


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("params=f32,comput=f16", "unknown key `comput` in `comput=f16`"),
        ("params=f32,compute=int32", "unknown dtype `int32` in `compute=int32`"),
        ("c=f16=f32", "unknown dtype `f16=f32` in `c=f16=f32`"),
        ("c=", "unknown dtype `` in `c=`"),
        ("p=f32,f16", "no `=` in `f16`"),
        ("p=f32,", "no `=` in ``"),
        ("p=f32,c", "no `=` in `c`"),
        ("p=f32, f16 ,o=f32", "no `=` in `f16`"),
        ("p=f32,c=f16,params=f16", "`params` given twice in `params=f16`"),
        ("mixed_float4", "unknown dtype `mixed_float4` in `mixed_float4`"),
        ("o1", "unknown dtype `o1` in `o1`"),
        ("", "unknown dtype `` in ``"),
    ],
)
def test_get_policy_names_the_bad_part_and_lists_what_is_allowed(name, fact):
    with pytest.raises(ValueError, match="of the policy") as info:
        amp.get_policy(name)
    message = str(info.value)
    assert f"{fact} of the policy `{name}`" in message
    allowed = "params= compute= output= `p` `f16` `fp16` `bf16` `float64` `half` `full` `mixed_bfloat16` `O0` `O3`"
    assert not [word for word in allowed.split() if word not in message]


@pytest.mark.parametrize("name", [None, 16, jnp.float16])
def test_get_policy_rejects_what_is_no_string(name):
    with pytest.raises(
        TypeError, match=r"a policy must be a string or a `Policy`, got .* of type `\w+`; .*`Policy\(\.\.\.\)`"
    ):
        amp.get_policy(name)

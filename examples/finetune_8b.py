"""Fine-tune all parameters of a Llama of any size; 8 billion of them on one 80 GB GPU.

    export XLA_PYTHON_CLIENT_MEM_FRACTION=.92                    # JAX takes 75% of the memory by default
    python examples/finetune_8b.py --config llama3_8b --steps 60                    # random weights: a dry run
    python examples/finetune_8b.py --config DIR/config.json --weights DIR --tokenizer DIR/tokenizer.json --text FILE...
    python examples/finetune_8b.py --config llama3_8b --plan H100                   # compiles; needs no GPU
    python examples/finetune_8b.py --config tiny --steps 20 --context 128           # on a CPU

DIR holds a model as Hugging Face does: `config.json`, `tokenizer.json` and `*.safetensors`. Parameters are bfloat16; 16
more bits complete each to float32, and the two moments of AdamW have 8 bits: 6 bytes a parameter, and 2 for gradients.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Llama:
    """The fields of Hugging Face's `config.json` that decide the shapes."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int = 128256
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def shapes(self) -> Params:
        """The shapes of the parameters; those of the layers are stacked, for `lax.scan`."""
        d, kv = self.hidden_size, self.hidden_size // self.num_attention_heads * self.num_key_value_heads
        layer = {"input_layernorm": (d,), "q_proj": (d, d), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (d, d)}
        layer |= {"post_attention_layernorm": (d,), "gate_proj": (d, self.intermediate_size)}
        layer |= {"up_proj": (d, self.intermediate_size), "down_proj": (self.intermediate_size, d)}
        layers = {name: (self.num_hidden_layers, *shape) for name, shape in layer.items()}
        head = {} if self.tie_word_embeddings else {"lm_head": (d, self.vocab_size)}
        return {"embed_tokens": (self.vocab_size, d), "layers": layers, "norm": (d,), **head}


CONFIGS = {
    "tiny": Llama(2, 64, 4, 2, 192, 256),
    "small": Llama(12, 768, 12, 4, 2048, 32000),
    "llama3_1b": Llama(16, 2048, 32, 8, 8192, tie_word_embeddings=True),
    "llama3_3b": Llama(28, 3072, 24, 8, 8192, tie_word_embeddings=True),
    "llama3_8b": Llama(32, 4096, 32, 8, 14336),
    "llama2_13b": Llama(40, 5120, 40, 40, 13824, 32000, 10000.0),
    "llama3_70b": Llama(80, 8192, 64, 8, 28672),
}
STATES = {  # what holds the state of an optimizer of float32 parameters, for bfloat16 ones
    "float8": lambda tx: amp.low_precision_params(amp.low_precision_state(tx), remainder=True),
    "bfloat16": lambda tx: amp.low_precision_params(amp.low_precision_state(tx, "bfloat16"), remainder=True),
    "float32": lambda tx: amp.low_precision_params(tx, remainder=True),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="tiny", help=f"{', '.join(CONFIGS)}, or a config.json")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1, help="sequences a step on each device")
    parser.add_argument("--context", type=int, default=4096, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--state", choices=list(STATES), default="float8", help="how the moments of AdamW are held")
    parser.add_argument("--attention", choices=["cudnn"], help="run attention in one kernel of the GPU")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="default: Python's standard library")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; without one, tokens are bytes")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="with *.safetensors; default: random weights")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="where to save at the end")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="save in between, too")
    parser.add_argument("--resume", action="store_true", help="go on from the last step in the checkpoint")
    parser.add_argument("--plan", metavar="GPU", help="compile for this GPU, print the memory, and stop")
    parser.add_argument("--devices", type=int, default=1, help="how many GPUs to plan for")
    options = parser.parse_args(argv)
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint DIR")
    return options


def read_config(name: str) -> Llama:
    if name in CONFIGS:
        return CONFIGS[name]
    fields = {field.name for field in dataclasses.fields(Llama)}
    return Llama(**{key: value for key, value in json.loads(Path(name).read_text()).items() if key in fields})


def norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotate(x: jax.Array, theta: float) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def make_loss(config: Llama, mesh: Mesh, attention: str | None) -> Any:
    spread = NamedSharding(mesh, P("data"))
    remat = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)

    @remat
    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        h = norm(x, p["input_layernorm"], config.rms_norm_eps)
        q, k, v = (
            (h @ p[n]).reshape(*x.shape[:2], -1, config.hidden_size // config.num_attention_heads)
            for n in ("q_proj", "k_proj", "v_proj")
        )
        q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["o_proj"]
        h = norm(x, p["post_attention_layernorm"], config.rms_norm_eps)
        x = x + (jax.nn.silu(h @ p["gate_proj"]) * (h @ p["up_proj"])) @ p["down_proj"]
        return lax.with_sharding_constraint(x, spread), None

    def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
        x = lax.with_sharding_constraint(params["embed_tokens"][tokens[:, :-1]], spread)
        x, _ = lax.scan(layer, x, params["layers"])
        x = norm(x, params["norm"], config.rms_norm_eps)
        head = params["embed_tokens"].T if config.tie_word_embeddings else params["lm_head"]

        @remat
        def part(total: jax.Array, xy: Any) -> tuple[jax.Array, None]:  # logits of all tokens would take gigabytes
            x, y = xy
            return total + optax.softmax_cross_entropy_with_integer_labels(x @ head, y).sum(), None

        parts = max(n for n in range(1, 9) if x.shape[1] % n == 0)
        xs = jnp.moveaxis(x.reshape(len(x), parts, -1, x.shape[-1]), 1, 0)
        ys = jnp.moveaxis(tokens[:, 1:].reshape(len(x), parts, -1), 1, 0)
        return lax.scan(part, jnp.float32(0), (xs, ys))[0] / tokens[:, 1:].size

    policy = "params=bfloat16,compute=bfloat16,output=float32"
    return amp.autocast(loss_fn, policy, attention=attention)


def make_step(loss_fn: Any, tx: optax.GradientTransformation) -> Any:
    def step(params: Params, opt_state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def placed(mesh: Mesh, tree: Any) -> Any:
    """Shapes with shardings: matrices are split along the axis before the last one, along which scales lie."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        split = x.ndim > 1 and x.shape[-2] % mesh.size == 0
        sharding = NamedSharding(mesh, P(*[None] * (x.ndim - 2), "data", None) if split else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def peak(compiled: Any) -> int:
    """The bytes that a compiled step needs on each device."""
    sizes = compiled.memory_analysis()
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return kept + sizes.temp_size_in_bytes


def random_weights(shapes: Params) -> Params:
    """Makes each leaf on the devices, a layer at a time: no copy in float32, and none on the host."""

    def make(path: Any, x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if "norm" in jax.tree_util.keystr(path):
            return jnp.ones(x.shape, x.dtype)
        draw = functools.partial(jax.random.normal, shape=x.shape[-2:], dtype=x.dtype)
        return 0.02 * (draw(key) if x.ndim == 2 else lax.map(draw, jax.random.split(key, len(x))))

    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    makers = [jax.jit(functools.partial(make, path, x), out_shardings=x.sharding) for path, x in leaves]
    return tree.unflatten([maker(key) for maker, key in zip(makers, keys, strict=True)])


def read_weights(folder: Path, shapes: Params) -> Params:
    """Reads the `*.safetensors` of Hugging Face, in which products are `x @ w.T` and each layer has its own tensors."""
    tensors, dtypes = {}, {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = np.memmap(path, np.uint8, "r", file.tell())
        for name, tensor in header.items():
            if name != "__metadata__":
                part = data[slice(*tensor["data_offsets"])]
                tensors[name] = part.view(dtypes[tensor["dtype"]]).reshape(tensor["shape"])

    def read(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        *layers, name = (key.key for key in path)
        if layers:
            block = "mlp." if name in ("gate_proj", "up_proj", "down_proj") else "self_attn." if "proj" in name else ""
            found = [tensors[f"model.layers.{i}.{block}{name}.weight"].T for i in range(len(x))]
        else:
            found = tensors[f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"]
            found = found.T if name == "lm_head" else found
        return jax.device_put(np.asarray(found, x.dtype).reshape(x.shape), x.sharding)

    return jax.tree_util.tree_map_with_path(read, shapes)


def batches(options: argparse.Namespace, size: int) -> Iterator[np.ndarray]:
    """Streams the files, over and over, as tokens i32[size, context + 1]: bytes, if there is no tokenizer."""
    tokenizer = options.tokenizer and importlib.import_module("tokenizers").Tokenizer.from_file(options.tokenizer)
    tokens, length = np.zeros(0, np.int32), size * options.context
    places = options.context * np.arange(size)[:, None] + np.arange(options.context + 1)
    for path in itertools.cycle(options.text or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        with path.open("rb") as file:
            while text := file.read(2**20):
                new = (
                    tokenizer.encode(text.decode(errors="replace")).ids if tokenizer else np.frombuffer(text, np.uint8)
                )
                tokens = np.concatenate([tokens, np.asarray(new, np.int32)])
                while len(tokens) > length:
                    yield tokens[places]
                    tokens = tokens[length:]


def checkpoints(options: argparse.Namespace) -> tuple[Any, Any, int]:
    """Returns functions that save and restore, and the last step that was saved."""
    if not options.checkpoint:
        return lambda step, state: None, None, 0
    ocp = importlib.import_module("orbax.checkpoint")
    manager = ocp.CheckpointManager(options.checkpoint.absolute())
    done = manager.latest_step() or 0
    if options.resume != (done > 0):
        raise SystemExit(f"--resume: there is {'a' if done else 'no'} step in {options.checkpoint}")

    def save(step: int, state: Any) -> None:
        manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()

    return save, lambda shapes: manager.restore(done, args=ocp.args.StandardRestore(shapes)), done


def compile_step(options: argparse.Namespace, config: Llama, mesh: Mesh, compile_for: Any) -> tuple[Any, Any, Any]:
    """Returns the compiled step, after a line about its memory, and the shapes of parameters and optimizer state."""
    tx = STATES[options.state](optax.adamw(options.lr, b2=0.95))
    weights = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), config.shapes(), is_leaf=lambda x: isinstance(x, tuple)
    )
    shapes = placed(mesh, (weights, jax.eval_shape(tx.init, weights)))
    spread, size = NamedSharding(mesh, P("data")), options.batch * mesh.size
    tokens = jax.ShapeDtypeStruct((size, options.context + 1), jnp.int32, sharding=spread)
    kept = jax.tree.map(lambda x: x.sharding, shapes)
    step = make_step(make_loss(config, mesh, options.attention), tx)
    start = time.perf_counter()
    everywhere = NamedSharding(mesh, P())
    compiled = compile_for(step, *shapes, tokens, donate_argnums=(0, 1), out_shardings=(*kept, everywhere))
    n = sum(x.size for x in jax.tree.leaves(weights))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) / n
    print(
        f"{n / 1e9:.2f} B parameters, {held:.2f} bytes each with the optimizer state; compiled in "
        f"{time.perf_counter() - start:.0f} s: {peak(compiled) / 1e9:.2f} GB on each of {mesh.size} devices",
        flush=True,
    )
    return compiled, shapes, tx


def train(options: argparse.Namespace, config: Llama) -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    spread, size = NamedSharding(mesh, P("data")), options.batch * mesh.size
    step_fn, shapes, tx = compile_step(
        options, config, mesh, lambda f, *args, **how: jax.jit(f, **how).lower(*args).compile()
    )
    save, restore, done = checkpoints(options)
    if options.resume:
        params, opt_state = restore(shapes)
    else:
        params = read_weights(options.weights, shapes[0]) if options.weights else random_weights(shapes[0])
        opt_state = jax.jit(tx.init, out_shardings=jax.tree.map(lambda x: x.sharding, shapes[1]))(params)
    losses, start = [], 0.0
    for step, tokens in enumerate(itertools.islice(batches(options, size), done, options.steps), done + 1):
        params, opt_state, loss = step_fn(params, opt_state, jax.device_put(tokens, spread))
        losses.append(loss)
        if step % 10 == 0 or step in (done + 1, options.steps):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        start = start or time.perf_counter()
        if step == options.steps or (options.save_every and step % options.save_every == 0):
            save(step, (params, opt_state))
    speed = (len(losses) - 1) / (time.perf_counter() - start)
    measured = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    print(f"{speed:.3f} steps/s, {speed * size * options.context:.0f} tokens/s, last loss {losses[-1].item():.4f}")
    print(f"peak memory of a device: {measured / 1e9:.2f} GB, planned {peak(step_fn) / 1e9:.2f} GB")
    return {"losses": jax.device_get(losses), "plan": peak(step_fn), "measured": measured, "params": params}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(argv)
    config = read_config(options.config)
    if not options.plan:
        return train(options, config)
    sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
    gpu_aot = importlib.import_module("gpu_aot")
    compiled, *_ = compile_step(options, config, gpu_aot.mesh(options.plan, options.devices), gpu_aot.compile_for)
    print(f"{options.plan}: {gpu_aot.GPUS[options.plan].memory / 1e9:.2f} GB")
    return {"plan": peak(compiled)}


if __name__ == "__main__":
    main()

"""What is measured on a GPU, with tiny models on any machine: what is kept and written, not how long it takes."""

import importlib.util
import json
import pathlib
import re
import shutil

import gpu
import gpu_entry
import jax
import jax.numpy as jnp
import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
STEP = "GPT-2 small, vocabulary 50257: bfloat16"
KERNELS = 'Kernels by kind: bfloat16, attention="cudnn", residual_stream="low"'
CHECK, MOSAIC = (f'Check alone, 16 leaves: implementation="{name}"' for name in ("xla", "mosaic_gpu"))
TORCH = "GPT of width 2048: torch, bfloat16, compiled"


@pytest.fixture(scope="module")
def write_gpu():
    spec = importlib.util.spec_from_file_location("write_gpu", DOCS / "write_gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(folder, pattern):
    return {file.relative_to(folder): file.read_text() for file in folder.rglob(pattern)}


@pytest.mark.slow
def test_a_second_call_measures_what_the_first_did_not(tmp_path, monkeypatch, capsys, write_gpu):
    """An entry of the first call is killed when it is its turn, one has no torch, and one no GPU."""
    figures, docs = tmp_path / "figures", tmp_path / "docs"
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    killed = []

    class Killing(gpu.Processes):
        def alone(self, process):
            if "time_kernels" in process.args[-1] and not killed:
                killed.append(process)
                process.kill()
                process.wait()
            return super().alone(process)

    def records():
        return json.loads((figures / "cpu-tiny-models.json").read_text())

    monkeypatch.setattr(gpu, "Processes", Killing)
    entries = [entry for entry in gpu.ENTRIES if entry.name in (STEP, KERNELS, CHECK, MOSAIC, TORCH)]
    assert not gpu.measure(entries, figures, 10, tiny=True, dry_run=False)
    first = records()
    assert {name for name, record in first.items() if "rows" in record} == {STEP, CHECK}
    assert first[KERNELS]["error"] == "killed, or not done in time"
    assert first[MOSAIC]["error"].startswith("NotImplementedError")
    assert f"{TORCH}: skipped, No module named torch" in capsys.readouterr().out

    assert not gpu.measure(entries, figures, 10, tiny=True, dry_run=False)
    second = records()
    assert {name: second[name] for name in (STEP, CHECK)} == {name: first[name] for name in (STEP, CHECK)}
    assert sum(second[KERNELS]["rows"][KERNELS.partition(": ")[2]].values()) > 0
    assert f"{STEP}: " not in capsys.readouterr().out

    shutil.copytree(DOCS / "benchmarks", docs)
    as_they_are = texts(docs, "*.md")
    write_gpu.write(figures, docs)
    written = texts(docs, "*.md")
    assert "| bfloat16 |" in written[pathlib.Path("gpu_training.md")].split("cpu, tiny models")[0]
    assert written != as_they_are
    write_gpu.write(figures, docs)
    assert texts(docs, "*.md") == written


@pytest.mark.parametrize("needed", [2, 0])
def test_what_is_not_started_or_not_done_when_the_time_is_over_has_not_failed(needed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "NEEDED", needed)
    entries = [entry for entry in gpu.ENTRIES if entry.table == "ResNet-50"]
    assert gpu.measure(entries, tmp_path, 1 / 60, tiny=True, dry_run=False)
    assert f"0 of {len(entries)} entries" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def record(table, rows, **about):
    found = {"device": "NVIDIA H200", "driver": "580", "JAX": "0.11.2", "commit": "abc", "date": "2026-01-02"}
    return {"table": table, "rows": rows} | found | about


def test_each_table_is_of_one_gpu_and_one_commit_and_says_which():
    table, first, second, third = "GPT-2 small, vocabulary 50257", *(entry.row for entry in gpu.ENTRIES[:3])
    steps = {name: {"ms a step": ms, "peak GB": 5.0} for name, ms in {first: 19.0, second: 20.0, third: 18.0}.items()}
    files = [
        {
            f"{table}: {second}": record(table, {second: steps[second]}),
            f"{table}: {first}": record(table, {first: steps[first]}),
            f"{table}: {third}": record(table, {third: steps[third]}, commit="def"),
            "failed": {"table": table, "error": "killed"},
        },
        {f"{table}: {first}": record(table, {first: steps[first]}, device="NVIDIA H100")},
    ]
    lines = list(gpu.all_tables(files))
    assert lines[:5] == [
        f"| {table} | ms a step | peak GB | x torch |",
        "|---|---|---|---|",
        f"| {first} | 19.00 | 5.000 | 0.9500 |",
        f"| {second} | 20.00 | 5.000 | 1.000 |",
        "",
    ]
    captions = [line for line in lines if line.startswith("On one ")]
    assert captions[0] == (
        "On one NVIDIA H200 with driver 580, JAX 0.11.2, commit abc, by `benchmarks/gpu.py`, 2026-01-02."
    )
    assert [(words := line.split())[3] + words[10] for line in captions] == ["H200abc,", "H100abc,", "H200def,"]
    assert f"| {third} | 18.00 | 5.000 | 1.000 |" in lines  # with graphs; no ratio to a time of another commit
    assert not list(gpu.all_tables(files, "ResNet"))


def test_some_tables_have_a_column_for_each_row():
    table = "10 million tokens"
    runs = {name: record(table, {name: {"step 0": 10.5, "skipped steps": 0}}) for name in ("default", "low")}
    assert list(gpu.all_tables([runs]))[:4] == [
        f"| {table} | default | low |",
        "|---|---|---|",
        "| step 0 | 10.50 | 10.50 |",
        "| skipped steps | 0 | 0 |",
    ]


def test_each_table_has_a_place_and_a_page_without_figures_stays(tmp_path, write_gpu):
    places = [name for text in texts(DOCS, "*.md").values() for _, name, _ in write_gpu.MARKED.findall(text)]
    tables = {entry.table for entry in gpu.ENTRIES}
    found = {place: {table for table in tables if re.match(place, table)} for place in places}
    assert all(found.values())
    assert set().union(*found.values()) == tables

    page = tmp_path / "page.md"
    page.write_text("<!-- gpu: ResNet-50 -->\nold\n<!-- /gpu -->\n<!-- gpu: ViT -->\nold\n<!-- /gpu -->\n")
    (tmp_path / "H200.json").write_text(
        json.dumps({"ResNet-50": record("ResNet-50", {"float32": {"ms a step": 13.0}})})
    )
    write_gpu.write(tmp_path, tmp_path)
    resnet, vit = page.read_text().split("<!-- gpu: ViT -->")
    assert "| float32 | 13.00 | 1.000 |" in resnet
    assert "old" not in resnet
    assert vit == "\nold\n<!-- /gpu -->\n"


def test_entries_have_names_of_their_own():
    names = [entry.name for entry in gpu.ENTRIES]
    assert len(set(names)) == len(names)


class Traced(gpu_entry.Process):
    def compiled(self, *programs):
        for fun, args, _ in programs:
            jax.eval_shape(fun, *args)
        raise gpu_entry.Built


@pytest.fixture
def precision_of_products():
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.sweep(9)
@pytest.mark.usefixtures("users_code", "precision_of_products")
@pytest.mark.filterwarnings("ignore:.* refuses attention", "ignore:.* has no float8 units")
@pytest.mark.parametrize("entry", [x for x in gpu.ENTRIES if "library" not in x.options], ids=lambda entry: entry.name)
def test_each_entry_has_programs(entry):
    process = Traced(dry_run=True, tiny=True, wait_for_turn=None)
    sizes = entry.sizes | gpu.TINY[entry.case]
    with pytest.raises(gpu_entry.Built):
        getattr(gpu_entry, entry.measure)(process, row=entry.row, case=entry.case, sizes=sizes, **entry.options)


def scaled_norm(x):
    return jnp.sum(jnp.tanh(x) ** 2)


def test_kernels_are_known_by_the_function_whose_line_they_come_from():
    sources = gpu_entry.sources_of(jax.jit(scaled_norm).lower(jnp.ones((64, 64))).compile().as_text())
    assert any("scaled_norm" in source and __file__ in source for source in sources.values())


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT", "products"),
        ('gemm_fusion_dot_62 jit(step)/jvp()/dot_general "models.py" "attention"', "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("triton_per_fused__to_copy_add_native_layer_norm_backward_view_7", "norms"),
        ('fusion_478 jit(step)/jvp()/add "models.py" "norm"', "norms"),
        ("triton_red_fused__log_softmax_mm_prepare_softmax_online_18", "loss"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::", "optimizer"),
        ('loop_add_select_fusion_18 jit(step)/cond "models.py" "train_step.<locals>.step"', "optimizer"),
        (
            'input_reduce_fusion_2 jit(step)/reduce_sum "pallas_kernels/reference.py" "_one_by_one"',
            "check of gradients",
        ),
        ('wrapped_convert_3 jit(step)/jvp()/convert_element_type "models.py" "dense"', "casts, copies"),
        ('input_reduce_fusion_4 jit(step)/transpose(jvp())/reduce_sum "models.py" "dense"', "biases and their sums"),
        ("fusion_1 ", "other"),
    ],
)
def test_kernels_have_kinds(kernel, kind):
    assert gpu_entry.kind_of(kernel) == kind

"""`attention="cudnn"` of a GPT compiled for an H200, beside a model that calls cuDNN, and beside the model alone."""

import functools

import gpu_aot
import jax
import models
import pytest

import jmp_amp as amp

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("users_code")]


def cost(case, **options):
    loss_fn, shapes = case(None)
    fun = jax.value_and_grad(amp.autocast(loss_fn, "float16", **options))
    compiled = gpu_aot.compile_for(fun, *gpu_aot.struct(gpu_aot.h200_mesh(), shapes))
    return gpu_aot.cost(compiled), compiled.as_text()


def test_an_unchanged_model_compiles_to_the_program_of_a_model_that_calls_the_kernel(cudnn):
    small = functools.partial(models.gpt_case, layers=1, batch=1, length=256, dim=128, heads=2, vocab=256)
    unchanged, text = cost(small, attention="cudnn")
    decorated, _ = cost(functools.partial(small, kernel=models.fused_attention("cudnn", "float16")))
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax') >= 2
    assert unchanged == decorated


@pytest.mark.slow  # compiles GPT-2 small twice
# Scanned, most of the memory are the logits and their gradient, which is not written over padded logits.
@pytest.mark.parametrize(("scan", "memory"), [(False, 0.51), (True, 0.56)])
def test_gpt_2_moves_half_of_the_bytes_and_needs_half_of_the_memory(scan, memory, cudnn):
    case = functools.partial(models.gpt_case, scan=scan)
    with_kernel, _ = cost(case, attention="cudnn")
    as_written, _ = cost(case)
    assert with_kernel["bytes_moved"] <= 0.55 * as_written["bytes_moved"]
    assert with_kernel["temp_bytes"] <= memory * as_written["temp_bytes"]


@pytest.mark.slow  # compiles GPT-2 small twice
def test_the_gradient_of_logits_needs_memory_of_its_own_only_if_they_are_padded(cudnn):
    padded, aligned = (
        cost(functools.partial(models.gpt_case, scan=True, vocab=vocab), attention="cudnn")[0]["temp_bytes"]
        for vocab in (50257, 50304)
    )
    assert 0.8 * 8 * 1024 * 50304 * 2 < padded - aligned < 8 * 1024 * 50304 * 2

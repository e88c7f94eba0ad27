# SPDX-License-Identifier: Apache-2.0
"""Ops of language models on the kernels of the device: all samples of their specs, and what they refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ipex_kernels import FLOATS, raises_as_on_the_host, run

from ipex_core.library.kernels import specs
from ipex_core.ops.kv_cache import QUANTIZED
from ipex_core.ops.woq_weight import woq_weight

pytestmark = pytest.mark.usefixtures("always")

NAMES = (
    "causal_conv1d_varlen",
    "gated_delta_rule",
    "moe_routing",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rotary_embedding_and_cache",
    "rotary_embedding_batched",
    "rotary_embedding_table",
    "sample_token",
    "sample_token_seeded",
    "selective_scan_varlen",
    "ssd_scan",
    "wkv_scan",
)
#: Samples of `fused_experts` whose weights are quantized.
QUANTIZED_EXPERTS = ("int8_", "int4_", "fp4_", "nf4_", "quantized_", "relu2_int")


def same(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float, id: str) -> None:
    actual = actual.cpu()
    if expected.dtype.itemsize == 1 and expected.dtype.is_floating_point:
        actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{id}: {text}"
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, dtype: torch.dtype) -> None:
    spec = specs()[name]
    for sample in spec.samples(dtype):
        expected = run(name, sample, "cpu")
        for actual, wanted in zip(run(name, sample, "xpu"), expected, strict=True):
            assert actual.stride() == wanted.stride(), sample.id
            rtol, atol = spec.tolerance.get(wanted.dtype, (0.0, 0.0))
            same(actual, wanted, rtol, atol, str(sample.id))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "name", ["decode_attention", "flash_attn_varlen_func", "single_query_cached_kv_attention"]
)
def test_attention_to_quantized_caches(name: str, dtype: torch.dtype) -> None:
    spec = specs()[name]
    rtol, atol = spec.tolerance[dtype]
    samples = [
        s
        for s in spec.samples(dtype)
        if any(isinstance(x, torch.Tensor) and x.dtype in QUANTIZED for x in s.args)
    ]
    assert len(samples) >= 3
    for sample in samples:
        expected = run(name, sample, "cpu")
        for one, wanted in zip(run(name, sample, "xpu"), expected, strict=True):
            same(one, wanted, 2 * rtol, 2 * atol, str(sample.id))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_layers_on_packed_weights(dtype: torch.dtype) -> None:
    spec = specs()["woq_linear"]
    rtol, atol = spec.tolerance[dtype]
    for sample in spec.samples(dtype):
        if "lowp_mode" in sample.kwargs or len(sample.args) > 9:
            continue  # integer products: the definition
        expected = run("woq_linear", sample, "cpu")
        for one, wanted in zip(run("woq_linear", sample, "xpu"), expected, strict=True):
            same(one, wanted, 2 * rtol, 2 * atol, str(sample.id))


def test_every_format_of_weights() -> None:
    for format in ("int8", "int4", "nf4", "fp4", "fp8_e4m3", "fp8_e5m2"):
        for group in (-1, 32):
            weight = woq_weight(48, 96, format, group)
            for rows in (1, 11):
                x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
                expected = torch.ops.ipex.woq_linear(x, weight, 48)
                actual = torch.ops.ipex.woq_linear(x.to("xpu"), weight.to("xpu"), 48)
                same(actual, expected, 1e-4, 1e-4, f"{format} {group} {rows}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_experts_with_quantized_weights(dtype: torch.dtype) -> None:
    spec = specs()["fused_experts"]
    rtol, atol = spec.tolerance[dtype]
    samples = [s for s in spec.samples(dtype) if str(s.id).startswith(QUANTIZED_EXPERTS)]
    assert len(samples) >= 12
    for sample in samples:
        expected = run("fused_experts", sample, "cpu")
        for one, wanted in zip(run("fused_experts", sample, "xpu"), expected, strict=True):
            same(one, wanted, 2 * rtol, 2 * atol, str(sample.id))


def test_the_last_of_several_tokens_of_a_slot_stays() -> None:
    key = torch.arange(6.0).view(6, 1, 1).expand(6, 2, 4).contiguous()
    slots = torch.tensor([3, 5, 3, -1, 5, 3])
    caches = []
    for device in ("cpu", "xpu"):
        cache = torch.zeros(2, 2, 4, 4, device=device)
        other = torch.zeros_like(cache)
        torch.ops.ipex.reshape_and_cache(
            key.to(device), -key.to(device), cache, other, slots.to(device)
        )
        caches.append((cache.cpu(), other.cpu()))
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])
    assert caches[1][0][0, 0, 3, 0] == 5
    assert caches[1][0][1, 0, 1, 0] == 4


def _cache_arguments() -> list[Any]:
    return [
        torch.ones(3, 2, 8),
        torch.ones(3, 2, 8),
        torch.zeros(4, 2, 16, 8),
        torch.zeros(4, 2, 16, 8),
        torch.tensor([0, 1, 2]),
    ]


def _changed(arguments: list[Any], index: int, value: Any) -> list[Any]:
    return [*arguments[:index], value, *arguments[index + 1 :]]


def _bad_calls() -> dict[str, Callable[[], tuple[Any, ...]]]:
    cache, logits = _cache_arguments(), torch.randn(2, 7)
    half = torch.full((2,), 0.5)
    table = torch.rand(12, 8)
    rotary: list[Any] = [torch.tensor([3, 0]), torch.ones(2, 16), torch.ones(2, 8), 8, table, True]
    nan = logits.clone()
    nan[1, 3] = torch.nan
    return {
        "slot": lambda: ("reshape_and_cache", *_changed(cache, 4, torch.tensor([0, 64, 70]))),
        "slots": lambda: ("reshape_and_cache", *_changed(cache, 4, torch.tensor([0, 1]))),
        "slot dtype": lambda: ("reshape_and_cache_flash", *_changed(cache, 4, torch.ones(3))),
        "cache": lambda: ("reshape_and_cache", *_changed(cache, 2, torch.zeros(4, 3, 16, 8))),
        "cache dtype": lambda: (
            "reshape_and_cache",
            *_changed(cache, 2, torch.zeros(4, 2, 16, 8, dtype=torch.int16)),
        ),
        "kind": lambda: ("reshape_and_cache", *cache, "int8"),
        "scale": lambda: ("reshape_and_cache", *cache, "auto", 0.0),
        "position": lambda: (
            "rotary_embedding_table",
            *_changed(rotary, 0, torch.tensor([3, 12])),
        ),
        "negative position": lambda: (
            "rotary_embedding_batched",
            *_changed(rotary, 0, torch.tensor([-1, 0])),
            8,
        ),
        "offset": lambda: ("rotary_embedding_batched", *rotary, 8, torch.tensor([0, 13])),
        "noise": lambda: ("sample_token", logits, torch.tensor([0.5, 1.0])),
        "nan": lambda: ("sample_token", nan, half),
        "nan seeded": lambda: ("sample_token_seeded", nan, torch.tensor([1, 2])),
        "temperature": lambda: ("sample_token", logits, half, 0.0),
        "top_k": lambda: ("moe_routing", logits, 8, True),
        "scoring_func": lambda: ("moe_routing", logits, 2, True, "none"),
        "groups": lambda: ("moe_routing", logits, 2, True, "softmax", 2, 1),
    }


@pytest.mark.parametrize("name", _bad_calls())
def test_what_is_wrong_raises_as_on_the_host(name: str) -> None:
    op, *args = _bad_calls()[name]()
    raises_as_on_the_host(op, *args)


@pytest.mark.parametrize("window", [-1, 5])
def test_heads_larger_than_kernels_have(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As latent attention has; the definition runs for some queries at a time, here for two."""
    monkeypatch.setattr(
        importlib.import_module("ipex_xpu_kernels._attention"), "_SCORES", 4 * 2 * 23
    )
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(17, 4, 288, generator=generator) * 0.3
    cache = torch.randn(8, 1, 8, 288, generator=generator)
    table = torch.tensor([[1, 4, 2], [7, 0, 3]], dtype=torch.int32)
    starts = torch.tensor([[0, 12, 17], [0, 23, 28]], dtype=torch.int32)
    lengths, sinks = torch.tensor([23, 5], dtype=torch.int32), torch.randn(4, generator=generator)
    found = []
    for device in ("cpu", "xpu"):
        q, kv, blocks, ends, used = (t.to(device) for t in (query, cache, table, starts, lengths))
        out = torch.empty_like(q)
        torch.ops.ipex.flash_attn_varlen_func(
            *(out, q, kv, kv, ends[0], ends[1], 12, 23, 0.1, True, blocks, None, window),
            sinks=sinks.to(device),
        )
        one = torch.ops.ipex.mla_decode_attention(q[:2], kv[:, 0], used, 0.1, 256, blocks)
        found.append([out.cpu(), one.cpu()])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_tables_are_checked_again_after_a_write() -> None:
    query = torch.randn(2, 2, 8, device="xpu")
    caches = [torch.randn(4, 2, 4, 8, device="xpu") for _ in range(2)]
    lengths = torch.tensor([8, 5], dtype=torch.int32, device="xpu")
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="xpu")

    def attend(table: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        torch.ops.ipex.single_query_cached_kv_attention(
            *(out, query, *caches, None, 0.5, table, lengths, 4, 8, None)
        )
        return out

    first = attend(table)
    assert torch.equal(attend(table), first)
    for wrong in (table.clone(), table):
        wrong[1, 0] = 4
        with pytest.raises(RuntimeError, match=r"hold numbers of blocks in \[0, 4\), got 4"):
            attend(wrong)
    table[1, 0] = 2
    assert torch.equal(attend(table), first)
    lengths += 4
    with pytest.raises(RuntimeError, match="context_lens must be between 0 and the capacity"):
        attend(table)


def test_ids_of_no_quantized_expert() -> None:
    samples = specs()["fused_experts"].samples(torch.float32)
    args = list(next(s for s in samples if s.id == "int8_3").args)
    args[4] = torch.full_like(args[4], 4)
    raises_as_on_the_host("fused_experts", *args)


def test_tensors_of_another_device() -> None:
    key, value, key_cache, value_cache, slots = _cache_arguments()
    there = [x.to("xpu") for x in (key, value, key_cache)]
    with pytest.raises(
        RuntimeError, match="reshape_and_cache: value_cache must be on the device of key = xpu"
    ):
        torch.ops.ipex.reshape_and_cache(*there, value_cache, slots.to("xpu"))
    with pytest.raises(
        RuntimeError, match="reshape_and_cache: slot_mapping must be on the device of key = xpu"
    ):
        torch.ops.ipex.reshape_and_cache(*there, value_cache.to("xpu"), slots)


def test_greedy_choice_is_a_kernel() -> None:
    logits = torch.randn(3, 40000, generator=torch.Generator().manual_seed(0))
    logits[1, 5] = torch.nan
    sample = type("Sample", (), {"args": (logits,), "kwargs": {}})
    actual, *_ = run("argmax", sample, "xpu")
    assert torch.equal(actual.cpu(), logits.argmax(-1))

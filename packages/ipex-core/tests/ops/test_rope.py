# SPDX-License-Identifier: Apache-2.0
"""Rotary tables against formulas and, where it is installed, against transformers."""

from __future__ import annotations

import math

import pytest
import torch

from ipex_core.nn.rope import ROPE_KINDS, rope_frequencies, rope_tables

CASES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-attention": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.9,
        "truncate": False,
    },
    "yarn-no-factor": {"factor": None, "original_max_position_embeddings": 512},
    "longrope": {
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + i for i in range(32)],
        "original_max_position_embeddings": 512,
    },
    "longrope-attention": {
        "short_factor": [1.1] * 32,
        "long_factor": [3.0] * 32,
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 512,
    },
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional-factor": {"partial_rotary_factor": 0.6, "factor": 2.0},
}


def test_default_tables():
    cos, sin = rope_tables("default", 6, 10, 100.0)
    for p in range(10):
        for i in range(3):
            angle = p / 100.0 ** (2 * i / 6)
            assert float(cos[p, i]) == pytest.approx(math.cos(angle), abs=1e-6)
            assert float(sin[p, i]) == pytest.approx(math.sin(angle), abs=1e-6)
    assert rope_tables("default", 6, 3, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    plain, _ = rope_frequencies("default", 128, 500000.0)
    scaled, _ = rope_frequencies("llama3", 128, 500000.0, CASES["llama3"])
    torch.testing.assert_close(scaled[:4], plain[:4])
    torch.testing.assert_close(scaled[-8:], plain[-8:] / 8.0)
    assert bool((scaled <= plain).all())


def test_longrope_chooses_by_length():
    scaling = CASES["longrope"]
    plain, _ = rope_frequencies("default", 64)
    short, _ = rope_frequencies(
        "longrope", 64, scaling=scaling, positions=512, max_position_embeddings=2048
    )
    long, factor = rope_frequencies(
        "longrope", 64, scaling=scaling, positions=513, max_position_embeddings=2048
    )
    torch.testing.assert_close(short * torch.tensor(scaling["short_factor"]).double(), plain)
    torch.testing.assert_close(long * torch.tensor(scaling["long_factor"]).double(), plain)
    assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(512)))


@pytest.mark.parametrize("positions", [300, 2048, 3000])
@pytest.mark.parametrize("case", list(CASES))
def test_equals_transformers(case, positions):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    kind, scaling = case.split("-")[0], CASES[case]
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if "truncate" in scaling and version < (4, 55):
        pytest.skip(f"yarn of transformers {transformers.__version__} always truncates")
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        **{
            "rope_scaling" if version < (5, 0) else "rope_parameters": {
                "rope_type": kind,
                "rope_theta": 10000.0,
                **scaling,
            }
        },
    )
    if kind not in utils.ROPE_INIT_FUNCTIONS:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn" and scaling["factor"] and version < (4, 56):
        # It ignores the factor where it knows the original positions.
        config.max_position_embeddings = int(original * scaling["factor"])
    if kind == "longrope" and version < (5, 0):
        # It looks for them here, as Phi 3 has them, and takes the factor from both numbers of positions.
        config.original_max_position_embeddings = original
    want, want_factor = utils.ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=positions)
    got, factor = rope_frequencies(
        kind,
        64,
        10000.0,
        CASES[case],
        positions=positions,
        max_position_embeddings=2048,
    )
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-6, atol=0.0)
    assert factor == pytest.approx(want_factor)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rope_tables("other", 8, 4), "kind must be one of"),
        (lambda: rope_tables("default", 7, 4), "dim must be even"),
        (lambda: rope_tables("default", 8, 0), "max_positions must be positive"),
        (lambda: rope_tables("linear", 8, 4), "scaling must have 'factor'"),
        (lambda: rope_tables("longrope", 8, 4, scaling=CASES["longrope"]), "must have 4 numbers"),
    ],
)
def test_wrong_arguments(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_kinds():
    assert set(ROPE_KINDS) == {"default", *(name.split("-")[0] for name in CASES)}
    assert rope_frequencies("dynamic", 2, scaling={"factor": 2.0}, positions=9)[0].tolist() == [1.0]

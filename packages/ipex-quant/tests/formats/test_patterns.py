# SPDX-License-Identifier: Apache-2.0
"""Regular expressions of checkpoints: what quantizers write matches as in `re`, what could run for long is refused."""

from __future__ import annotations

import re

import pytest

from ipex_core.errors import OpArgumentError
from ipex_quant.formats.patterns import match
from ipex_quant.formats.schemes import scheme_of

NAMES = [
    "model.layers.10.self_attn.q_proj",
    "model.language_model.layers.0.mlp.experts.127.down_proj",
    "vision_tower.encoder.layers.3.attention.self.query",
    "lm_head",
]
#: As GPTQModel, AutoRound and compressed-tensors write them.
USUAL = [
    r".*lm_head",
    r".*\.(q|k|v|o)_proj$",
    r"^(?!.*layers\.\d+\.mlp\.gate$).*",
    r".*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj.*",
    r"model\.layers\.(" + "|".join(map(str, range(40))) + r")\..*",
    r"(?:model\.)?(?:language_model\.)?layers\.[0-9]+\.self_attn.*?",
    r".*\.layers\.\d{1,3}\..*(?P<part>proj|query)$",
]
SLOW = [
    r"(a+)+b",
    r"(a|a)*b",
    r"([a-z]+)*=",
    r"(x+x+){10}y",
    r".*.*.*.*.*.*.*.*=",
    r"\d*\d*\d*\d*\d*\d*\d*\d*\d*\d*\d*\d*=",
    "a?" * 40 + "a" * 40,
    "(a|a)" * 40 + "=",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_match_as_re_does(pattern: str) -> None:
    for name in NAMES:
        assert match("op", pattern, name) == bool(re.match(pattern, name))
        assert match("op", pattern, name, whole=True) == bool(re.fullmatch(pattern, name))


@pytest.mark.parametrize("pattern", SLOW)
def test_slow_patterns_are_refused(pattern: str) -> None:
    name = "a" * 40 + "1" * 30
    with pytest.raises(OpArgumentError, match="quant_config must have patterns without repeated"):
        match("op", pattern, name)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "dynamic": {"(a+)+b": {"bits": 8}}},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"(a+)+b": {"bits": 8}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:(a+)+b"]}}},
    ],
    ids=["gptq", "auto-round", "compressed-tensors"],
)
def test_each_place_of_a_pattern(config: dict[str, object]) -> None:
    with pytest.raises(OpArgumentError, match=r"\(a\+\)\+b"):
        scheme_of("op", config, "a" * 64)

# SPDX-License-Identifier: Apache-2.0
"""Readers of GGUF files and of bitsandbytes' tensors, against bytes that are decoded number by number."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ggufs as G
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipex_core.errors import OpArgumentError
from ipex_core.packing.quantize import NF4_VALUES
from ipex_quant import linear_from, quantized_names, read_checkpoint, read_gguf, read_linear

BLOCKS = [name for name, (_, weights, _) in G.TYPES.items() if weights > 1]
EXACT = ("Q4_0", "Q5_0", "Q8_0")


# -- GGUF -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", BLOCKS)
def test_gguf_blocks(kind: str, version: int, tmp_path: Path) -> None:
    n, k = 24, 512
    data = G.random_rows(kind, n, k)
    path = tmp_path / "a.gguf"
    bias = G.random_rows("F32", 1, n)
    G.write(
        path,
        {"blk.up.weight": (kind, (n, k), data), "blk.up.bias": ("F32", (n,), bias)},
        {
            "general.name": "x",
            "general.alignment": 64,
            "list": [1, 2],
            "names": ["a", "bc"],
            "f": 0.5,
        },
        version,
    )
    state, config = read_gguf(path)
    assert config["metadata"]["list"] == [1, 2] and config["metadata"]["names"] == ["a", "bc"]
    assert quantized_names(state) == ["blk.up"]
    (weight,) = read_checkpoint(state, config)
    wanted = torch.from_numpy(G.decode(kind, n, k, data))
    found = weight.dequantize()
    assert (weight.out_features, weight.in_features) == (n, k)
    if kind in EXACT:
        assert torch.equal(found, wanted.float())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)
    layer: Any = linear_from(weight)
    assert torch.equal(
        layer.dequantize(), found
    )  # packing keeps float zero points and scales as they are
    x = torch.randn(3, k)
    y = x.double() @ wanted.T + torch.frombuffer(bytearray(bias), dtype=torch.float32).double()
    torch.testing.assert_close(layer(x).double(), y, rtol=1e-3, atol=1e-3 * y.abs().max().item())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_gguf_floats(kind: str, tmp_path: Path) -> None:
    data = G.random_rows(kind, 3, 40)
    G.write(tmp_path / "a.gguf", {"norm.weight": (kind, (3, 40), data)})
    state, config = read_gguf(tmp_path)
    assert torch.equal(state["norm.weight"].double(), torch.from_numpy(G.decode(kind, 3, 40, data)))
    with pytest.raises(OpArgumentError, match="have quantized layers for method gguf, got none"):
        list(read_checkpoint(state, config))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_1"])
def test_gguf_groups_without_scale_are_constant(kind: str, tmp_path: Path) -> None:
    data = bytearray(G.random_rows(kind, 2, 256))
    size = G.TYPES[kind][2]
    data[0:2] = b"\0\0"  # d of the first block
    data[size : size + 4] = b"\0\0\0\0"  # d and minimum of the second
    G.write(tmp_path / "a.gguf", {"a.weight": (kind, (2, 256), bytes(data))})
    (weight,) = read_checkpoint(*read_gguf(tmp_path / "a.gguf"))
    wanted = torch.from_numpy(G.decode(kind, 2, 256, bytes(data)))
    torch.testing.assert_close(weight.dequantize().double(), wanted, rtol=1e-6, atol=1e-5)
    assert bool(linear_from(weight)(torch.ones(1, 256)).isfinite().all())


def test_gguf_of_three_dimensions_is_dequantized(tmp_path: Path) -> None:
    data = G.random_rows("Q8_0", 6, 64)
    G.write(tmp_path / "a.gguf", {"experts.weight": ("Q8_0", (2, 3, 64), data)})
    state, _ = read_gguf(tmp_path)
    wanted = torch.from_numpy(G.decode("Q8_0", 6, 64, data)).float().view(2, 3, 64)
    assert torch.equal(state["experts.weight"], wanted)


def test_gguf_rows_without_weights(tmp_path: Path) -> None:
    G.write(tmp_path / "a.gguf", {"a.weight": ("Q8_0", (2, 0), b"")})
    with pytest.raises(OpArgumentError, match="in_features must be positive, got 0"):
        list(read_checkpoint(*read_gguf(tmp_path / "a.gguf")))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize(
    "shape",
    [(0, 1 << 63), (1 << 63, 0), (1 << 62, 0), (0, 1 << 62), (1 << 62,), (1 << 32, 1 << 32)],
)
def test_gguf_shapes_that_no_file_has(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    G.write(tmp_path / "a.gguf", {"a.weight": (kind, shape, b"")})
    with pytest.raises(OpArgumentError, match="must be a complete GGUF file"):
        list(read_checkpoint(*read_gguf(tmp_path / "a.gguf")))


def test_gguf_tensors_that_share_bytes(tmp_path: Path) -> None:
    """A small file would else stand for any amount of memory."""
    data = G.random_rows("Q8_0", 8, 32)
    rows = {f"{i}.weight": ("Q8_0", (8, 32), data) for i in range(3)}
    path = tmp_path / "a.gguf"
    G.write(path, {**rows, "none.weight": ("F32", (0, 8), b"")})
    assert len(list(read_checkpoint(*read_gguf(path)))) == 3
    whole = path.read_bytes()
    place = whole.index(b"1.weight") + 8 + 4 + 16 + 4  # behind name, dimensions and type
    for offset in (0, 32, 2 * 288 - 32):
        path.write_bytes(whole[:place] + struct.pack("<Q", offset) + whole[place + 8 :])
        with pytest.raises(
            OpArgumentError, match=r"got the same bytes for \d.weight and \d.weight"
        ):
            read_gguf(path)


def test_gguf_in_parts(tmp_path: Path) -> None:
    for i in (1, 2):
        data = G.random_rows("Q8_0", 4, 32, i)
        name = tmp_path / f"m-0000{i}-of-00002.gguf"
        G.write(name, {f"{i}.weight": ("Q8_0", (4, 32), data)}, {"part": i})
    for place in (tmp_path, tmp_path / "m-00002-of-00002.gguf"):
        state, config = read_gguf(place)
        assert quantized_names(state) == ["1", "2"] and config["metadata"] == {"part": 1}
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(
        OpArgumentError, match=r"have all parts of .*, got no m-00001-of-00002\.gguf"
    ):
        read_gguf(tmp_path)


def _gguf(path: Path, kind: str = "Q4_0", k: int = 64) -> bytes:
    G.write(path, {"a.weight": (kind, (4, k), G.random_rows(kind, 4, k))}, {"general.name": "x"})
    return path.read_bytes()


def test_gguf_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    whole = _gguf(path)
    place = whole.index(b"a.weight") + 8

    def at(position: int, code: str, value: int) -> bytes:
        data = struct.pack(f"<{code}", value)
        return whole[:position] + data + whole[position + len(data) :]

    cases = {
        r"be a GGUF file, got a file that begins with b'PK": b"PK" + whole[2:],
        r"be a GGUF file, got a file that begins with b''": b"",
        r"version 2 or 3, got version 1$": at(4, "I", 1),
        r"version 2 or 3, got a big-endian one": at(4, "I", 3 << 24),
        r"be a complete GGUF file, got \d+ bytes, which end within": whole[:60],
        r"be a complete GGUF file, got": at(8, "Q", 1 << 40),
        r"\d+ bytes, \d+ fewer than a.weight ends at": whole[:-80],
        r"type of a.weight must be one of float32, .*, got IQ4_NL": at(place + 20, "I", 20),
        r"type of a.weight must be one of float32, .*, got type 99": at(place + 20, "I", 99),
        r"got rows of 33 weights of a.weight, which is Q4_0": at(place + 4, "Q", 33),
        r"fewer than a.weight ends at$": at(place + 12, "Q", 1 << 62),
        r"got 9 dimensions of a.weight": at(place, "I", 9),
        r"got the unknown type 77 of general.name": at(24 + 8 + len("general.name"), "I", 77),
    }
    for message, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(OpArgumentError, match=message):
            read_gguf(path)
    path.unlink()
    with pytest.raises(OpArgumentError, match="read_gguf: path must be a GGUF file, got"):
        read_gguf(path)
    with pytest.raises(OpArgumentError, match="have one GGUF file, or the parts of one, got none"):
        read_gguf(tmp_path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cut=st.integers(0, 400), place=st.integers(4, 200), byte=st.integers(0, 255))
def test_gguf_damage_is_an_error_or_nothing(
    tmp_path: Path, cut: int, place: int, byte: int
) -> None:
    path = tmp_path / "a.gguf"
    data = bytearray(_gguf(path))
    data[min(place, len(data) - 1)] = byte
    path.write_bytes(bytes(data[: len(data) - cut]))
    try:
        state, config = read_gguf(path)
        for name in quantized_names(state):
            read_linear(state, name, config).dequantize()
    except OpArgumentError:
        pass


def test_gguf_written_by_its_own_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    weights = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    kinds = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    for kind in kinds:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{kind}.weight", gguf.quants.quantize(weights, number), raw_dtype=number)
    for call in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{call}_to_file")()
    writer.close()
    for weight in read_checkpoint(*read_gguf(path)):
        assert float((weight.dequantize() - torch.from_numpy(weights)).abs().max()) < 0.5
    for kind in BLOCKS:
        data = G.random_rows(kind, 4, 512)
        number = gguf.GGMLQuantizationType[kind]
        rows = np.frombuffer(data, np.uint8).reshape(4, -1)
        wanted = gguf.quants.dequantize(rows, number)
        np.testing.assert_allclose(G.decode(kind, 4, 512, data), wanted, rtol=1e-5, atol=1e-6)


# -- bitsandbytes ---------------------------------------------------------------------------------------------

FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]


def bnb(
    kind: str = "nf4", n: int = 8, k: int = 128, size: int = 64, nested: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer and its weight, code by code."""
    table = list(NF4_VALUES) if kind == "nf4" else [value / 12 for value in FP4]
    codes = torch.randint(0, 16, (n * k,))
    data = [int(a) << 4 | int(b) for a, b in zip(codes[::2], codes[1::2], strict=True)]
    absmax = torch.rand(-(-n * k // size)) + 0.1
    about: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": "float16",
        "shape": [n, k],
    }
    state = {
        "weight": torch.tensor(data, dtype=torch.uint8).view(-1, 1),
        "weight.quant_map": torch.tensor(table),
    }
    if nested:
        inner, map_, offset = 4, torch.linspace(-1, 1, 256), 0.25
        stored = torch.randint(0, 256, absmax.shape, dtype=torch.uint8)
        outer = torch.rand(-(-absmax.numel() // inner)) + 0.5
        absmax = torch.stack(
            [map_[int(c)] * outer[i // inner] + offset for i, c in enumerate(stored)]
        )
        about |= {"nested_blocksize": inner, "nested_offset": offset, "nested_dtype": "float32"}
        state |= {
            "weight.absmax": stored,
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": map_,
        }
    else:
        state["weight.absmax"] = absmax
    text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    state[f"weight.quant_state.bitsandbytes__{kind}"] = text
    values = [table[int(c)] * float(absmax[i // size]) for i, c in enumerate(codes)]
    return {f"m.a.{key}": value for key, value in state.items()}, torch.tensor(values).view(n, k)


CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("k", "size"), [(128, 64), (96, 64), (32, 64), (64, 64)])
def test_bitsandbytes(kind: str, k: int, size: int, nested: bool) -> None:
    state, wanted = bnb(kind, 8, k, size, nested)
    state |= {"m.a.bias": torch.randn(8), "m.norm.weight": torch.ones(4)}
    assert quantized_names(state) == ["m.a"]
    (weight,) = read_checkpoint(state, CONFIG, take=True)
    assert list(state) == ["m.norm.weight"]
    assert weight.format == ("nf4" if kind == "nf4" else "fp8_e4m3")
    torch.testing.assert_close(weight.dequantize(), wanted, rtol=1e-6, atol=1e-7)
    layer: Any = linear_from(weight)
    assert torch.equal(layer.dequantize(), weight.dequantize())
    x = torch.randn(2, k)
    torch.testing.assert_close(layer(x), x @ wanted.T + weight.bias, rtol=1e-3, atol=1e-2)


def test_bitsandbytes_of_8_bits() -> None:
    weight, largest = torch.randint(-127, 128, (8, 32), dtype=torch.int8), torch.rand(8)
    state = {
        "a.weight": weight,
        "a.SCB": largest,
        "a.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    found = read_linear(state, "a", CONFIG).dequantize()
    torch.testing.assert_close(found, weight * largest[:, None] / 127)


def test_bitsandbytes_bad_input() -> None:
    def fails(message: str, **changes: Any) -> None:
        state, _ = bnb(nested=True)
        for key, value in changes.items():
            state[f"m.a.{key.replace('__', '.', 1)}"] = value
        with pytest.raises(OpArgumentError, match=message):
            read_linear(
                {key: value for key, value in state.items() if value is not None}, "m.a", CONFIG
            )

    text = torch.tensor(list(b"{nonsense"), dtype=torch.uint8)
    state = "weight__quant_state.bitsandbytes__nf4"
    fails("state_dict must have m.a.weight, got none", weight=None)
    fails("weight must have 512 bytes, got 3", weight=torch.zeros(3, 1, dtype=torch.uint8))
    fails("quant_state must be a JSON object, got Expecting", **{state: text})
    fails("state_dict must have m.a.weight.quant_state.bitsandbytes__nf4", **{state: None})
    fails("state_dict must have m.a.weight.nested_absmax", weight__nested_absmax=None)
    fails("nested_absmax: it must have 4 values, got 2", weight__nested_absmax=torch.ones(2))
    fails("absmax must have 16 values, got 2", weight__absmax=torch.ones(2))
    fails("quant_map must be the values of nf4", weight__quant_map=torch.zeros(16))
    bytes_ = torch.tensor(list(b'{"shape": [8], "blocksize": 64}'), dtype=torch.uint8)
    fails("shape must be two positive numbers, got \\[8\\]", **{state: bytes_})


@pytest.mark.parametrize(
    "wrong", [None, "", "x", [], {}, True, float("nan"), float("inf"), 1e300, 10**400]
)
def test_bitsandbytes_offsets_that_are_none(wrong: Any) -> None:
    state, _ = bnb(nested=True)
    key = "m.a.weight.quant_state.bitsandbytes__nf4"
    about = {**json.loads(bytes(state[key].tolist())), "nested_offset": wrong}
    text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    with pytest.raises(OpArgumentError, match="nested_offset must be a finite number"):
        read_linear({**state, key: text}, "m.a", CONFIG)


def test_bitsandbytes_blocks_of_any_size() -> None:
    """A size takes no memory: it may be any number of the file."""
    state, _ = bnb(n=1, k=64, nested=True)
    key = "m.a.weight.quant_state.bitsandbytes__nf4"
    about = json.loads(bytes(state[key].tolist()))
    for size in (1, 4, 1 << 50, 10**30):
        text = json.dumps({**about, "nested_blocksize": size}).encode()
        found = {**state, key: torch.tensor(list(text), dtype=torch.uint8)}
        weight = read_linear(found, "m.a", CONFIG)
        assert torch.equal(weight.dequantize(), read_linear(state, "m.a", CONFIG).dequantize())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_bitsandbytes_scales_that_are_none(dtype: torch.dtype) -> None:
    state, _ = bnb(nested=True)
    bytes_ = {"a.weight": torch.ones(8, 32, dtype=torch.int8), "a.SCB": torch.ones(8)}
    for whole, keys in (
        (state, ("weight.nested_absmax", "weight.nested_quant_map", "weight.quant_map")),
        ({f"m.{key}": value for key, value in bytes_.items()}, ("SCB",)),
    ):
        for key in keys:
            name = f"m.a.{key}"
            wrong = {**whole, name: whole[name].to(dtype)}
            with pytest.raises(
                OpArgumentError, match="must have dtype float32, bfloat16 or float16"
            ):
                read_linear(wrong, "m.a", CONFIG)
            nan = whole[name].clone()
            nan[-1] = float("nan")
            with pytest.raises(OpArgumentError, match="must be finite"):
                read_linear({**whole, name: nan}, "m.a", CONFIG)

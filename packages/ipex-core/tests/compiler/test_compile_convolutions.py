# SPDX-License-Identifier: Apache-2.0
"""Convolutions with frozen weights in the graph passes of the compile backend."""

from __future__ import annotations

import pytest
import torch
from compile_checks import DTYPES, randn, reasons
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional as F

import ipex_core
from ipex_core.config.isa_levels import LEVEL_FEATURES
from ipex_core.fusion import GraphReport
from ipex_core.fusion.aten import linear
from ipex_core.fusion.aten.conv import pack_convolutions
from ipex_core.kernels.policy import has_kernel
from ipex_core.kernels.providers import cpu_level
from ipex_core.ops.conv import pack_convolution
from ipex_core.packing import dense

LAST = torch.channels_last


def image(*shape, dtype=torch.float32):
    return randn(*shape, dtype=dtype).contiguous(memory_format=LAST)


@torch.no_grad()
def pack(function, *inputs, prepare=None, **options):
    """Run the pass on the graph of a module or function, compare the results, and return report and graph.

    The graph is one of ATen ops whose parameters are attributes, as after freezing.
    """
    gm = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    if prepare is not None:
        prepare(gm)
    report = GraphReport("test", inference=True, frozen=True)
    options = {"always": True, "kernels": lambda op: True} | options
    pack_convolutions(gm.graph, report, **options)
    gm.graph.lint()
    gm.recompile()
    expected, got = function(*inputs), gm(*inputs)
    limit = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[expected.dtype]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit * expected.abs().max().item())
    return report, gm


def calls(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def fired(report):
    return [f.text for f in report.fusions if f.fired]


def for_onednn(gm):
    """Let oneDNN pack the weights of the convolutions, as freezing does."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        x, weight, bias, stride, padding, dilation, _, _, groups = node.args
        plain = getattr(gm, weight.target).detach().contiguous(memory_format=LAST)
        rest = (padding, stride, dilation, groups)
        size = list(x.meta["val"].shape)
        op = torch.ops.mkldnn._reorder_convolution_weight
        gm.register_buffer("packed", op(plain, *rest, size))
        with gm.graph.inserting_before(node):
            packed = gm.graph.get_attr("packed")
            op = torch.ops.mkldnn._convolution_pointwise.default
            new = gm.graph.call_function(op, (x, packed, bias, *rest, "none", [], ""))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        gm.graph.erase_node(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (1, {}),
        (1, {"stride": 2, "bias": False}),
        (3, {"padding": 1}),
        (3, {"padding": 2, "dilation": 2, "stride": 2}),
        ((1, 5), {"padding": (0, 2), "stride": (2, 1)}),
        (7, {"padding": 3, "stride": 2}),
        (3, {"padding": 1, "groups": 3}),
        (1, {"stride": 2, "groups": 3}),
    ],
)
def test_windows(kernel, options, dtype):
    conv = nn.Conv2d(6, 33, kernel, **options).to(dtype)
    report, gm = pack(conv, image(2, 6, 13, 11, dtype=dtype))
    assert fired(report) == ["nothing"] and calls(gm) == ["ipex.convolution.default"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation", [F.relu, F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh")]
)
def test_what_follows(activation, dtype):
    conv = nn.Conv2d(8, 16, 3, padding=1).to(dtype)
    x, y = image(2, 8, 6, 7, dtype=dtype), image(2, 16, 6, 7, dtype=dtype)
    _, gm = pack(lambda x: activation(conv(x)), x)
    assert calls(gm) == ["ipex.convolution.default"]
    report, gm = pack(lambda x, y: activation(y + conv(x)), x, y)
    assert calls(gm) == ["ipex.convolution.default"] and fired(report)[0].startswith("add + ")
    report, gm = pack(lambda x, y: conv(x) + y, x, y)
    assert calls(gm) == ["ipex.convolution.default"] and fired(report) == ["add"]


@pytest.mark.parametrize(
    ("sizes", "options", "pays"),
    [
        ((2, 64, 9, 40), {"padding": 1}, True),
        ((1, 16, 9, 64), {}, True),
        ((1, 16, 9, 16), {}, False),  # few channels
        ((1, 256, 13, 256), {}, True),
        ((1, 256, 9, 256), {}, False),  # few pixels for a large weight
        ((2, 64, 9, 40), {"padding": 1, "stride": 2}, False),
        ((2, 64, 9, 40), {"padding": 1, "dilation": (2, 1)}, False),
        ((2, 64, 9, 40), {"padding": 1, "groups": 2}, False),
    ],
)
def test_minimal_filtering(sizes, options, pays):
    """A window of 3 x 3 has 16 products for 4 pixels where that is faster, and 9 for one elsewhere."""
    images, channels, pixels, out = sizes
    conv = nn.Conv2d(channels, out, 3, **options)
    x = image(images, channels, pixels, pixels)

    def depth(disabled=()):
        _, gm = pack(lambda x: F.relu(conv(x)), x, disabled=disabled)
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.ipex.convolution.default)
        header = dense.read_header(getattr(gm, node.args[1].target))
        assert header[0] == (dense.WINOGRAD if pays and not disabled else 0)
        return header[2] * conv.groups // channels

    assert depth() == (16 if pays else 9) and depth(["winograd"]) == 9
    if pays:  # in 16 bits, too, but where instructions multiply bfloat16
        _, gm = pack(conv.bfloat16(), x.bfloat16())
        multiplies = "avx512_bf16" in LEVEL_FEATURES.get(cpu_level() or "", ())
        wanted = dense.FORMATS[torch.bfloat16] if multiplies else dense.WINOGRAD
        assert dense.read_header(gm.ipex_convolution_0)[0] == wanted


def test_errors_of_transformed_weights():
    """Another window of 16 places is refused, and so are other steps and ops for a transformed weight."""
    call = torch.ops.ipex.convolution.default
    weight, x = randn(40, 8, 3, 3), image(1, 8, 7, 7)
    packed = pack_convolution(weight, winograd=True)
    one = [[1, 1]] * 3
    torch.testing.assert_close(
        call(x, packed, 40, [3, 3], *one), F.conv2d(x, weight, padding=1), rtol=1e-5, atol=1e-5
    )
    for steps in ([[2, 2], [1, 1], [1, 1]], [[1, 1], [1, 1], [1, 2]]):
        with pytest.raises(
            RuntimeError, match=r"packed_weight must be a float32 weight of shape \[40, 72\]"
        ):
            call(x, packed, 40, [3, 3], *steps)
    for taps in ([4, 4], [1, 16]):
        with pytest.raises(
            RuntimeError, match=r"shape \[40, 128\].*header of a transformed weight"
        ):
            call(x, packed, 40, taps, [1, 1], [3, 9], [1, 1])
    other = pack_convolution(randn(40, 8, 4, 4))
    with pytest.raises(
        RuntimeError, match=r"packed_weight must be a float32 weight of shape \[40, 72\]"
    ):
        call(x, other, 40, [3, 3], *one)
    with pytest.raises(RuntimeError, match="header of a transformed weight"):
        torch.ops.ipex.linear(randn(2, 128), packed, 40)


def test_block():
    """Two convolutions that are added, as in a residual network: one takes the other's result."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 32, 3, padding=1)
            self.short = nn.Conv2d(8, 32, 1)

        def forward(self, x):
            return F.relu(self.second(F.relu(self.first(x))) + self.short(x))

    report, gm = pack(Block(), image(2, 8, 6, 6))
    assert calls(gm) == ["ipex.convolution.default"] * 3
    assert sorted(fired(report)) == ["add + relu", "nothing", "relu"]


def test_near_misses():
    conv, x = nn.Conv2d(8, 16, 1), image(2, 8, 5, 5)
    for function, text in (
        (lambda x: F.hardswish(conv(x)), "nothing"),
        (lambda x: F.relu(conv(x) + torch.ones(16, 1, 1)), "nothing"),  # broadcast
        (lambda x: (lambda y: F.relu(y) + y)(conv(x)), "nothing"),  # two readers
        (lambda x: (lambda y: y + y)(conv(x)), "nothing"),
        (lambda x: F.relu(F.relu(conv(x)) + x.repeat(1, 2, 1, 1)), "relu"),  # activated before
        (lambda x: torch.add(conv(x), x.repeat(1, 2, 1, 1), alpha=2), "nothing"),
    ):
        report, gm = pack(function, x)
        assert fired(report) == [text]
        assert len(calls(gm)) > 1 and "ipex.convolution.default" in calls(gm)


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (nn.Conv2d(8, 8, 3, groups=8), (1, 8, 5, 5), "depthwise"),
        (nn.Conv2d(8, 16, 3, groups=8), (1, 8, 5, 5), "depthwise"),
        (nn.Conv1d(8, 8, 3), (1, 8, 5), "the images are"),
        (nn.Conv3d(2, 4, 1), (1, 2, 3, 3, 3), "the images are"),
        (nn.ConvTranspose2d(8, 8, 3), (1, 8, 5, 5), ""),
    ],
)
def test_other_kinds_stay(module, shape, reason):
    report, gm = pack(module, randn(*shape))
    assert not fired(report) and reason in reasons(report)
    assert not any("ipex" in name for name in calls(gm))


def test_weight_that_is_no_constant_stays():
    report, gm = pack(F.conv2d, image(1, 8, 5, 5), randn(4, 8, 1, 1))
    assert not report.fusions and calls(gm) == ["aten.convolution.default"]


def test_disabled_or_without_kernel():
    for options in ({"disabled": ["convolution"]}, {"kernels": lambda op: False}):
        report, gm = pack(nn.Conv2d(8, 8, 1), image(1, 8, 5, 5), **options)
        assert not report.fusions and calls(gm) == ["aten.convolution.default"]


def test_images_that_are_not_channels_last_are_copied():
    report, gm = pack(nn.Conv2d(8, 8, 3), randn(2, 8, 5, 5))
    assert fired(report) and calls(gm) == ["aten.clone.default", "ipex.convolution.default"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_packed_for_onednn(dtype):
    """The weight is taken out of oneDNN's form, which is dropped."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    conv = nn.Conv2d(24, 40, 3, padding=1, stride=2).to(dtype)
    report, gm = pack(
        lambda x: F.relu(conv(x)), image(2, 24, 9, 9, dtype=dtype), prepare=for_onednn
    )
    assert fired(report) == ["relu"] and calls(gm) == ["ipex.convolution.default"]
    assert not hasattr(gm, "packed")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("prepare", [None, for_onednn])
@pytest.mark.parametrize("faster", ["ipex", "stock"])
def test_measured(faster, prepare, groups, monkeypatch):
    """The faster one stays, whatever was asked of them has run, and a shape is measured once."""
    times = []

    def fastest(runs, seconds, *rest):
        results = [run() for run in runs.values()]
        times.append([r.shape for r in results])
        assert len(results) == 2 and times[-1][0] == times[-1][1]
        return faster, "a and b"

    monkeypatch.setattr(linear, "fastest", fastest)
    monkeypatch.setattr(linear, "_known", {})
    conv = nn.Conv2d(8, 16, 3, padding=1, groups=groups)
    x, y = image(2, 8, 6, 7), image(2, 16, 6, 7)
    functions = [
        lambda x, y: F.relu(conv(x)),
        lambda x, y: F.silu(conv(x) + y),
        lambda x, y: F.relu(conv(x) + y),
        lambda x, y: conv(x) + y,
    ]
    for function in functions * 2:
        report, _ = pack(function, x, y, always=False, prepare=prepare)
        assert bool(fired(report)) is (faster == "ipex")
        assert faster == "ipex" or "measured" in reasons(report)
    assert len(times) == len(functions)


def test_not_measured_if_results_must_repeat():
    torch.use_deterministic_algorithms(True)
    try:
        report, _ = pack(nn.Conv2d(8, 8, 1), image(1, 8, 5, 5), always=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not fired(report) and "deterministic" in reasons(report)


def test_compiled():
    """Batch norms are part of the weights; lengths may vary; the strides are those of eager code."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 1),
    )
    model(torch.randn(4, 3, 8, 8))
    model.eval()
    options = {"ipex.always": True}
    compiled = torch.compile(model, backend="ipex", options=options, dynamic=True)
    with torch.no_grad():
        for n in (2, 5):
            x = torch.randn(n, 3, 8, 8)
            expected, got = model(x), compiled(x)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            assert got.stride() == expected.stride()
    (graph,) = ipex_core.explain(compiled).graphs
    found = [f for f in graph.fusions if f.pattern == "convolution"]

    if has_kernel("convolution"):
        assert {(f.op, f.text) for f in found} == {
            ("ipex::convolution", "relu"),
            ("ipex::convolution", "nothing"),
        }


def test_double_precision_is_not_packed():
    """oneDNN has no float64; Inductor's freezing asks it all the same, where stock compile does not freeze."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2)
    )
    model, x = model.double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    compiled = torch.compile(model, backend="ipex", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    (graph,) = ipex_core.explain(compiled).graphs
    assert graph.frozen and graph.count("convolution", fired=False) == 2

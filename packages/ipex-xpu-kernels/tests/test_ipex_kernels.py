# SPDX-License-Identifier: Apache-2.0
"""Ops of ipex that have kernels here: all samples of their specs in all dtypes, without the host's help."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import TELLS_AT_ONCE, raises
from torch.utils import _pytree as pytree

import ipex_xpu_kernels
from ipex_core.library.kernels import specs
from ipex_core.library.spec import Sample
from ipex_core.nn.functional import interaction
from ipex_core.nn.modules import MergedEmbeddingBagWithAdaGrad, MergedEmbeddingBagWithSGD

pytestmark = pytest.mark.usefixtures("always")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Samples with quantized weights (test_llm_kernels.py).
QUANTIZED = ("int8_", "int4_", "fp4_", "nf4_", "quantized_", "relu2_int")
NAMES = (
    "fused_experts",
    "grouped_linear",
    "interaction",
    "interaction_backward",
    "merged_embeddingbag_adagrad",
    "merged_embeddingbag_cat_forward",
    "merged_embeddingbag_forward",
    "merged_embeddingbag_sgd",
    "nms_mask",
    "roi_align",
    "roi_align_backward",
)


def moved(value: object, device: str) -> object:
    """Clone to the device, strides kept; the same tensor twice stays the same."""
    known: dict[int, torch.Tensor] = {}

    def move(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            whole = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())  # type: ignore[call-overload]
            made = torch.empty(0, dtype=leaf.dtype, device=device)
            made.set_(
                whole.clone().to(device).untyped_storage(),
                leaf.storage_offset(),
                leaf.shape,
                leaf.stride(),
            )
            known[id(leaf)] = made
        return known[id(leaf)]

    return pytree.tree_map(move, value)


def run(name: str, sample: Sample, device: str) -> list[torch.Tensor]:
    args, kwargs = moved((sample.args, sample.kwargs), device)  # type: ignore[misc]
    ipex_xpu_kernels.set_fallback_mode("error" if device == "xpu" else "silent")
    out = getattr(torch.ops.ipex, name)(*args, **kwargs)
    ipex_xpu_kernels.set_fallback_mode("silent")
    # What an op writes to its arguments counts, too.
    return [t for t in pytree.tree_leaves((out, args)) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, dtype: torch.dtype) -> None:
    spec = specs()[name]
    rtol, atol = spec.tolerance.get(dtype, (0, 0))
    for sample in spec.samples(dtype):
        if sample.id.startswith(QUANTIZED):
            continue
        expected = run(name, sample, "cpu")
        for actual, wanted in zip(run(name, sample, "xpu"), expected, strict=True):
            assert actual.stride() == wanted.stride(), sample.id
            torch.testing.assert_close(
                actual.cpu(),
                wanted,
                rtol=2 * rtol,
                atol=2 * atol,
                equal_nan=True,
                msg=lambda text, id=sample.id: f"{id}: {text}",
            )


def raises_as_on_the_host(name: str, *args: object) -> None:
    """Check that the device raises what the host raises, and writes nothing before."""
    with pytest.raises(RuntimeError, match=f"{name}: ") as expected:
        getattr(torch.ops.ipex, name)(*args)
    on_device = moved(args, "xpu")
    if not TELLS_AT_ONCE:
        with raises(RuntimeError, match=f"{name}:"):
            getattr(torch.ops.ipex, name)(*on_device)  # type: ignore[misc]
        return
    with pytest.raises(RuntimeError) as actual:
        getattr(torch.ops.ipex, name)(*on_device)  # type: ignore[misc]
    assert str(actual.value) == str(expected.value)
    before, after = (
        [leaf.cpu() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        for tree in (args, on_device)
    )
    for left, right in zip(before, after, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


BAGS = [
    ([0, 3], [0, 1], False),  # no such row
    ([0, -1], [0, 1], False),
    ([0, 1], [1, 1], False),  # does not begin with 0
    ([0, 1, 1], [0, 2, 1], False),  # decreases
    ([0, 1], [0, 3], False),  # passes the last index
    ([0, 1], [0, 3], True),
    ([0, 3], [0, 1], True),  # behind the last bag
    ([0], [1], True),  # of no bag
]


@pytest.mark.parametrize(("indices", "offsets", "last"), BAGS)
def test_bags_that_do_not_exist(indices: list[int], offsets: list[int], last: bool) -> None:
    weight = torch.ones(3, 4)
    bags = [torch.tensor(indices)], [torch.tensor(offsets)]
    raises_as_on_the_host("merged_embeddingbag_forward", [weight], *bags, [], "sum", last)
    grad = torch.ones(len(offsets) - last, 4)
    step = [torch.empty(0)], *bags, [], "sum", last, 0.1, 0.0
    raises_as_on_the_host("merged_embeddingbag_sgd", [grad], [weight], *step)


def test_tables_that_share_memory_have_no_step() -> None:
    weight, grad, none = torch.ones(3, 4), torch.ones(1, 4), torch.empty(0)
    bags = [torch.tensor([1])] * 2, [torch.tensor([0])] * 2
    step = [none] * 2, *bags, [], "sum", False, 0.1, 0.0
    raises_as_on_the_host("merged_embeddingbag_sgd", [grad] * 2, [weight] * 2, *step)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_of_torch(mode: str) -> None:
    weight = torch.randn(20, 33)
    indices = torch.randint(0, 20, (17,), dtype=torch.int32)
    offsets = torch.tensor([0, 0, 5, 5, 16, 17], dtype=torch.int32)
    factors = torch.randn(17) if mode == "sum" else None
    results = []
    for device in ("cpu", "xpu"):
        leaf = weight.clone().to(device).requires_grad_()
        more = None if factors is None else factors.to(device)
        i, o = indices.to(device), offsets.to(device)
        for last in (False, True):
            y = F.embedding_bag(
                i, leaf, o, mode=mode, per_sample_weights=more, include_last_offset=last
            )
            y.square().sum().backward()
            results += [y.detach().cpu(), leaf.grad.cpu().clone()]  # type: ignore[union-attr]
    for expected, actual in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(actual, expected)
    ipex_xpu_kernels.set_fallback_mode("error")
    F.embedding_bag(indices.to("xpu"), weight.to("xpu"), offsets.to("xpu"), mode=mode)


@pytest.mark.parametrize(
    "roi", [[2, 1, 1, 2, 2], [-1, 1, 1, 2, 2], [0.5, 1, 1, 2, 2], [0, 1, float("nan"), 2, 2]]
)
def test_boxes_of_no_image(roi: list[float]) -> None:
    rois = torch.tensor([[1.0, 0, 0, 3, 3], roi])
    raises_as_on_the_host("roi_align", torch.ones(2, 3, 8, 8), rois, 1.0, 2, 2)
    raises_as_on_the_host(
        *(
            "roi_align_backward",
            torch.ones(2, 3, 2, 2),
            rois,
            1.0,
            2,
            2,
            2,
            3,
            8,
            8,
            -1,
            False,
            True,
        )
    )


def test_boxes_in_maps_without_pixels() -> None:
    for shape in ((1, 3, 0, 4), (1, 3, 4, 0)):
        rois = torch.tensor([[0.0, -2, -2, 3, 3]], device="xpu")
        y = torch.ops.ipex.roi_align(torch.ones(shape, device="xpu"), rois, 1.0, 2, 2)
        assert torch.equal(y.cpu(), torch.zeros(1, 3, 2, 2))


def test_the_same_boxes_stay_as_on_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.randint(0, 40, (3, 700, 4), generator=generator)  # many equal ones
    boxes = torch.stack(
        [*corners.unbind(-1)[:2], *(corners[..., :2] + corners[..., 2:] % 17).unbind(-1)], -1
    ).float()
    scores = torch.randint(0, 50, (3, 700), generator=generator).float()  # many ties
    for rest in ((0.5,), (0.25, True, 0.0), (0.6, False, 1.0, 10.0, 300, 40)):
        expected = torch.ops.ipex.nms_mask(boxes, scores, *rest)
        actual = torch.ops.ipex.nms_mask(boxes.to("xpu"), scores.to("xpu"), *rest)
        assert torch.equal(actual.cpu(), expected)
        assert 0 < expected.sum() < expected.numel()


@pytest.mark.parametrize("kind", [MergedEmbeddingBagWithSGD, MergedEmbeddingBagWithAdaGrad])
def test_tables_that_the_backward_pass_updates_move_with_their_state(kind: Any) -> None:
    torch.manual_seed(0)
    bags = [torch.nn.EmbeddingBag(20, 8, mode="sum") for _ in range(2)]
    model = kind.from_embeddingbag_list(bags, lr=0.1)
    lookups = [
        torch.randint(0, 20, (2, 12)).unbind(0),
        torch.arange(0, 12, 3).expand(2, 4).unbind(0),
    ]
    tables = []
    for device in ("cpu", "xpu"):
        moving = copy.deepcopy(model).to(device)
        for _ in range(2):
            results = moving(*([t.to(device) for t in part] for part in lookups))
            interaction(*results).square().mean().backward()
        tables.append([p.detach().cpu() for p in moving.parameters()])
    for expected, actual in zip(*tables, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

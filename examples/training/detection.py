# SPDX-License-Identifier: Apache-2.0
"""Train a small single-shot detector (SSD) to find colored boxes in generated pictures."""

from __future__ import annotations

import torch
from session import DTYPES, Session, parser
from torch import nn

import ipex
from ipex.nn.functional import batch_score_nms, parallel_scale_back_batch

Tensor = torch.Tensor

SIZE, CLASSES, CELLS = 64, 3, 8  # pixels, classes (0 is the background), cells along a side
SCALES = (0.25, 0.45)  # of the prior boxes of a cell
CENTER, EXTENT = 0.1, 0.2  # variances that locations are measured in


def priors() -> Tensor:
    """Return the prior boxes ``[8 * 8 * 2, 4]``: center and size, in units of the picture."""
    at = (torch.arange(CELLS) + 0.5) / CELLS
    y, x = torch.meshgrid(at, at, indexing="ij")
    centers = torch.stack([x, y], -1).reshape(-1, 1, 2).expand(-1, len(SCALES), 2)
    sizes = torch.tensor(SCALES)[None, :, None].expand(CELLS * CELLS, -1, 2)
    return torch.cat([centers, sizes], -1).reshape(-1, 4)


def corners(boxes: Tensor) -> Tensor:
    """Return left, top, right, bottom of boxes given by center and size."""
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Return intersection over union of all pairs of boxes given by corners."""
    low, high = torch.maximum(a[:, None, :2], b[:, :2]), torch.minimum(a[:, None, 2:], b[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (a, b)]
    return shared / (areas[0][:, None] + areas[1] - shared)


def pictures(count: int, seed: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return pictures ``[count, 3, 64, 64]`` with a red or a green box each, the boxes, and their classes."""
    chance = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.rand(count, 3, SIZE, SIZE, generator=chance)
    boxes, labels = [], []
    for image in images:
        size = 0.2 + 0.3 * torch.rand(2, generator=chance)
        center = size / 2 + (1 - size) * torch.rand(2, generator=chance)
        label = int(torch.randint(1, CLASSES, (1,), generator=chance))
        box = torch.cat([center, size])
        left, top, right, bottom = (corners(box) * SIZE).round().int().tolist()
        image[label - 1, top:bottom, left:right] += 0.7
        boxes.append(box[None])
        labels.append(torch.tensor([label]))
    return images, boxes, labels


class Detector(nn.Module):
    """Convolutions, and for each prior box a location and the scores of the classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [
                nn.Conv2d(before, after, 3, 2, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Conv2d(64, len(SCALES) * (4 + CLASSES), 3, padding=1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return locations ``[B, priors, 4]`` and scores ``[B, priors, classes]``."""
        found = self.head(self.backbone(images)).permute(0, 2, 3, 1)
        found = found.reshape(images.shape[0], -1, 4 + CLASSES)
        return found[..., :4], found[..., 4:]


def targets(prior: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each prior box the location it should tell and its class."""
    overlap = overlaps(corners(prior), corners(boxes))
    best, which = overlap.max(1)
    which[overlap.argmax(0)] = torch.arange(len(boxes))  # each box has a prior
    best[overlap.argmax(0)] = 1.0
    box = boxes[which]
    where = torch.cat(
        [
            (box[:, :2] - prior[:, :2]) / prior[:, 2:] / CENTER,
            (box[:, 2:] / prior[:, 2:]).log() / EXTENT,
        ],
        1,
    )
    return where, torch.where(best > 0.5, labels[which], 0)


def loss_of(locations: Tensor, scores: Tensor, wanted: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the loss of SSD: three of the hardest background boxes for each that holds something."""
    where = torch.stack([pair[0] for pair in wanted])
    label = torch.stack([pair[1] for pair in wanted])
    full = label > 0
    location = nn.functional.smooth_l1_loss(locations[full], where[full], reduction="sum")
    entropy = nn.functional.cross_entropy(scores.transpose(1, 2), label, reduction="none")
    rank = entropy.detach().masked_fill(full, 0).argsort(1, descending=True).argsort(1)
    hard = rank < 3 * full.sum(1, keepdim=True)
    return (location + entropy[full | hard].sum()) / full.sum()


def main() -> None:
    """Run the example."""
    options = parser(__doc__)
    options.add_argument("--lr", type=float, default=3e-3)
    options.set_defaults(batch=16)
    args = options.parse_args()
    torch.manual_seed(args.seed)
    prior = priors()
    model = Detector().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dtype = DTYPES[args.dtype]
    model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=dtype, inplace=True)

    def found_in(images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
            locations, scores = model(images)
        return locations.float(), scores.float()

    def step(number: int) -> float:
        images, boxes, labels = pictures(args.batch, 1 + number)
        wanted = [targets(prior, *pair) for pair in zip(boxes, labels, strict=True)]
        optimizer.zero_grad()
        loss = loss_of(*found_in(images), wanted)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    session = Session(args, {"model": model, "optimizer": optimizer}, "detection")
    losses = session.run(step)

    model.eval()
    images, boxes, labels = pictures(32, 0)  # of no step
    right = 0
    with torch.no_grad():
        decoded, chances = parallel_scale_back_batch(*found_in(images), prior[None], CENTER, EXTENT)
        best, classes, values, counts = batch_score_nms(decoded, chances, 0.5, 5)
    starts = [0, *counts.cumsum(0).tolist()]
    for i, (box, label) in enumerate(zip(boxes, labels, strict=True)):
        part = slice(starts[i], starts[i + 1])
        if values[part].numel():
            top = int(values[part].argmax())
            overlap = overlaps(best[part][top : top + 1], corners(box))
            right += int(overlap[0, 0] > 0.5 and classes[part][top] == label[0])
    session.report(steps=len(losses), loss=losses[-1], found=right / len(images))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What a lower room asks of a higher one: the package, which lies above all rooms, fills it in."""

from __future__ import annotations

from collections.abc import Callable

#: Called once a model of transformers has quantized layers: ``from_pretrained`` then reads folders of such models.
on_describe: list[Callable[[], None]] = []

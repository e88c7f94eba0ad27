# SPDX-License-Identifier: Apache-2.0
"""Object detection: NMS, RoIAlign, anchor boxes."""

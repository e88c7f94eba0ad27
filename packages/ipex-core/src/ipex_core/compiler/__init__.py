# SPDX-License-Identifier: Apache-2.0
"""The backend of `torch.compile`: options, freezing, the run without Inductor."""

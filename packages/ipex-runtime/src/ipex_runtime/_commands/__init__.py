# SPDX-License-Identifier: Apache-2.0
"""Sub-commands of ``ipex``, found through the entry-point group ``ipex.commands``."""

# SPDX-License-Identifier: Apache-2.0
"""HyperTune: searches the options of the launcher with which a script is fastest."""

# SPDX-License-Identifier: Apache-2.0
"""The configuration of a search for the best launch options, from YAML or from Python."""

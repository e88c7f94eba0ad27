# SPDX-License-Identifier: Apache-2.0
"""Fusion of graphs: one folder for each front end."""

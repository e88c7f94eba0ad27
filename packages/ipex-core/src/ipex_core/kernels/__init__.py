# SPDX-License-Identifier: Apache-2.0
"""Providers of kernels, ISA levels of this machine, and the thresholds that choose a kernel."""

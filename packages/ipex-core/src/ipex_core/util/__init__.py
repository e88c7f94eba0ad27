# SPDX-License-Identifier: Apache-2.0
"""Files, console, memory and other helpers that know nothing of ops."""

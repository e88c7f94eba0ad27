# SPDX-License-Identifier: Apache-2.0
"""Architecture of a decoder: description, detection by probing, reference implementation."""

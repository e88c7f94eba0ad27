# SPDX-License-Identifier: Apache-2.0
"""The command line and the server."""

# SPDX-License-Identifier: Apache-2.0
"""`ipex bench` and `ipex demo`."""

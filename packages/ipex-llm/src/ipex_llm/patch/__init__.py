# SPDX-License-Identifier: Apache-2.0
"""What `ipex.llm.optimize` puts on the user's model: decoder, layer and generate mixins."""

# SPDX-License-Identifier: Apache-2.0
"""What users ask: doctor, explain, op_info, show_config."""

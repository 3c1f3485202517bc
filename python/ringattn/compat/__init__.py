# SPDX-License-Identifier: Apache-2.0
"""Functions of other packages under their names and arguments, computed by this one."""

# SPDX-License-Identifier: Apache-2.0
"""Parts of :func:`ringattn.measure_profiles`: timers, workloads, links, devices, speeds."""

# SPDX-License-Identifier: Apache-2.0
"""What :func:`ringattn.measure_profiles` is made of: timers, workloads, links, devices, speeds."""

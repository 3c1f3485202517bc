# SPDX-License-Identifier: Apache-2.0
"""Writes ptx/wgmma.cuh: python3 generate_wgmma.py > ptx/wgmma.cuh

wgmma takes every accumulator as an operand of its own, up to 128 of them, so its wrappers are
better written by a program.
"""

from __future__ import annotations

from textwrap import fill

ELEMENTS = {"__nv_bfloat16": "bf16", "__half": "f16"}
SCORE_WIDTHS = (48, 64, 80, 128)  # kBlockK of the tiles, kPartKeys of one, kBlockQ of the backward
VALUE_WIDTHS = (64, 128, 256)  # kHeadDim of the tiles
QUERY_GRADIENT_WIDTHS = (64,)  # columns of dq that a warpgroup of the backward computes
# Columns of dq, and of dk and dv where their weights are in shared memory.
ROW_GRADIENT_WIDTHS = (64, 128)
TERM_WIDTHS = (64, 128)  # kBlockQ of the backward's tiles

HEADER = """\
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Written by generate_wgmma.py.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/cuda/sm90/ptx/wgmma_group.cuh"

// clang-format off

namespace ringattn::cuda::sm90 {

/// d [64, kN] (+)= a [64, 16] @ b [kN, 16].T, both in shared memory, K-major. Lane 4 * g + t of
/// warp w holds rows 16 * w + g and 8 below it, columns 8 * n + 2t and the next one:
/// d[4 * n + 2 * half + c].
template <typename Element, int kN> struct ProductOfShared;

/// d [64, kN] (+)= a [64, 16] @ b [16, kN], a in registers: of rows 16 * w + g and 8 below it,
/// columns 2t and the next one, then columns 8 + 2t; b in shared memory, N-major.
template <typename Element, int kN> struct ProductOfRegisters;

/// d [64, kN] (+)= a [16, 64].T @ b [16, kN], both in shared memory: a M-major, b N-major, which
/// OperandDescriptor::n_major describes alike.
template <typename Element, int kN> struct ProductOfTransposed;

/// d [64, kN] (+)= a [64, 16] @ b [16, kN], both in shared memory: a K-major, b N-major.
template <typename Element, int kN> struct ProductOfRows;

/// d [64, kN] += a [64, 16] @ b [kN, 16].T; bfloat16, a in registers, b in shared memory, K-major.
template <int kN> struct ProductOfTerms;
"""


def lines(text: str, indent: str) -> str:
    return fill(text, width=98, initial_indent=indent, subsequent_indent=indent)


def asm_operands(count: int) -> str:
    """The accumulators' list inside the instruction, as string literals."""
    text = ", ".join(f"%{i}" for i in range(count))
    wrapped = fill(text, width=80).split("\n")
    return "\n".join(f'        "{line} "' for line in wrapped)


def outputs(count: int) -> str:
    return lines(", ".join(f'"+f"(d[{i}])' for i in range(count)), "        ")


def of_shared(struct: str, major: str, element: str, name: str, n: int) -> str:
    k = n // 2
    return f"""
template <> struct {struct}<{element}, {n}> {{
  template <bool kAccumulate>
  static __device__ __forceinline__ void issue(float (&d)[{k}], uint64_t a, uint64_t b) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{k + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} {{"
{asm_operands(k)}
        "}}, %{k}, %{k + 1}, p, 1, 1, {major}; }}"
        :
{outputs(k)}
        : "l"(a), "l"(b), "n"(int(kAccumulate)));
  }}
}};
"""


def of_registers(struct: str, major: int, name: str, n: int) -> str:
    k = n // 2
    return f"""
template <> struct {struct} {{
  template <bool kAccumulate = true>
  static __device__ __forceinline__ void issue(float (&d)[{k}], uint32_t a0, uint32_t a1,
                                               uint32_t a2, uint32_t a3, uint64_t b) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{k + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} {{"
{asm_operands(k)}
        "}}, {{%{k}, %{k + 1}, %{k + 2}, %{k + 3}}}, %{k + 4}, p, 1, 1, {major}; }}"
        :
{outputs(k)}
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(int(kAccumulate)));
  }}
}};
"""


def main() -> None:
    parts = [HEADER]
    for element, name in ELEMENTS.items():
        parts += [of_shared("ProductOfShared", "0, 0", element, name, n) for n in SCORE_WIDTHS]
        parts += [
            of_registers(f"ProductOfRegisters<{element}, {n}>", 1, name, n) for n in VALUE_WIDTHS
        ]
        parts += [
            of_shared("ProductOfTransposed", "1, 1", element, name, n)
            for n in QUERY_GRADIENT_WIDTHS
        ]
        parts += [of_shared("ProductOfRows", "0, 1", element, name, n) for n in ROW_GRADIENT_WIDTHS]
    parts += [of_registers(f"ProductOfTerms<{n}>", 0, "bf16", n) for n in TERM_WIDTHS]
    parts.append("\n}  // namespace ringattn::cuda::sm90")
    print("".join(parts))


if __name__ == "__main__":
    main()

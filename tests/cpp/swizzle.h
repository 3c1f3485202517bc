// SPDX-License-Identifier: Apache-2.0
#pragma once

// The 128-byte swizzle, as tests expect it of the copy engine and give it to the tensor cores.

constexpr int kSwizzledColumns = 64;  // of 16 bits: a row of 128 bytes

/// Where element (row, column) of [rows][64] lies: the row's 8 chunks of 16 bytes change places by
/// the row's number.
constexpr int swizzled(int row, int column) {
  const int chunk = column / 8 ^ row % 8;
  return row * kSwizzledColumns + chunk * 8 + column % 8;
}

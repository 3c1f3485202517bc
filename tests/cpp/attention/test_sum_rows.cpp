// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <array>
#include <vector>

#include "attention/sum_rows.h"
#include "catch.h"
#include "operator_devices.h"

using ringattn::RowRange;
using ringattn::RowsToAdd;

namespace {

// Integers, of which every sum of a few is exact in all of the types.
at::Tensor integers(int64_t rows, const at::TensorOptions& options) {
  return at::randint(-3, 4, {2, 2, rows, 3, 8}, options);
}

}  // namespace

TEST_CASE("parts of rows are added to a sum, in any number, and rounded to any type") {
  constexpr int64_t kRows = 67;
  at::manual_seed(5);
  for (const at::TensorOptions& options : devices()) {
    const at::ScalarType exact = at::typeMetaToScalarType(options.dtype());
    for (const int64_t num_parts : {0, 1, 7, 16, 17, 40}) {
      for (const at::ScalarType type : {at::kHalf, at::kBFloat16, exact}) {
        INFO(num_parts << " parts, " << options.device() << ", " << c10::toString(type));
        const at::Tensor sum = integers(kRows, options), expected = sum.clone();
        std::vector<RowsToAdd> parts;
        for (int64_t i = 0; i < num_parts; ++i) {
          // Rows within memory of more rows, as of a set with gaps.
          const RowRange rows = {(i * 11) % kRows, std::min(kRows, (i * 11) % kRows + i % 30)};
          const at::Tensor x = integers(rows.size() + 5, options).narrow(2, 3, rows.size());
          expected.narrow(2, rows.begin, rows.size()).add_(x);
          parts.push_back({x, rows});
        }
        std::array<at::Tensor, 2> out;
        for (at::Tensor& half : out) half = at::empty({2, kRows, 3, 8}, options.dtype(type));
        ringattn::sum_rows(sum, parts, out);
        for (int64_t i = 0; i < 2; ++i) CHECK(at::equal(out[i].to(exact), expected.select(0, i)));
      }
    }
    // In place.
    const at::Tensor sum = integers(kRows, options), x = integers(kRows, options),
                     expected = sum + x;
    ringattn::sum_rows(sum, {{x, {0, kRows}}}, {sum.select(0, 0), sum.select(0, 1)});
    CHECK(at::equal(sum, expected));
  }
}

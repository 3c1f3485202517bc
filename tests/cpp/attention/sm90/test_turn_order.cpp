// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/cuda/query_bounds.h"
#include "attention/cuda/sm90/backward/turn_order.h"
#include "catch.h"

// Thread blocks that add to dq in turns (turn_order.h), in any interleaving, without a device.

namespace {

using namespace ringattn::cuda::sm90;
using ringattn::cuda::QueryBounds;
using ringattn::cuda::QueryRange;

struct WorkTile {
  int plane, index;
  bool descending;
  int order;  // of its adds, among all work tiles
  AwaitedTiles awaited;
};

struct Call {
  std::mt19937 random;
  int planes, planes_per_slice, clusters, heads, num_key_tiles, block_q, block_k;
  std::vector<int32_t> table;
  QueryBounds bounds = {};

  explicit Call(uint32_t seed) : random(seed) {
    planes = 1 + below(5);
    planes_per_slice = 1 + below(planes);
    clusters = 1 + below(9);
    heads = 1 + below(3);
    block_q = 1 + below(3);
    block_k = 1 + below(4);
    bounds.num_queries = 1 + below(30);
    bounds.num_keys = 1 + below(30);
    num_key_tiles = (bounds.num_keys + block_k - 1) / block_k;
    bounds.diagonal = below(bounds.num_queries + bounds.num_keys + 1) - bounds.num_queries;
    bounds.first_query = below(3) == 0 ? below(bounds.num_queries) : 0;
  }
  int below(int end) { return static_cast<int>(random() % end); }
  int last_query_tile() const { return (bounds.num_queries - 1) / block_q; }

  void use_table(bool rises) {
    std::vector<int32_t> begins(bounds.num_keys), ends(bounds.num_keys);
    for (auto* x : {&begins, &ends}) {
      for (int32_t& row : *x) row = below(bounds.num_queries + 6) - 3 + (x == &ends ? below(6) : 0);
      if (rises) std::sort(x->begin(), x->end());
    }
    for (int key = 0; key < bounds.num_keys; ++key) {
      table.insert(table.end(), {begins[key], ends[key]});
    }
    bounds.ranges = reinterpret_cast<const QueryRange*>(table.data());
  }

  /// From the first row of the first key that some row sees to the last row of the last one.
  QueryRange rows_of(int index) const {
    QueryRange rows = {0, 0};
    for (int key = index * block_k; key < (index + 1) * block_k; ++key) {
      const QueryRange seen = bounds.range(key);
      if (!seen.empty()) rows = {rows.empty() ? seen.begin : rows.begin, seen.end};
    }
    return rows;
  }

  /// What for_each_key_tile goes through: a list for each cluster.
  std::vector<std::vector<WorkTile>> in_rounds() const {
    std::vector<std::vector<WorkTile>> lists(clusters);
    int order = 0;
    for (int first = 0; first < planes; first += planes_per_slice) {
      const int slice_planes = std::min(planes_per_slice, planes - first);
      for (int round = 0; round * clusters < slice_planes * num_key_tiles; ++round) {
        for (int cluster = 0; cluster < clusters; ++cluster, ++order) {
          const int place = round % 2 == 0 ? cluster : clusters - 1 - cluster;
          const int work_tile = round * clusters + place;
          if (work_tile >= slice_planes * num_key_tiles) continue;
          const int plane = work_tile % slice_planes, index = work_tile / slice_planes;
          lists[cluster].push_back({first + plane, index, round % 2 == 0, order,
                                    awaited_in_rounds({clusters, slice_planes, plane}, bounds,
                                                      index, num_key_tiles, block_q, block_k)});
        }
      }
    }
    return lists;
  }

  /// A list that all clusters take from.
  std::vector<std::vector<WorkTile>> by_ticket() const {
    std::vector<WorkTile> tiles;
    for (int first = 0; first < planes; first += planes_per_slice) {
      const int slice_planes = std::min(planes_per_slice, planes - first);
      for (int i = 0; i < slice_planes * num_key_tiles; ++i) {
        const int order = static_cast<int>(tiles.size()), index = i / slice_planes;
        tiles.push_back(
            {first + i % slice_planes, index, true, order,
             awaited_by_ticket(index, block_q, [&](int other) { return rows_of(other); })});
      }
    }
    return {tiles};
  }
};

/// Clusters that compute work tiles step by step, in an order drawn at random.
class Device {
 public:
  Device(Call& call, const std::vector<std::vector<WorkTile>>& lists)
      : call_(call),
        lists_(lists),
        taken_(lists.size()),
        progress_(call.planes * call.num_key_tiles) {
    for (const auto& list : lists) {
      for (const WorkTile& tile : list) {
        for (int step = 0; step < num_steps(tile); ++step)
          left_[place(tile, step)].insert(tile.order);
      }
    }
  }

  /// Fails where no cluster can go on and, of a table that rises, where a tile adds before an
  /// earlier one or waits although all earlier ones have added.
  void run(bool rises) {
    std::vector<Cluster> running;
    for (int i = 0; i < call_.clusters; ++i) {
      Cluster cluster = {i % lists_.size()};
      if (take(cluster)) running.push_back(cluster);
    }
    while (!running.empty()) {
      std::shuffle(running.begin(), running.end(), call_.random);
      const auto moving = std::find_if(running.begin(), running.end(), [&](Cluster& cluster) {
        if (cluster.step == num_steps(*cluster.tile)) return true;
        const std::set<int>& left = left_[place(*cluster.tile, cluster.step)];
        const bool is_next = *left.begin() == cluster.tile->order, waits = has_to_wait(cluster);
        if (rises && waits == is_next) FAIL((waits ? "waits for none" : "does not wait"));
        return !waits;
      });
      if (moving == running.end()) FAIL("every tile waits");
      advance(*moving);
      if (moving->step >= num_steps(*moving->tile) && !take(*moving)) running.erase(moving);
    }
  }

 private:
  struct Cluster {
    size_t list;
    const WorkTile* tile = nullptr;
    int step = 0;
  };
  using Place = std::tuple<int, int, int>;  // plane, query tile, head

  int num_steps(const WorkTile& tile) const {
    const auto [begin, end] = query_tiles(tile);
    return (end - begin) * call_.heads;
  }
  std::pair<int, int> query_tiles(const WorkTile& tile) const {
    const QueryRange rows = call_.rows_of(tile.index);
    if (rows.empty()) return {0, 0};
    return {rows.begin / call_.block_q, (rows.end + call_.block_q - 1) / call_.block_q};
  }
  Place place(const WorkTile& tile, int step) const {
    const auto [begin, end] = query_tiles(tile);
    const int at = step / call_.heads;
    return {tile.plane, tile.descending ? end - 1 - at : begin + at, step % call_.heads};
  }
  int come(const Place& at, bool descending) const {
    const auto [plane, query_tile, head] = at;
    const int last_query_tile = (call_.bounds.num_queries - 1) / call_.block_q;
    return progress_at(query_tile, head, call_.heads, last_query_tile, descending);
  }
  int& progress(int plane, int index) { return progress_[plane * call_.num_key_tiles + index]; }

  bool take(Cluster& cluster) {
    const std::vector<WorkTile>& list = lists_[cluster.list];
    size_t& taken = taken_[cluster.list];
    cluster.step = 0;
    cluster.tile = taken < list.size() ? &list[taken++] : nullptr;
    return cluster.tile != nullptr;
  }
  bool has_to_wait(const Cluster& cluster) {
    const WorkTile& tile = *cluster.tile;
    const Place at = place(tile, cluster.step);
    const AwaitedTile awaited =
        std::get<1>(at) >= tile.awaited.limit ? tile.awaited.from_limit : tile.awaited.below_limit;
    return awaited != kNoTile && progress(tile.plane, awaited / 2) < come(at, awaited % 2 != 0);
  }
  void advance(Cluster& cluster) {
    const WorkTile& tile = *cluster.tile;
    if (cluster.step == num_steps(tile)) return;
    const Place at = place(tile, cluster.step);
    left_[at].erase(tile.order);
    const bool is_last = ++cluster.step == num_steps(tile);
    progress(tile.plane, tile.index) = is_last ? INT32_MAX : come(at, tile.descending);
  }

  Call& call_;
  const std::vector<std::vector<WorkTile>>& lists_;
  std::vector<size_t> taken_;  // of each list
  std::vector<int> progress_;
  std::map<Place, std::set<int>> left_;  // the orders of those that have not added yet
};

}  // namespace

TEST_CASE("tiles in rounds add to dq in one order, and wait for earlier ones alone") {
  for (uint32_t seed = 1; seed <= 1000; ++seed) {
    INFO("seed " << seed);
    Call call(seed);
    const auto tiles = call.in_rounds();
    Device(call, tiles).run(/*rises=*/true);
  }
}

TEST_CASE("tiles by ticket add to dq in one order, and wait for earlier ones alone") {
  for (uint32_t seed = 1; seed <= 1000; ++seed) {
    INFO("seed " << seed);
    Call call(seed);
    call.use_table(/*rises=*/true);
    const auto tiles = call.by_ticket();
    Device(call, tiles).run(/*rises=*/true);
  }
}

TEST_CASE("no tile of a table that decreases waits for ever") {
  for (uint32_t seed = 1; seed <= 500; ++seed) {
    INFO("seed " << seed);
    Call call(seed);
    call.use_table(/*rises=*/false);
    const auto tiles = call.by_ticket();
    Device(call, tiles).run(/*rises=*/false);
  }
}

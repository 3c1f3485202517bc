// SPDX-License-Identifier: Apache-2.0
// The ranks of a group in one process: what they say through its store, and how it ends.
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"
#include "fake_backend.h"
#include "ops/checks.h"
#include "transport/group/group_context.h"

using namespace ringattn;
using ringattn::testing::FakeBackend;
using ringattn::testing::Store;
using std::chrono::milliseconds;

namespace {

constexpr auto kLong = milliseconds(60000);

// All ranks of a group.
struct Ranks {
  explicit Ranks(int64_t size, milliseconds timeout = kLong) {
    for (int64_t rank = 0; rank < size; ++rank) {
      groups.push_back(std::make_shared<GroupContext>(
          std::make_unique<FakeBackend>(store, rank, size, timeout)));
    }
  }
  GroupContext& operator[](int64_t rank) { return *groups[rank]; }

  // body(rank) on each of `which` at once; what each says when it throws, else "".
  template <typename Body>
  std::vector<std::string> at_once(const std::vector<int64_t>& which, const Body& body) {
    std::vector<std::string> said(groups.size());
    std::vector<std::thread> threads;
    for (const int64_t rank : which) {
      threads.emplace_back([&, rank] {
        try {
          body(rank);
        } catch (const c10::Error& error) {
          said[rank] = error.what_without_backtrace();
        } catch (const std::exception& error) {
          said[rank] = error.what();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    return said;
  }
  template <typename Body>
  std::vector<std::string> at_once(const Body& body) {
    std::vector<int64_t> all;
    for (size_t rank = 0; rank < groups.size(); ++rank) all.push_back(rank);
    return at_once(all, body);
  }

  Store store;
  std::vector<std::shared_ptr<GroupContext>> groups;
};

Signature call(int64_t heads) { return Signature("call").add("heads", heads); }

int64_t begin(GroupContext& group, int64_t heads) {
  return group.begin_call(std::make_shared<const Signature>(call(heads)), /*tagged=*/false);
}

bool begins_with(const std::string& text, const std::string& part) {
  return text.rfind(part, 0) == 0;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const std::vector<std::string> kNothing2 = {"", ""};

}  // namespace

TEST_CASE("a call that the ranks have agreed on needs no word of the others") {
  Ranks ranks(2);
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
  CHECK(ranks[0].agreement().knows(call(4)));
  CHECK(!ranks[0].agreement().knows(call(8)));
  // Alone: rank 1 has not come, and is not waited for.
  CHECK(begin(ranks[0], 4) == 1);
  CHECK(begin(ranks[1], 4) == 1);
}

TEST_CASE("what ranks have agreed on is forgotten once it takes much memory") {
  Ranks ranks(2);
  const auto begin_with = [](GroupContext& group, int64_t documents) {
    Signature signature = call(8);
    signature.in_every_call().add("cu_seqlens", std::vector<int64_t>(1 << 17, documents));
    group.begin_call(std::make_shared<const Signature>(std::move(signature)), /*tagged=*/false,
                     [] { return true; });
  };
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
  for (int64_t documents = 0; documents < 40; ++documents) {  // 1 MB each
    CHECK(ranks.at_once([&](int64_t rank) { begin_with(ranks[rank], documents); }) == kNothing2);
    CHECK(ranks[0].agreement().knows(call(4)) == (documents < 32));
  }
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
}

TEST_CASE(
    "a call that is new to one rank alone ends the group, however far the others have gone on") {
  for (const int calls_ahead : {0, 2, 100}) {
    CAPTURE(calls_ahead);
    Ranks ranks(3);
    CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) ==
          std::vector<std::string>(3));
    const auto said = ranks.at_once([&](int64_t rank) {
      if (rank == 0) begin(ranks[0], 8);  // waits for the others' words
      int64_t latest = begin(ranks[rank], 4);
      for (int i = 0; i < calls_ahead; ++i) latest = begin(ranks[rank], 4);
      // As the watchdog of what these ranks have launched.
      CallMonitor& calls = *ranks[rank].rendezvous().calls;
      std::optional<std::string> why;
      while (!(why = calls.ended_by(latest, ranks[rank].rendezvous().others()))) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      calls.fail(*why);
      calls.throw_if_failed();
    });
    for (const std::string& sentence : said) {
      CHECK(contains(sentence, calls_ahead < 64
                                   ? "ranks must agree on heads, got 8 on rank 0 and 4 on rank "
                                   : "got one on rank 0 that is new to it, and one on rank "));
      CHECK(contains(sentence, "; the group cannot be used any more"));
    }
  }
}

TEST_CASE("a call that one rank refuses ends the group, however far the others have gone on") {
  for (const int calls_ahead : {0, 2, 100}) {
    CAPTURE(calls_ahead);
    Ranks ranks(3);
    CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) ==
          std::vector<std::string>(3));
    ranks[0].refuse_call("q must be right");
    for (const int64_t rank : {1, 2}) {
      int64_t latest = begin(ranks[rank], 4);
      for (int i = 0; i < calls_ahead; ++i) latest = begin(ranks[rank], 4);
      const Rendezvous& rendezvous = ranks[rank].rendezvous();
      CHECK(rendezvous.calls->ended_by(latest, rendezvous.others()) ==
            "rank 0 refused a call that other ranks have begun: q must be right; the group cannot "
            "be used any more");
    }
  }
}

TEST_CASE("a refusal ends no calls but those that wait for the rank") {
  Ranks ranks(2);
  const auto exchange = [](GroupContext& group) {
    group.begin_call(std::make_shared<const Signature>(Signature("exchange")), /*tagged=*/true);
  };
  int64_t waits = 0;  // the number of a call that has been launched
  const auto launch = [&] {
    for (const int64_t rank : {0, 1}) waits = begin(ranks[rank], 4);
  };
  const auto ended = [&] {
    const Rendezvous& rendezvous = ranks[1].rendezvous();
    return rendezvous.calls->ended_by(waits, rendezvous.others());
  };
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
  CHECK(ranks.at_once([&](int64_t rank) { exchange(ranks[rank]); }) == kNothing2);
  launch();
  SECTION("one rank has refused a call whose messages carry tags") {
    ranks[0].refuse_call("q must be right");
    exchange(ranks[1]);
  }
  SECTION("all ranks have refused one") {
    for (const int64_t rank : {0, 1}) ranks[rank].refuse_call("q must be right");
    for (const int64_t rank : {0, 1}) exchange(ranks[rank]);
  }
  CHECK(!ended());
}

TEST_CASE("a rank that has compared a call is told nothing about it while it waits in the next") {
  Ranks ranks(2);
  for (const int64_t heads : {4, 8, 4}) {
    CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], heads); }) == kNothing2);
    for (const int64_t rank : {0, 1}) {
      CallMonitor& calls = *ranks[rank].rendezvous().calls;
      CHECK(!calls.ended_by(ranks[rank].latest_call(), {1 - rank}));
    }
  }
}

TEST_CASE("what is compared in every call may be new without a word, where a tag tells") {
  Ranks ranks(2);
  std::atomic<int> times_asked = 0;
  const auto begin_with = [&](int64_t rank, int64_t documents, bool by_kind) {
    auto asked = std::make_shared<Signature>(call(4));
    asked->in_every_call().add("documents", documents);
    return ranks[rank].begin_call(asked, /*tagged=*/false, [&] {
      ++times_asked;
      return by_kind;
    });
  };
  for (int call = 0; call < 2; ++call) {
    CHECK(ranks.at_once([&](int64_t rank) { begin_with(rank, 1, true); }) == kNothing2);
  }
  CHECK(times_asked == 0);  // neither of a new kind nor of what is known as a whole
  // Alone: nothing of rank 1 is waited for.
  CHECK(begin_with(0, 2, true) == 2);
  CHECK(begin_with(1, 3, true) == 2);
  CHECK(times_asked == 2);
  CHECK(ranks[0].agreement().call_tag() != ranks[1].agreement().call_tag());
  const auto said = ranks.at_once([&](int64_t rank) { begin_with(rank, 4 + rank, false); });
  CHECK(contains(said[0], "ranks must agree on documents, got 4 on rank 0 and 5 on rank 1"));
  CHECK(said[1] == said[0]);
}

TEST_CASE("messages of one call are marked alike, and unlike those of others") {
  Ranks ranks(2);
  std::set<int32_t> tags;
  for (int call = 0; call < 3; ++call) {
    CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
    for (int64_t step = 1; step <= 2; ++step) {
      CHECK(ranks[0].agreement().message_tag(step) == ranks[1].agreement().message_tag(step));
      tags.insert(ranks[0].agreement().message_tag(step));
    }
  }
  CHECK(tags.size() == 6);
}

TEST_CASE("calls of one kind are marked alike, known or not, and unlike those of others") {
  Ranks ranks(2);
  std::set<int32_t> kinds;
  for (const int64_t heads : {4, 8, 4, 8}) {
    CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], heads); }) == kNothing2);
    CHECK(ranks[0].agreement().call_tag() == ranks[1].agreement().call_tag());
    CHECK(ranks[0].agreement().call_tag() >= 0);
    kinds.insert(ranks[0].agreement().call_tag());
  }
  CHECK(kinds.size() == 2);
}

TEST_CASE("ranks that ask for different things are all told, and the group works on") {
  Ranks ranks(3);
  const auto said = ranks.at_once([&](int64_t rank) { begin(ranks[rank], rank == 2 ? 8 : 4); });
  for (const std::string& sentence : said) {
    CHECK(sentence == "ringattn: ranks must agree on heads, got 4 on rank 0 and 8 on rank 2");
  }
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == std::vector<std::string>(3));
}

TEST_CASE("what one rank refuses all ranks are told, and the group works on") {
  Ranks ranks(3);
  const auto said = ranks.at_once([&](int64_t rank) {
    Signature asked = check_call(ranks[rank], [&] {
      TORCH_CHECK(rank != 1, "ringattn: q must be good, got bad");
      return call(4);
    });
    ranks[rank].begin_call(std::make_shared<const Signature>(std::move(asked)), /*tagged=*/false);
  });
  CHECK(said[1] == "ringattn: q must be good, got bad");
  CHECK(said[0] == "ringattn: rank 1: q must be good, got bad");
  CHECK(said[2] == said[0]);
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == std::vector<std::string>(3));
}

TEST_CASE("a rank that refused a call that the others made is out of step: the group ends") {
  Ranks ranks(2);
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
  begin(ranks[0], 4);
  ranks[1].refuse_call("ringattn: q must be good, got bad");
  const auto said = ranks.at_once([&](int64_t rank) { begin(ranks[rank], 8); });
  for (const std::string& sentence : said) {
    CHECK(contains(sentence, "got 2 on rank 0 and 1 on rank 1"));
    CHECK(contains(sentence, "the group cannot be used any more"));
  }
  for (const int64_t rank : {0, 1}) CHECK_THROWS_AS(begin(ranks[rank], 4), c10::DistBackendError);
}

TEST_CASE("a rank that does not come is named, and the group ends") {
  Ranks ranks(3, milliseconds(2000));
  const auto said = ranks.at_once({0, 2}, [&](int64_t rank) { begin(ranks[rank], 4); });
  for (const int64_t rank : {0, 2}) {
    CHECK(said[rank] ==
          "rank 1 did not come to step 0 of call within the group's timeout of 2000 ms");
    CHECK_THROWS_AS(ranks[rank].failures().throw_if_failed(), c10::DistBackendError);
  }
}

TEST_CASE("a call that waits in vain says why the group has failed meanwhile") {
  Ranks ranks(2);
  std::thread watchdog([&] {
    std::this_thread::sleep_for(milliseconds(100));
    ranks[0].failures().fail("rank 1 is in another call");
  });
  const auto said = ranks.at_once({0}, [&](int64_t rank) { begin(ranks[rank], 4); });
  watchdog.join();
  CHECK(said[0] == "rank 1 is in another call");
}

TEST_CASE("a rank that fails in the middle of a call ends the group, and says so to the others") {
  Ranks ranks(2, milliseconds(5000));
  std::vector<int64_t> calls(2);
  CHECK(ranks.at_once([&](int64_t rank) { calls[rank] = begin(ranks[rank], 4); }) == kNothing2);
  const auto fails = [&] {
    ranks[0].run(calls[0], []() -> int { throw std::runtime_error("out of memory"); });
  };
  CHECK_THROWS_AS(fails(), std::runtime_error);
  const std::string failure =
      "rank 0 failed in a call, and is out of step with the others: out of memory; the group "
      "cannot be used any more";
  CHECK(ranks.at_once({0}, [&](int64_t) { ranks[0].failures().throw_if_failed(); })[0] == failure);
  ranks[0].failures().fail("something else");  // the first failure is the one to be told of
  CHECK(ranks.at_once({0}, [&](int64_t) { ranks[0].failures().throw_if_failed(); })[0] == failure);

  const std::string blame = ranks[1].failures().blame(calls[1], /*step=*/1, {0}, "no data came");
  CHECK(
      blame ==
      "rank 0 did not take part in step 1 of the ring within the group's timeout of 5000 ms, rank "
      "0 failed in the call: out of memory (no data came); the group cannot be used any more");
}

TEST_CASE("a rank that alone cannot have a transport ends the group") {
  Ranks ranks(2, milliseconds(5000));
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
  CHECK_THROWS_AS(ranks[0].transport("process_group", c10::kCPU), std::runtime_error);
  CHECK_THROWS_AS(ranks[0].failures().throw_if_failed(), c10::DistBackendError);
  CHECK(contains(ranks[1].failures().blame(0, 1, {0}, "silence"),
                 "rank 0 failed in the call: no backend today"));
}

TEST_CASE("a body's result is handed on") {
  Ranks ranks(1);
  CHECK(ranks[0].run(0, [] { return 7; }) == 7);
  CHECK_NOTHROW(ranks[0].failures().throw_if_failed());
}

TEST_CASE("a rank that is gone is distinguished from ranks that have detected nothing yet") {
  // Rank 3 is gone. Rank 2 waits for it; 0 and 1 wait for 2 and 3, and for 3 and 2.
  Ranks ranks(4, milliseconds(10000));
  std::vector<std::string> blamed(4);
  const std::vector<std::vector<int64_t>> suspects = {{2, 3}, {3, 2}, {3}};
  ranks.at_once({0, 1, 2}, [&](int64_t rank) {
    blamed[rank] = ranks[rank].failures().blame(0, 1, suspects[rank], "silence");
  });
  for (const int64_t rank : {0, 1, 2}) CHECK(begins_with(blamed[rank], "rank 3 did not take part"));
}

TEST_CASE("of the silent ranks the one that most ranks wait for is gone") {
  // Rank 2 is gone; rank 3 waits for no rank and has not detected it. Rank 0 suspects both.
  Ranks ranks(4, milliseconds(10000));
  std::vector<std::string> blamed(4);
  const std::vector<std::vector<int64_t>> suspects = {{3, 2}, {2}};
  ranks.at_once({0, 1}, [&](int64_t rank) {
    blamed[rank] = ranks[rank].failures().blame(0, 1, suspects[rank], "silence");
  });
  for (const int64_t rank : {0, 1}) CHECK(begins_with(blamed[rank], "rank 2 did not take part"));
}

TEST_CASE("where equally many ranks wait for several silent ones all of them are named") {
  Ranks ranks(4, milliseconds(5000));
  CHECK(begins_with(ranks[0].failures().blame(0, 1, {1, 2}, "silence"),
                    "rank 1 or rank 2 did not take part"));
}

TEST_CASE("where all ranks have detected a failure none is named, but the only suspect") {
  Ranks ranks(3, milliseconds(10000));
  std::vector<std::string> blamed(3);
  const std::vector<std::vector<int64_t>> suspects = {{1, 2}, {0, 2}, {0}};
  ranks.at_once([&](int64_t rank) {
    blamed[rank] = ranks[rank].failures().blame(0, 1, suspects[rank], "silence");
  });
  CHECK(begins_with(blamed[0], "a rank did not take part"));
  CHECK(begins_with(blamed[1], "a rank did not take part"));
  CHECK(begins_with(blamed[2], "rank 0 did not take part"));
}

TEST_CASE("of several suspects the one that refused the call is named") {
  Ranks ranks(3, milliseconds(5000));
  ranks[2].refuse_call("ringattn: kv must be good, got bad");  // call 0
  const std::string blame = ranks[0].failures().blame(0, 1, {1, 2}, "silence");
  CHECK(begins_with(blame, "rank 2 did not take part in step 1 of the ring"));
  CHECK(contains(blame, "rank 2 refused the call: kv must be good, got bad"));
}

TEST_CASE("a rank that failed in the call does not hide one that is gone") {
  Ranks ranks(3, milliseconds(5000));
  const auto fails = [&] {
    ranks[1].run(0, []() -> int { throw std::runtime_error("a link is down"); });
  };
  CHECK_THROWS_AS(fails(), std::runtime_error);
  const std::string blame = ranks[0].failures().blame(0, 1, {1, 2}, "silence");
  CHECK(begins_with(blame, "rank 1 or rank 2 did not take part in step 1 of the ring"));
  CHECK(contains(blame, "rank 1 failed in the call: a link is down"));
}

TEST_CASE("values that another process has written to the store end the group, nothing worse") {
  Ranks ranks(2, milliseconds(5000));
  ranks.store.put("failed/1", "-7 99 junk");
  CHECK(begins_with(ranks[0].failures().blame(0, 1, {1}, "silence"), "rank 1 did not take part"));
  ranks.store.put("call/0/1", "");
  CHECK_THROWS_AS(begin(ranks[0], 4), c10::DistBackendError);
  CHECK_THROWS_AS(ranks[0].failures().throw_if_failed(), c10::DistBackendError);
}

TEST_CASE("a collective of another library that fails ends the group with its name") {
  Ranks ranks(2, milliseconds(5000));
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
  const std::string sentence =
      "rank 1 did not take part in step 0 of gather within the group's timeout of 5000 ms (it "
      "hung up); the group cannot be used any more";
  for (int times = 0; times < 2; ++times) {  // and so does every later one
    CHECK(ranks.at_once({0}, [&](int64_t) {
      ranks[0].failures().end(0, "gather", "it hung up");
    })[0] == sentence);
  }
}

TEST_CASE("exchanged strings are by rank, and the store keeps the latest ones only") {
  Ranks ranks(3);
  const std::vector<std::string> expected = {"rank 0", "rank 1", "rank 2"};
  for (int times = 0; times < 5; ++times) {
    std::vector<std::vector<std::string>> words(3);
    ranks.at_once(
        [&](int64_t rank) { words[rank] = ranks[rank].exchange("rank " + std::to_string(rank)); });
    for (const auto& heard : words) CHECK(heard == expected);
  }
  CHECK(ranks.store.size() == 3);
}

TEST_CASE("an exchange in a call of its own ends where a peer refuses it or is in another call") {
  Ranks ranks(2);
  const auto exchange = [&](int64_t rank) { ranks[rank].exchange_in_call("word", "gather"); };
  CHECK(ranks.at_once(exchange) == kNothing2);
  CHECK(ranks.at_once([&](int64_t rank) {
    if (rank == 0) return exchange(0);
    ranks[1].refuse_call("ringattn: kv must be good, got bad");
  })[0] == "ringattn: rank 1: kv must be good, got bad");
  CHECK(ranks.at_once(exchange) == kNothing2);
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 4); }) == kNothing2);
  const auto said = ranks.at_once([&](int64_t rank) {
    if (rank == 0) return exchange(0);
    begin(ranks[1], 8);
  });
  const std::string sentence =
      "ringattn: ranks must agree on operator, got gather on rank 0 and call on rank 1";
  CHECK(said == std::vector<std::string>(2, sentence));
  CHECK(ranks.at_once(exchange) == kNothing2);
}

TEST_CASE("the store keeps one word of agreement for each rank") {
  Ranks ranks(2);
  for (int64_t heads = 1; heads <= 20; ++heads) {
    CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], heads); }) == kNothing2);
  }
  CHECK(ranks.store.size() <= 4);
}

TEST_CASE("kinds of calls without number are agreed on, and not all remembered") {
  Ranks ranks(2);
  constexpr int64_t kKinds = CallAgreement::kMaxAgreed + 1;
  const auto said = ranks.at_once([&](int64_t rank) {
    for (int64_t heads = 1; heads <= kKinds; ++heads) begin(ranks[rank], heads);
  });
  CHECK(said == kNothing2);
  for (const int64_t rank : {0, 1}) {
    CHECK(ranks[rank].agreement().knows(call(kKinds)));
    CHECK(!ranks[rank].agreement().knows(call(1)));
  }
  CHECK(ranks.at_once([&](int64_t rank) { begin(ranks[rank], 1); }) == kNothing2);
}

TEST_CASE("tensors of a group come on one device of a type, with a backend where it carries them") {
  Ranks ranks(2);
  CHECK_NOTHROW(ranks[0].check_device(c10::kCPU));
  CHECK_NOTHROW(ranks[0].check_device(c10::Device(c10::kCUDA, 1), "symmetric"));
  const auto said = ranks.at_once(
      {0}, [&](int64_t) { ranks[0].check_device(c10::Device(c10::kCUDA, 1), "process_group"); });
  CHECK(contains(said[0], "group must have a backend for tensors on cuda, got one that has none"));
}

TEST_CASE("what an operator keeps for a group is the group's own, and freed with it") {
  struct Kept {
    std::shared_ptr<int> value;
  };
  Ranks ranks(2);
  ranks[0].state<Kept>().value = std::make_shared<int>(7);
  const std::weak_ptr<int> value = ranks[0].state<Kept>().value;
  CHECK(*value.lock() == 7);
  CHECK(ranks[1].state<Kept>().value == nullptr);
  ranks.groups[0].reset();
  CHECK(value.expired());
}

// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "core/environment.h"
#include "core/process_singleton.h"

namespace ringattn {
namespace {

void write_to_stderr(LogLevel level, const std::string& line) {
  std::fprintf(stderr, "ringattn: %s\n", line.c_str());
}

using Sink = void (*)(LogLevel level, const std::string& line);

// Apart from the queue: a forked child keeps the sink.
std::atomic<Sink> installed_sink{nullptr};

// Lines on their way to the sink.
class LogQueue {
 public:
  void push(LogLevel level, const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!running_) running_ = start();
    if (!running_) return write_to_stderr(level, line);
    lines_.emplace_back(level, line);
    changed_.notify_all();
  }

  void wait_until_empty() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return lines_.empty() && !writing_; });
  }

 private:
  bool start() {
    try {
      std::thread([this] { run(); }).detach();
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !lines_.empty(); });
      const auto [level, line] = std::move(lines_.front());
      lines_.pop_front();
      const Sink sink = installed_sink;
      writing_ = true;
      lock.unlock();
      (sink != nullptr ? sink : &write_to_stderr)(level, line);
      lock.lock();
      writing_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<LogLevel, std::string>> lines_;
  bool running_ = false, writing_ = false;
};

}  // namespace

bool logs_info() { return environment().logs_info; }

void log(LogLevel level, const std::string& line) {
  if (installed_sink == nullptr) return write_to_stderr(level, line);
  process_singleton<LogQueue>().push(level, line);
}

void log_info_once(const char* line) {
  if (!logs_info()) return;
  struct Said {
    std::mutex mutex;
    std::set<std::string> lines;
  };
  Said& said = process_singleton<Said>();
  const std::lock_guard<std::mutex> lock(said.mutex);
  if (said.lines.insert(line).second) log(LogLevel::kInfo, line);
}

void set_log_sink(Sink sink) {
  installed_sink = sink;
  process_singleton<LogQueue>().wait_until_empty();
}

}  // namespace ringattn

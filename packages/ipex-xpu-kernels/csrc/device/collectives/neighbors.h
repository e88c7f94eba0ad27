// SPDX-License-Identifier: Apache-2.0
// Processes of a group that share a host: memory of the device that all of them reach, and a place
// to wait for each other.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ipex::xpu {

class Neighbors {
 public:
  // Null where the processes of the group cannot reach each other's memory. All of them must call
  // it, and get the same answer. `shared_host_memory`: also on a device whose memory is the host's.
  static std::unique_ptr<Neighbors> meet(c10d::Backend& backend, int device,
                                         bool shared_host_memory);
  Neighbors(const Neighbors&) = delete;
  Neighbors& operator=(const Neighbors&) = delete;
  ~Neighbors();

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Bytes of each of the two halves of a process's memory: one is written while the others may
  // still read the other one. What the host shares is often limited to 64 MB.
  std::size_t half() const { return (on_host_ ? std::size_t{2} : std::size_t{32}) << 20; }
  std::byte* memory(int rank, int half_number) const {
    return memory_[static_cast<std::size_t>(rank)] + static_cast<std::size_t>(half_number) * half();
  }

  // Returns when all processes have called it equally often. Throws c10::Error when a process has
  // ended or failed, after the timeout, and when `stop` becomes true.
  void wait(std::chrono::milliseconds timeout, const std::atomic<bool>& stop);
  // Lets the others fail in wait(): this process will not come any more.
  void fail();
  // This process reads from the others no more. Whether they read from it no more either, so that
  // its memory may go.
  bool leave();

 private:
  static constexpr int kMost = 64;  // processes
  struct alignas(64) Counter {
    std::atomic<std::uint32_t> met;
    std::atomic<std::uint32_t> failed;
    std::atomic<std::uint32_t> left;
  };
  // What a process tells the others.
  struct Card {
    std::array<char, 64> host{};
    std::array<char, 64> file{};
    std::int64_t process = 0;
    std::uint32_t able = 0;
    std::uint32_t handle_size = 0;
    std::array<std::byte, 512> handle{};
  };

  Neighbors(int rank, int size, int device) : rank_(rank), size_(size), device_(device) {}
  static std::vector<Card> exchange(c10d::Backend& backend, const Card& mine);
  bool open_file(const char* name, bool create);
  bool offer_memory(Card& card);
  bool reach(const std::vector<Card>& cards);
  void close_others();
  void check(int rank, std::chrono::steady_clock::time_point deadline,
             const std::atomic<bool>& stop) const;

  int rank_, size_, device_;
  bool on_host_ = false;  // the memory is part of the file
  bool watched_ = false;  // the others can be seen by their numbers
  std::uint32_t turn_ = 0;
  std::byte* file_ = nullptr;
  std::size_t file_size_ = 0;
  std::array<std::int64_t, kMost> processes_{};
  std::array<std::byte*, kMost> memory_{};
};

}  // namespace ipex::xpu

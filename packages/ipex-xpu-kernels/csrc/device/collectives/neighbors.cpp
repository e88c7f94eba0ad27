// SPDX-License-Identifier: Apache-2.0
#include "device/collectives/neighbors.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <sycl/ext/oneapi/experimental/ipc_memory.hpp>
#include <thread>

#include "core/core.h"

namespace ipex::xpu {
namespace {

namespace ipc = sycl::ext::oneapi::experimental::ipc_memory;

bool gives_memory(int device) {
  return sycl_device(device).has(sycl::aspect::ext_oneapi_ipc_memory);
}

// The same for all programs between two starts of a machine.
void read_host(std::array<char, 64>& to) {
  std::FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re");
  if (file == nullptr) return;
  if (std::fgets(to.data(), static_cast<int>(to.size()), file) == nullptr) to[0] = 0;
  std::fclose(file);
}

// A process that has ended is there until its parent asks for it: in the state Z.
bool is_there(std::int64_t process) {
  if (::kill(static_cast<pid_t>(process), 0) != 0 && errno != EPERM) return false;
  char line[512] = "";
  const std::string name = "/proc/" + std::to_string(process) + "/stat";
  if (std::FILE* file = std::fopen(name.c_str(), "re")) {
    if (std::fgets(line, sizeof(line), file) == nullptr) line[0] = 0;
    std::fclose(file);
  }
  // The name of the program is in parentheses and may have some itself.
  const char* end = std::strrchr(line, ')');
  return end == nullptr || (end[2] != 'Z' && end[2] != 'X');
}

}  // namespace

std::vector<Neighbors::Card> Neighbors::exchange(c10d::Backend& backend, const Card& mine) {
  const auto size = static_cast<std::int64_t>(sizeof(Card));
  std::vector<at::Tensor> source{at::empty({size}, at::kByte)};
  std::memcpy(source[0].mutable_data_ptr(), &mine, sizeof(Card));
  std::vector<std::vector<at::Tensor>> all(1);
  for (int r = 0; r < backend.getSize(); ++r) all[0].push_back(at::empty({size}, at::kByte));
  backend.allgather(all, source)->wait();
  std::vector<Card> cards(all[0].size());
  for (std::size_t r = 0; r < cards.size(); ++r)
    std::memcpy(&cards[r], all[0][r].const_data_ptr(), sizeof(Card));
  return cards;
}

// Memory that the system has promised: a page that it cannot provide later would end the process.
bool Neighbors::open_file(const char* name, bool create) {
  const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT | O_EXCL : 0);
  const int file = ::open(name, flags, S_IRUSR | S_IWUSR);
  if (file < 0) return false;
  const std::size_t parts = static_cast<std::size_t>(size_);
  file_size_ = kMost * sizeof(Counter) + (on_host_ ? parts * 2 * half() : 0);
  if (!create || ::posix_fallocate(file, 0, static_cast<off_t>(file_size_)) == 0) {
    void* at = ::mmap(nullptr, file_size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at != MAP_FAILED) file_ = static_cast<std::byte*>(at);
  }
  ::close(file);
  return file_ != nullptr;
}

bool Neighbors::offer_memory(Card& card) {
  if (on_host_) return true;
  auto* memory =
      sycl::malloc_device<std::byte>(2 * half(), sycl_device(device_), sycl_context(device_));
  if (memory == nullptr) return false;
  memory_[static_cast<std::size_t>(rank_)] = memory;
  ipc::handle handle = ipc::get(memory, sycl_context(device_));
  const ipc::handle_data_t data = handle.data();
  if (data.size() > card.handle.size()) return false;
  std::copy(data.begin(), data.end(), card.handle.begin());
  card.handle_size = static_cast<std::uint32_t>(data.size());
  return true;
}

bool Neighbors::reach(const std::vector<Card>& cards) {
  watched_ = true;
  for (int r = 0; r < size_; ++r) {
    const auto i = static_cast<std::size_t>(r);
    const Card& card = cards[i];
    processes_[i] = card.process;
    watched_ = watched_ && is_there(card.process);
    if (on_host_) {
      memory_[i] = file_ + kMost * sizeof(Counter) + i * 2 * half();
    } else if (r != rank_) {
      const ipc::handle_data_t data(card.handle.begin(), card.handle.begin() + card.handle_size);
      memory_[i] =
          static_cast<std::byte*>(ipc::open(data, sycl_context(device_), sycl_device(device_)));
    }
  }
  return true;
}

std::unique_ptr<Neighbors> Neighbors::meet(c10d::Backend& backend, int device,
                                           bool shared_host_memory) {
  const int size = backend.getSize();
  if (size < 2 || size > kMost) return nullptr;
  std::unique_ptr<Neighbors> result(new Neighbors(backend.getRank(), size, device));
  result->on_host_ = !gives_memory(device) && device_info(device).host_accessible;
  Card mine;
  // A step that fails here must fail everywhere, so each one is told.
  const auto all_are_able = [&](const std::vector<Card>& cards) {
    return std::all_of(cards.begin(), cards.end(), [&](const Card& card) {
      return card.able == mine.able && card.able != 0 && card.host == mine.host;
    });
  };
  const auto attempt = [&](const auto& step) {
    try {
      if (!step()) mine.able = 0;
    } catch (const std::exception&) {
      mine.able = 0;  // no memory, or a driver that refuses
    }
  };
  read_host(mine.host);
  mine.process = ::getpid();
  mine.able = result->on_host_ ? (shared_host_memory ? 2 : 0) : gives_memory(device) ? 1 : 0;
  static std::atomic<int> groups{0};
  if (result->rank_ == 0 && mine.able != 0) {
    std::snprintf(mine.file.data(), mine.file.size(), "/dev/shm/ipex-xpu-%d-%d", ::getpid(),
                  groups++);
    attempt([&] { return result->open_file(mine.file.data(), true); });
  }
  auto cards = exchange(backend, mine);
  const bool begun = all_are_able(cards);
  if (begun) {
    const std::string name = cards[0].file.data();
    if (result->rank_ != 0) attempt([&] { return result->open_file(name.c_str(), false); });
    if (mine.able != 0) attempt([&] { return result->offer_memory(mine); });
    cards = exchange(backend, mine);
  }
  if (result->rank_ == 0 && mine.file[0] != 0) ::unlink(mine.file.data());
  if (!begun || !all_are_able(cards)) return nullptr;
  attempt([&] { return result->reach(cards); });
  if (!all_are_able(exchange(backend, mine))) return nullptr;
  return result;
}

bool Neighbors::leave() {
  auto* counters = reinterpret_cast<Counter*>(file_);
  close_others();
  counters[rank_].left = 1;
  for (int r = 0; r < size_; ++r) {
    const bool ended = watched_ && !is_there(processes_[static_cast<std::size_t>(r)]);
    if (counters[r].left == 0 && !ended) return false;
  }
  return true;
}

void Neighbors::close_others() {
  for (int r = 0; r < size_; ++r) {
    std::byte*& memory = memory_[static_cast<std::size_t>(r)];
    if (r == rank_ || memory == nullptr) continue;
    try {
      if (!on_host_) ipc::close(memory, sycl_context(device_));
    } catch (const std::exception&) {
      // What is left goes with the process.
    }
    memory = nullptr;
  }
}

Neighbors::~Neighbors() {
  close_others();
  std::byte* memory = memory_[static_cast<std::size_t>(rank_)];
  if (!on_host_ && memory != nullptr) sycl::free(memory, sycl_context(device_));
  if (file_ != nullptr) ::munmap(file_, file_size_);
}

void Neighbors::check(int rank, std::chrono::steady_clock::time_point deadline,
                      const std::atomic<bool>& stop) const {
  const auto i = static_cast<std::size_t>(rank);
  const auto& counter = reinterpret_cast<const Counter*>(file_)[i];
  TORCH_CHECK_WITH(DistBackendError, !stop, "xpu: the process ends while a collective runs");
  TORCH_CHECK_WITH(DistBackendError, counter.failed == 0, "xpu: a collective has failed in rank ",
                   rank, ", which says why");
  TORCH_CHECK_WITH(
      DistBackendError,
      !watched_ || is_there(processes_[i]) || static_cast<std::int32_t>(counter.met - turn_) >= 0,
      "xpu: rank ", rank, " (process ", processes_[i], ") has ended before a collective");
  TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < deadline, "xpu: rank ",
                   rank,
                   " did not come to a collective within the timeout of the group: see whether it "
                   "calls the same collectives, or pass a larger timeout to init_process_group");
}

void Neighbors::wait(std::chrono::milliseconds timeout, const std::atomic<bool>& stop) {
  auto* counters = reinterpret_cast<Counter*>(file_);
  const std::uint32_t turn = ++turn_;
  counters[rank_].met.store(turn, std::memory_order_release);
  const auto begin = std::chrono::steady_clock::now();
  // A group without a timeout has a negative or enormous one.
  const auto most = std::chrono::hours(24 * 365);
  const auto deadline =
      begin + (timeout <= std::chrono::milliseconds(0) || timeout > most ? most : timeout);
  for (int r = 0; r < size_; ++r) {
    for (int turns = 0;
         static_cast<std::int32_t>(counters[r].met.load(std::memory_order_acquire) - turn) < 0;
         ++turns) {
      if (turns < 2000) {
        __builtin_ia32_pause();
      } else if (turns < 2200) {
        ::sched_yield();
      } else {
        check(r, deadline, stop);
        std::this_thread::sleep_for(std::chrono::microseconds(turns < 4000 ? 50 : 1000));
      }
    }
  }
}

void Neighbors::fail() { reinterpret_cast<Counter*>(file_)[rank_].failed = 1; }

}  // namespace ipex::xpu

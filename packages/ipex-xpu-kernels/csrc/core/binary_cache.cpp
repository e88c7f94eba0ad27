// SPDX-License-Identifier: Apache-2.0
#include "binary_cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace ipex::xpu {
namespace {

// FNV-1a. Against accidents, not against attackers: the folder belongs to the user who reads it.
std::uint64_t hash(const void* data, std::size_t size, std::uint64_t start = 0xcbf29ce484222325U) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < size; ++i) start = (start ^ bytes[i]) * 0x100000001b3U;
  return start;
}

struct Header {
  char magic[8] = {'I', 'P', 'E', 'X', 'X', 'P', 'U', '1'};
  std::uint64_t size = 0;
  std::uint64_t checksum = 0;
};

}  // namespace

std::string BinaryCache::key(const std::vector<std::byte>& module,
                             const std::string& driver) const {
  char text[40];
  const std::uint64_t first = hash(module.data(), module.size());
  const std::uint64_t second = hash(driver.data(), driver.size(), first ^ module.size());
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(first),
                static_cast<unsigned long long>(second));
  return text;
}

std::optional<std::vector<unsigned char>> BinaryCache::read(const std::string& key) const {
  if (directory_.empty()) return std::nullopt;
  std::ifstream file(directory_ + "/" + key + ".bin", std::ios::binary);
  if (!file) return std::nullopt;
  Header expected;
  Header header;
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  if (!file || std::memcmp(header.magic, expected.magic, sizeof header.magic) != 0)
    return std::nullopt;
  std::vector<unsigned char> binary((std::istreambuf_iterator<char>(file)),
                                    std::istreambuf_iterator<char>());
  if (binary.size() != header.size || hash(binary.data(), binary.size()) != header.checksum)
    return std::nullopt;
  return binary;
}

bool BinaryCache::write(const std::string& key, const std::vector<unsigned char>& binary) const {
  if (directory_.empty()) return true;
  std::error_code error;
  std::filesystem::create_directories(directory_, error);
  static std::atomic<unsigned> counter{0};
  const std::string target = directory_ + "/" + key + ".bin";
  const std::string temporary =
      target + "." + std::to_string(::getpid()) + "." + std::to_string(counter++);
  Header header;
  header.size = binary.size();
  header.checksum = hash(binary.data(), binary.size());
  {
    std::ofstream file(temporary, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&header), sizeof header);
    file.write(reinterpret_cast<const char*>(binary.data()),
               static_cast<std::streamsize>(binary.size()));
    file.close();
    if (!file) {
      std::filesystem::remove(temporary, error);
      return false;
    }
  }
  std::filesystem::rename(temporary, target, error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    return false;
  }
  return true;
}

}  // namespace ipex::xpu
